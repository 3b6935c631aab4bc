"""Bids, eligibility and diversity are part of the search: checked against their definition, ad by ad."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.index.publish import Index
from models.index.scoring import scan_scores
from models.index.search import beam_search, exact_search
from models.index.terms import NO_TERMS, Cap, Terms, auction, open_nodes, over_cap
from tests.models.index.test_search import _case


def _by_definition(
    index: Index, score_S: Tensor, bid_N: Tensor | None, excluded_N: Tensor, cap: Cap | None, k: int
) -> list[int]:
    """Codes of the best ads: one after the other by falling value, while eligible and under the cap."""
    value_S = score_S if bid_N is None else functional.logsigmoid(score_S) + bid_N[index.ad_code_S].log()
    taken: dict[int, int] = {}
    found: list[int] = []
    for slot in sorted(range(index.num_ads), key=lambda s: (-float(value_S[s]), int(index.ad_id_S[s]))):
        value = int(index.group_SG[slot, cap.group]) if cap is not None else 0
        out = bool(excluded_N[index.ad_code_S[slot]]) or float(value_S[slot]) == float("-inf")
        if out or (cap is not None and value and taken.get(value, 0) >= cap.limit):
            continue
        taken[value] = taken.get(value, 0) + 1
        found.append(int(index.ad_code_S[slot]))
    return found[:k]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), num_ads=st.integers(1, 70), sizes=st.sampled_from([(4,), (4, 4), (3, 2, 3)]),
    k=st.sampled_from([1, 5, 100]), with_bids=st.booleans(), shared=st.booleans(), limit=st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_answers_meet_their_terms_and_a_beam_of_all_nodes_is_the_exact_scan(
    seed: int, num_ads: int, sizes: tuple[int, ...], k: int, with_bids: bool, shared: bool, limit: int | None
) -> None:
    model, _, index, state = _case(seed, num_ads, 3, sizes, None, None)
    generator = torch.Generator().manual_seed(seed)
    bid_N = torch.rand(num_ads, generator=generator) * (torch.rand(num_ads, generator=generator) < 0.8)
    excluded = torch.rand((num_ads,) if shared else (3, num_ads), generator=generator) < 0.4
    cap = None if limit is None else Cap(0, limit)
    terms = Terms(excluded, auction(index, bid_N) if with_bids else None, cap)
    exact = exact_search(model, index, state, k, terms=terms)
    beam = beam_search(model, index, state, beams=index.level_sizes, k=k, terms=terms)
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)
    assert torch.equal(beam.score_BK, exact.score_BK)
    score_BS = scan_scores(model, index, state)
    for row in range(3):
        out_N = excluded if shared else excluded[row]
        wanted = _by_definition(index, score_BS[row], bid_N if with_bids else None, out_N, cap, k)
        assert [c for c in exact.ad_code_BK[row].tolist() if c >= 0] == wanted


def test_nodes_without_an_eligible_ad_are_not_visited() -> None:
    model, _, index, state = _case(1, 60, 2, (4, 4), None, None)
    last = index.levels[-1]
    kept = int(last.node_S[0])
    excluded_N = torch.ones(60, dtype=torch.bool)
    excluded_N[index.ad_code_S[last.node_S == kept]] = False
    found = beam_search(model, index, state, beams=(1, 1), k=3, terms=Terms(excluded_N))
    assert found.beam_LBW[-1].tolist() == [[kept], [kept]]
    assert bool((found.ad_code_BK[:, 0] >= 0).all())
    open_K = open_nodes(index, excluded_N)
    assert open_K[1].nonzero().flatten().tolist() == [kept]
    assert open_nodes(index, excluded_N.expand(2, -1))[0].shape == (2, index.levels[0].num_nodes)


def test_everything_excluded_is_an_empty_answer() -> None:
    model, _, index, state = _case(1, 30, 2, (4, 4), None, None)
    found = beam_search(model, index, state, beams=(2, 2), k=3, terms=Terms(torch.ones(30, dtype=torch.bool)))
    assert found.ad_code_BK.tolist() == [[-1] * 3] * 2


def test_a_dear_ad_is_found_in_a_node_of_little_interest() -> None:
    model, _, index, state = _case(3, 60, 2, (4, 4), None, None)
    bid_N = torch.ones(60)
    last = exact_search(model, index, state, index.num_ads).ad_code_BK[0, -1]
    bid_N[last] = 1e9
    found = beam_search(model, index, state, beams=(1, 1), k=1, terms=Terms(auction=auction(index, bid_N)))
    assert int(found.ad_code_BK[0, 0]) == int(last)


def test_places_over_a_cap_by_hand() -> None:
    _, _, index, _ = _case(2, 12, 1, (4,), None, None)
    index.group_SG[:5, 0] = torch.tensor([7, 7, 0, 7, 3])
    slot_BX, there_BX = torch.tensor([[0, 1, 2, 3, 4], [3, 1, 0, 2, 2]]), torch.ones(2, 5, dtype=torch.bool)
    assert over_cap(index, Cap(0, 1), slot_BX, there_BX).int().tolist() == [[0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]
    there_BX[0, 0] = False
    assert over_cap(index, Cap(0, 1), slot_BX, there_BX).int().tolist()[0] == [0, 0, 0, 1, 0]


def test_bad_terms_are_refused_by_name() -> None:
    _, _, index, _ = _case(2, 12, 1, (4,), None, None)
    bid_N = torch.ones(12)
    bid_N[index.ad_code_S[2]] = -0.5
    with pytest.raises(ValueError, match=rf"bid: -0.5 of ad {int(index.ad_id_S[2])}"):
        auction(index, bid_N)
    with pytest.raises(ValueError, match=r"cap.limit: 0"):
        Terms(cap=Cap(0, 0))
    assert NO_TERMS.cap is None
