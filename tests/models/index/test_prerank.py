"""Pre-ranking: the sketch is what it says, keeps the best by it, and learns to keep what the scorer would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, publish
from models.index.scoring import ad_features, scan_scores
from models.index.search import Beams, beam_search, exact_search
from models.index.sketching import distil_sketch, sketch_sample
from models.index.terms import Cap, Terms
from tests.models.index.small import placed_model, random_index, small_ads, small_users
from tests.models.index.test_covisits import covisiting_model
from tests.models.index.test_search import _case
from tests.models.worlds import make_world

ROWS, K = 6, 5


def _covisiting() -> tuple[RetrievalModel, Index, UserState]:
    model, num_ads = covisiting_model()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.preranker.feature_F.normal_(generator=generator)
        ads, users = small_ads(num_ads, generator), small_users(ROWS, num_ads, generator)
        return model, random_index(model, ads, generator), model.user_state(users, ads)


def _sketched(model: RetrievalModel, index: Index, state: UserState) -> Tensor:
    """Sketched scores [B, S] from the definition: dot product, bias, and a weight a feature."""
    slot_BS = torch.arange(index.num_ads).expand(state.num_rows, -1)
    code_SD, ranker = index.vector_SQd.flatten(1), model.preranker
    with torch.no_grad():
        dot_BS = state.sketch_BP @ ranker.ad(code_SD).T + ranker.ad_bias(code_SD).squeeze(1)
        return dot_BS + torch.einsum("f,fbs->bs", ranker.feature_F, ad_features(index, state, slot_BS))


def test_sketched_scores_follow_their_definition() -> None:
    model, index, state = _covisiting()
    sketch = model.preranker.sketch(state.sketch_BP, state.interest, index.slot_N, index.num_ads)
    slot_BM = torch.randint(index.num_ads, (ROWS, 40), generator=torch.Generator().manual_seed(0))
    found_BM = sketch.scores(index.sketch_SP, index.sketch_bias_S, index.group_SG, slot_BM)
    torch.testing.assert_close(found_BM, _sketched(model, index, state).gather(1, slot_BM))


def test_the_best_by_the_sketch_are_scored_and_nothing_barred_takes_a_place() -> None:
    model, index, state = _covisiting()
    excluded_N = torch.zeros(state.interest.num_ads, dtype=torch.bool)
    excluded_N[::3] = True
    leaf_S = index.levels[-1].node_S
    excluded_N[index.ad_code_S[leaf_S == leaf_S[0]]] = True
    # Leaves without an ad that may be answered are not visited.
    open_K = torch.zeros(index.level_sizes[-1], dtype=torch.bool).index_fill(
        0, leaf_S[~excluded_N[index.ad_code_S]], True
    )
    visited = int(open_K[leaf_S].sum())
    assert visited < index.num_ads
    found = beam_search(
        model, index, state, beams=(*index.level_sizes, 0, 4), k=K, terms=Terms(excluded_N)
    )  # fmt: skip
    exact = exact_search(model, index, state, index.num_ads)
    barred_BS = excluded_N[index.ad_code_S] | state.interest.holds(index.ad_code_S.expand(ROWS, -1))
    kept_BX = _sketched(model, index, state).masked_fill(barred_BS, -torch.inf).topk(K + 4, dim=1).indices
    for row in range(ROWS):
        kept = set(index.ad_code_S[kept_BX[row]].tolist())
        assert found.ad_code_BK[row].tolist() == [c for c in exact.ad_code_BK[row].tolist() if c in kept][:K]
    assert found.ads_scored_B.tolist() == [K + 4] * ROWS
    assert found.ads_preranked_B.tolist() == [visited] * ROWS
    cost = candidate_cost(model.config, len(model.schema.groups))
    flops = sum(n * each for n, each in zip(index.level_sizes, cost.node_L, strict=True))
    flops += (K + 4) * cost.ad + visited * cost.sketch
    assert found.cost_B.tolist() == pytest.approx([flops / (index.num_ads * cost.ad)] * ROWS)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_cap_is_met_beyond_the_spare_ads(limit: int) -> None:
    model, index, state = _covisiting()
    terms, k = Terms(cap=Cap(0, limit)), 12
    exact = exact_search(model, index, state, k, terms=terms)
    found = beam_search(model, index, state, beams=(*index.level_sizes, 0, 1), k=k, terms=terms)
    assert torch.equal(found.ad_code_BK >= 0, exact.ad_code_BK >= 0)
    assert int(found.ads_scored_B.max()) > k + 1, "no request needed more than the spare ads"
    plain = beam_search(model, index, state, beams=(*index.level_sizes, 0, 1), k=k)
    assert plain.ads_scored_B.tolist() == [k + 1] * ROWS


def test_related_ads_pass_through_the_sketch_too() -> None:
    model, index, state = _covisiting()
    narrow = (1,) * len(index.levels)
    everything = beam_search(model, index, state, beams=(*narrow, 8), k=index.num_ads)
    spared = beam_search(model, index, state, beams=(*narrow, 8, 2), k=K)
    assert torch.equal(spared.ads_preranked_B, everything.ads_scored_B)
    assert int(spared.ads_scored_B.max()) == K + 2
    for some, more in zip(spared.ad_code_BK, everything.ad_code_BK, strict=True):
        assert set(some.tolist()) <= {-1, *more.tolist()}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), num_ads=st.integers(1, 70), k=st.sampled_from([1, 5, 100]),
    sizes=st.sampled_from([(4,), (4, 4), (3, 2, 3)]), with_excluded=st.booleans(),
)  # fmt: skip
def test_a_beam_of_all_nodes_that_spares_no_ad_is_the_exact_scan(
    seed: int, num_ads: int, k: int, sizes: tuple[int, ...], with_excluded: bool
) -> None:
    model, _, index, state = _case(seed, num_ads, 3, sizes, None, None)
    excluded = torch.rand((3, num_ads), generator=torch.Generator().manual_seed(seed)) < 0.4
    terms = Terms(excluded if with_excluded else None)
    exact = exact_search(model, index, state, k, terms=terms)
    beam = beam_search(model, index, state, beams=(*index.level_sizes, 0, num_ads), k=k, terms=terms)
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)
    assert torch.equal(beam.score_BK, exact.score_BK)


def test_the_sketch_learns_which_ads_are_best_and_on_which_scale() -> None:
    world = make_world(num_users=300, num_ads=400, num_days=1, rows_per_day=2000)
    data, model = world.days[0], placed_model(world.schema, world.days[0].ads)
    index = publish(model, data.ads)
    rows = data.rows()[:64]
    with torch.no_grad():
        state = model.user_state(data.user_batch(rows), data.ads)
        score_BS = scan_scores(model, index, state)
    best_BK = score_BS.topk(10, dim=1).indices

    def kept() -> tuple[float, Tensor]:
        sketched_BS = _sketched(model, publish(model, data.ads), state_of())
        inside = torch.zeros_like(score_BS).scatter(1, sketched_BS.topk(40, dim=1).indices, 1.0)
        return float(inside.gather(1, best_BK).mean()), sketched_BS

    def state_of() -> UserState:
        with torch.no_grad():
            return model.user_state(data.user_batch(rows), data.ads)

    before, _ = kept()
    distil_sketch(model, index, data, seed=0)
    weights = {name: value.clone() for name, value in model.preranker.state_dict().items()}
    after, sketched_BS = kept()
    assert before < 0.4 < 0.9 < after
    gap_BK = (sketched_BS - score_BS).gather(1, best_BK)
    spread = score_BS.gather(1, best_BK).std(dim=1).mean()
    assert float(gap_BK.mean().abs()) < 0.5 * float(score_BS.std())
    assert float(gap_BK.std(dim=1).mean()) < 2.0 * float(spread)
    assert not any(p.requires_grad for p in model.preranker.parameters())
    again = placed_model(world.schema, data.ads)
    distil_sketch(again, index, data, seed=0)
    for name, value in again.preranker.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_sample_holds_the_best_first_and_counts_nothing_twice() -> None:
    world = make_world(num_users=50, num_ads=60, num_days=1, rows_per_day=200)
    data, model = world.days[0], placed_model(world.schema, world.days[0].ads)
    index = publish(model, data.ads)
    sample = sketch_sample(model, index, data, data.rows()[:8], torch.Generator().manual_seed(0))
    with torch.no_grad():
        score_XS = scan_scores(model, index, model.user_state(data.user_batch(data.rows()[:8]), data.ads))
    assert torch.equal(sample.score_XJ[:, : sample.num_best], score_XS.topk(sample.num_best, dim=1).values)
    for slot_J, score_J in zip(sample.slot_XJ, sample.score_XJ, strict=True):
        best = set(slot_J[: sample.num_best].tolist())
        drawn, value = slot_J[sample.num_best :].tolist(), score_J[sample.num_best :].tolist()
        assert all((s in best) == (v == -float("inf")) for s, v in zip(drawn, value, strict=True))


def test_beams_read_as_words() -> None:
    assert str(Beams.parse((4, 8), 2)) == "4 x 8 nodes, every ad"
    assert str(Beams.parse((6, 16, 20), 1)) == "6 nodes, 16 related, 20 spare"
    assert str(Beams.parse((6, 0, 20), 1)) == "6 nodes, 20 spare"


@pytest.mark.parametrize("beams", [(2,), (2, 0), (2, 2, -1), (2, 2, 0, -1), (2, 2, 0, 0, 0)])
def test_beams_that_do_not_fit_are_named(beams: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"beams: \({', '.join(map(str, beams))},?\)"):
        Beams.parse(beams, 2)
