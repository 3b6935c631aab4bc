from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from models.batch import AdTable
from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, publish
from models.index.scoring import scan_scores
from models.index.search import beam_search, exact_search
from models.index.terms import Terms
from tests.models.index.small import random_index, small_ads, small_model, small_users

cached_model = functools.lru_cache(small_model)


def _case(
    seed: int, num_ads: int, num_rows: int, sizes: tuple[int, ...], num_distinct: int | None, num_used: int | None
) -> tuple[RetrievalModel, AdTable, Index, UserState]:
    generator = torch.Generator().manual_seed(seed)
    model, ads = cached_model(sizes), small_ads(num_ads, generator, num_distinct=num_distinct)
    if num_ads > 4:
        ads.retired_N[torch.randint(num_ads, (num_ads // 4,), generator=generator)] = True
    index = random_index(model, ads, generator, num_used)
    with torch.no_grad():
        state = model.user_state(small_users(num_rows, num_ads, generator), ads)
    return model, ads, index, state


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_ads=st.integers(1, 70),
    num_rows=st.integers(1, 5),
    sizes=st.sampled_from([(4,), (4, 4), (3, 2, 3)]),
    num_distinct=st.sampled_from([None, 1, 3, 10]),
    num_used=st.sampled_from([None, 1, 2]),
    k=st.sampled_from([1, 3, 10, 100]),
    with_excluded=st.booleans(),
)
def test_a_beam_of_all_nodes_is_the_exact_scan(
    seed: int, num_ads: int, num_rows: int, sizes: tuple[int, ...], num_distinct: int | None, num_used: int | None,
    k: int, with_excluded: bool,
) -> None:  # fmt: skip
    model, ads, index, state = _case(seed, num_ads, num_rows, sizes, num_distinct, num_used)
    excluded = None
    if with_excluded:
        excluded = torch.rand(num_rows, num_ads, generator=torch.Generator().manual_seed(seed)) < 0.3
    exact = exact_search(model, index, state, k, terms=Terms(excluded=excluded))
    beam = beam_search(model, index, state, beams=index.level_sizes, k=k, terms=Terms(excluded=excluded))
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)
    assert_close(beam.score_BK, exact.score_BK, rtol=1e-6, atol=0.0)
    assert exact.ad_code_BK.shape == (num_rows, k)
    for row in range(num_rows):
        found = exact.ad_code_BK[row][exact.ad_code_BK[row] >= 0]
        allowed = ~ads.retired_N if excluded is None else ~ads.retired_N & ~excluded[row]
        assert len(torch.unique(found)) == len(found) == min(k, int(allowed.sum()))
        assert bool(allowed[found].all())


def _reference(model: RetrievalModel, ads: AdTable, index: Index, state: UserState) -> Tensor:
    """Serving scores [B, S] pair by pair, from the definition."""
    weight_LL = model.ensemble_weights()
    score_BS = torch.zeros(state.num_rows, index.num_ads)
    for row in range(state.num_rows):
        one = state.rows(torch.tensor([row]))
        for slot in range(index.num_ads):
            code = index.ad_code_S[slot][None]
            feature = torch.cat([one.interest.shared(ads.group_NG[code]), one.interest.seen(code[None])])
            over = model.level(len(index.levels))
            total = float(over.shared(one.levels[-1], index.vector_SQd[slot][None], feature))
            for number, level in enumerate(index.levels):
                node = level.node_S[slot][None]
                values = one.interest.shared_nodes(level.value_KGR[node], level.weight_KGR[node])
                visits = one.interest.visits(level.node_N, level.num_nodes)[:, :, node]
                vector = model.as_vectors(model.index.node_vectors(level.path_KL[node]))
                logit = model.level(number).shared(one.levels[number], vector, torch.cat([values, visits]))
                total += float(weight_LL[-1, number]) * float(logit)
            score_BS[row, slot] = total
    return score_BS


def test_scan_scores_follow_their_definition() -> None:
    model, ads, index, state = _case(5, 30, 3, (4, 4), None, None)
    with torch.no_grad():
        expected_BS = _reference(model, ads, index, state)
    assert_close(scan_scores(model, index, state), expected_BS, rtol=1e-4, atol=1e-4)
    best = exact_search(model, index, state, 4)
    assert torch.equal(best.ad_code_BK, index.ad_code_S[expected_BS.topk(4, dim=1).indices])


def test_ties_are_broken_by_ad_id() -> None:
    model, ads, index, state = _case(1, 40, 2, (4, 4), 1, 1)
    result = exact_search(model, index, state, 12)
    score_K = result.score_BK[0].tolist()
    for better, worse in itertools.pairwise(range(12)):
        if score_K[better] == score_K[worse]:
            ids = ads.ad_id_N[result.ad_code_BK[0, [better, worse]]].tolist()
            assert ids[0] < ids[1]
    assert len(set(score_K)) < 12


def test_a_narrow_beam_scores_less_and_returns_only_its_leaves() -> None:
    model, _, index, state = _case(2, 60, 4, (4, 4), None, None)
    narrow = beam_search(model, index, state, beams=(1, 2), k=5)
    wide = beam_search(model, index, state, beams=(3, 8), k=5)
    assert (narrow.ads_scored_B < wide.ads_scored_B).all()
    assert (narrow.cost_B < wide.cost_B).all()
    leaf_N = index.levels[-1].node_N
    for row in range(4):
        found = narrow.ad_code_BK[row][narrow.ad_code_BK[row] >= 0]
        assert set(leaf_N[found].tolist()) <= set(narrow.beam_LBW[-1][row].tolist())
    assert narrow.beam_LBW[0].shape == (4, 1)


def test_counts_and_cost_of_a_beam() -> None:
    model, _, index, state = _case(3, 60, 2, (4, 4), None, None)
    result = beam_search(model, index, state, beams=(1, 1), k=3)
    upper, lower = index.levels
    for row in range(2):
        root, leaf = int(result.beam_LBW[0][row, 0]), int(result.beam_LBW[1][row, 0])
        num_children = int(upper.child_start_K1[root + 1] - upper.child_start_K1[root])
        num_ads = int(lower.child_start_K1[leaf + 1] - lower.child_start_K1[leaf])
        assert int(result.nodes_scored_B[row]) == upper.num_nodes + num_children
        assert int(result.ads_scored_B[row]) == num_ads
        cost = candidate_cost(model.config, 2)
        flops = upper.num_nodes * cost.node_L[0] + num_children * cost.node_L[1] + num_ads * cost.ad
        assert float(result.cost_B[row]) == pytest.approx(flops / (index.num_ads * cost.ad))


def test_the_ad_scorer_ignores_paths() -> None:
    model, ads, index, state = _case(4, 40, 3, (4, 4), None, None)
    generator = torch.Generator().manual_seed(99)
    other = random_index(model, ads, generator)
    one = exact_search(model, index, state, 10, ad_scorer=True)
    two = exact_search(model, other, state, 10, ad_scorer=True)
    assert torch.equal(one.ad_code_BK, two.ad_code_BK)
    assert one.cost_B.tolist() == [1.0, 1.0, 1.0]
    assert not torch.equal(exact_search(model, index, state, 10).score_BK, one.score_BK)


def test_a_bitmap_of_all_requests_excludes_ads() -> None:
    model, _, index, state = _case(6, 40, 3, (4, 4), None, None)
    best = exact_search(model, index, state, 3)
    excluded = torch.zeros(40, dtype=torch.bool)
    excluded[best.ad_code_BK[:, 0]] = True
    again = beam_search(model, index, state, beams=index.level_sizes, k=3, terms=Terms(excluded=excluded))
    assert not torch.isin(again.ad_code_BK, best.ad_code_BK[:, 0]).any()


def test_requests_in_a_batch_are_answered_as_alone() -> None:
    model, _, index, state = _case(7, 60, 5, (4, 4), None, None)
    together = beam_search(model, index, state, beams=(2, 4), k=6)
    for row in range(5):
        alone = beam_search(model, index, state.rows(torch.tensor([row])), beams=(2, 4), k=6)
        assert torch.equal(alone.ad_code_BK[0], together.ad_code_BK[row])
        assert int(alone.ads_scored_B) == int(together.ads_scored_B[row])


def test_wrong_arguments_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(10, generator)
    index, state = publish(model, ads), model.user_state(small_users(1, 10, generator), ads)
    with pytest.raises(ValueError, match="k: 0"):
        exact_search(model, index, state, 0)
    with pytest.raises(ValueError, match="beams"):
        beam_search(model, index, state, beams=(1,), k=1)
    with pytest.raises(ValueError, match="beams"):
        beam_search(model, index, state, beams=(1, 0), k=1)
