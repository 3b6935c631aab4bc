"""Ads related to the history are scored beside the beam: found, counted in the cost, and never twice."""

import pytest
import torch

from models.index.audit import RELATED, choices_to_sweep
from models.index.cost import candidate_cost
from models.index.covisits import mixed
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index
from models.index.search import beam_search, exact_search
from models.index.terms import Terms, auction
from tests.models.index.test_covisits import covisiting_model, random_index, small_ads, small_users

ROWS, K = 6, 10


def _case() -> tuple[RetrievalModel, Index, UserState]:
    model, num_ads = covisiting_model()
    generator = torch.Generator().manual_seed(2)
    ads, users = small_ads(num_ads, generator), small_users(ROWS, num_ads, generator)
    with torch.no_grad():
        return model, random_index(model, ads, generator), model.user_state(users, ads)


def test_a_beam_of_all_nodes_needs_no_related_ads() -> None:
    model, index, state = _case()
    exact = exact_search(model, index, state, K)
    beam = beam_search(model, index, state, beams=(*index.level_sizes, 50), k=K)
    assert torch.equal(beam.ad_code_BK, exact.ad_code_BK)
    assert torch.equal(beam.score_BK, exact.score_BK)
    assert torch.equal(beam.cost_B, beam_search(model, index, state, beams=index.level_sizes, k=K).cost_B)


def test_the_most_related_ads_join_the_answer_with_their_serving_scores_and_cost() -> None:
    model, index, state = _case()
    narrow = (1,) * len(index.levels)
    plain = beam_search(model, index, state, beams=narrow, k=index.num_ads)
    joined = beam_search(model, index, state, beams=(*narrow, 3), k=index.num_ads)
    exact = exact_search(model, index, state, index.num_ads)
    key_Z, value_ZK = state.interest.related_pairs
    value_BN = torch.zeros(ROWS * state.interest.num_ads).index_put((key_Z,), mixed(value_ZK.T)).view(ROWS, -1)
    cost = candidate_cost(model.config, len(model.schema.groups))
    for row in range(ROWS):
        before, after = ({c for c in r.ad_code_BK[row].tolist() if c >= 0} for r in (plain, joined))
        added = after - before
        assert before <= after
        leaf = int(plain.beam_LBW[-1][row, 0])
        inside = set(index.ad_code_S[index.levels[-1].node_S == leaf].tolist())
        score = dict(zip(exact.ad_code_BK[row].tolist(), exact.score_BK[row].tolist(), strict=True))
        candidates = [c for c in score if c >= 0 and c not in inside and value_BN[row, c] > 0.0]
        wanted = sorted(candidates, key=lambda c: -float(value_BN[row, c]))[:3]
        assert sorted(float(value_BN[row, c]) for c in added) == pytest.approx(
            sorted(float(value_BN[row, c]) for c in wanted)
        )
        for code, value in zip(joined.ad_code_BK[row].tolist(), joined.score_BK[row].tolist(), strict=True):
            assert code < 0 or value == score[code]
        number = len(wanted)
        assert int(joined.ads_scored_B[row] - plain.ads_scored_B[row]) == number
        assert int(joined.nodes_scored_B[row] - plain.nodes_scored_B[row]) == number * (len(index.levels) - 1)
        flops = number * (cost.ad + sum(cost.node_L[1:]))
        assert float(joined.cost_B[row] - plain.cost_B[row]) == pytest.approx(flops / (index.num_ads * cost.ad))
    assert int((joined.ads_scored_B - plain.ads_scored_B).max()) == 3, "no request had related ads outside its beam"


@pytest.mark.parametrize("by", ["request", "all requests", "bid"])
def test_forbidden_ads_take_no_place_among_the_related(by: str) -> None:
    model, index, state = _case()
    narrow, count = (1,) * len(index.levels), 3
    plain = beam_search(model, index, state, beams=narrow, k=index.num_ads)
    key_Z, value_ZK = state.interest.related_pairs
    value_BN = torch.zeros(ROWS * state.interest.num_ads).index_put((key_Z,), mixed(value_ZK.T)).view(ROWS, -1)
    value_BN *= ~state.interest.holds(torch.arange(value_BN.shape[1]).expand(ROWS, -1))
    leaf_N = index.levels[-1].node_N
    # The most related ads of every request may not be shown.
    best_BR = (value_BN * (leaf_N != plain.beam_LBW[-1])).topk(count, dim=1).indices
    forbidden_BN = torch.zeros(value_BN.shape, dtype=torch.bool).scatter(1, best_BR, True)
    if by != "request":
        forbidden_BN[:] = forbidden_BN[:1]
    bid_N = 1.0 - forbidden_BN[0].float()
    terms = {
        "request": Terms(forbidden_BN), "all requests": Terms(forbidden_BN[0]),
        "bid": Terms(auction=auction(index, bid_N)),
    }[by]  # fmt: skip
    joined = beam_search(model, index, state, beams=(*narrow, count), k=index.num_ads, terms=terms)
    left_BN = value_BN * ~forbidden_BN * (leaf_N != joined.beam_LBW[-1])
    assert int((left_BN > 0.0).sum(1).max()) >= count, "no request has more related ads than places"
    for left_N, code_K in zip(left_BN, joined.ad_code_BK, strict=True):
        wanted = left_N.topk(min(count, int((left_N > 0.0).sum()))).indices.tolist()
        assert set(wanted) <= set(code_K.tolist())


def test_a_wrong_number_of_related_ads_is_named() -> None:
    model, index, state = _case()
    with pytest.raises(ValueError, match="related ads"):
        beam_search(model, index, state, beams=(*index.level_sizes, -1), k=1)


def test_sweeps_try_related_ads_where_the_model_counts_co_visits() -> None:
    model, index, _ = _case()
    choices = choices_to_sweep(model, index, max_cost=9.0)
    assert {c[-2] for c in choices} == set(RELATED)
    model.covisits = None
    assert {c[-2] for c in choices_to_sweep(model, index, max_cost=9.0)} == {0}
