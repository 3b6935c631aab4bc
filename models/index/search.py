"""Level-wise batched beam search and the exact scan it is measured against.

The score of an ad is its own logit plus the weighted logits of the nodes on its path; a node's score is made the
same way from its own level and the levels above. `exact_search` scans this serving score over every ad;
`beam_search` visits the children of the best nodes of each level. No step loops over requests.

The last step of both scores a short list again, pair by pair with a fixed order of summation, and breaks ties
by ad id: a beam that holds every node returns the same ads in the same order as the scan.

Shape legend: B requests, L levels, W nodes of a beam, M candidates, K results, Q ad vectors, d width, S slots,
N ad codes, X (row, place) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, NodeLevel

SLACK = 16
"""Results scored again beyond the K asked for."""
ROUNDING = 2e-5
"""Relative difference that two orders of summation may make in a score."""
SCAN_CELLS = 65_536
"""Pairs that a scan scores at a time, so that its intermediate values stay in the cache."""


@dataclass(frozen=True)
class SearchResult:
    """Ads in falling order of score; places that could not be filled hold code -1 and score -inf."""

    ad_code_BK: Tensor
    score_BK: Tensor
    cost_B: Tensor
    """FLOPs relative to a full scan by the ad scorer."""
    nodes_scored_B: Tensor
    ads_scored_B: Tensor
    beam_LBW: tuple[Tensor, ...] = ()
    """Nodes of the beam of every level, best first, -1 where there are fewer."""
    beam_score_LBW: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Beam:
    """Candidates of one level with what their score is made of."""

    node_BM: Tensor
    there_BM: Tensor
    logit_LBM: tuple[Tensor, ...]
    """Logits of the candidate's ancestors, root first, and its own last."""
    score_BM: Tensor


@torch.no_grad()
def beam_search(
    model: RetrievalModel,
    index: Index,
    state: UserState,
    *,
    beams: Sequence[int],
    k: int,
    excluded: Tensor | None = None,
) -> SearchResult:
    """Best `k` ads under the best nodes of each level; `beams` is the number of nodes kept at each level.

    Args:
        excluded: ads that must not be returned (blocked, seen, out of budget): a bitmap of ad codes [N], or one
            a request [B, N].

    Raises:
        ValueError: `k` or a beam is below 1, or `beams` has another length than the index has levels.
    """
    if k < 1:
        raise ValueError(f"k: {k} is not at least 1")
    if len(beams) != len(index.levels) or min(beams) < 1:
        raise ValueError(f"beams: {tuple(beams)} must be {len(index.levels)} numbers of at least 1")
    weight_LL = model.ensemble_weights()
    beam = _root(model, index, state)
    scored, kept_nodes, kept_scores = [beam.there_BM.sum(1)], [], []
    for number, level in enumerate(index.levels):
        beam = _keep(beam, beams[number])
        kept_nodes.append(beam.node_BM.masked_fill(~beam.there_BM, -1))
        kept_scores.append(beam.score_BM)
        node_BM, parent_BM, there_BM = _children(level, beam)
        if number + 1 == len(index.levels):
            logit_BM = _ad_logits(model, index, state, node_BM)
        else:
            logit_BM = _node_logits(model, index, state, number + 1, node_BM)
        above = tuple(logit.gather(1, parent_BM) for logit in beam.logit_LBM)
        score_BM = _ensemble(weight_LL[number + 1], logit_BM, above).masked_fill(~there_BM, -torch.inf)
        beam = _Beam(node_BM, there_BM, (*above, logit_BM), score_BM)
        scored.append(there_BM.sum(1))
    code_BK, score_BK = _finish(model, index, state, beam.node_BM, beam.score_BM, k, excluded, ensemble=True)
    nodes_BL, ads_B = torch.stack(scored[:-1], dim=1), scored[-1]
    cost = candidate_cost(model.config, len(model.schema.groups))
    return SearchResult(
        ad_code_BK=code_BK,
        score_BK=score_BK,
        cost_B=cost.request(nodes_BL, ads_B, index.num_ads),
        nodes_scored_B=nodes_BL.sum(1),
        ads_scored_B=ads_B,
        beam_LBW=tuple(kept_nodes),
        beam_score_LBW=tuple(kept_scores),
    )


@torch.no_grad()
def exact_search(
    model: RetrievalModel,
    index: Index,
    state: UserState,
    k: int,
    *,
    excluded: Tensor | None = None,
    ad_scorer: bool = False,
) -> SearchResult:
    """Best `k` ads by a full scan of the serving score, or of the ad's own logit alone (`ad_scorer`).

    Raises:
        ValueError: `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"k: {k} is not at least 1")
    score_BS = scan_scores(model, index, state, ad_scorer=ad_scorer)
    num_rows = state.num_rows
    slot_BS = torch.arange(index.num_ads, device=score_BS.device).expand(num_rows, -1)
    code_BK, score_BK = _finish(model, index, state, slot_BS, score_BS, k, excluded, ensemble=not ad_scorer)
    num_nodes = 0 if ad_scorer else sum(index.level_sizes)
    nodes_BL = score_BS.new_zeros((num_rows, len(index.levels)))
    if not ad_scorer:
        nodes_BL = nodes_BL + score_BS.new_tensor(index.level_sizes)
    ads_B = torch.full((num_rows,), index.num_ads, device=score_BS.device)
    cost = candidate_cost(model.config, len(model.schema.groups))
    return SearchResult(
        ad_code_BK=code_BK,
        score_BK=score_BK,
        cost_B=cost.request(nodes_BL, ads_B, index.num_ads),
        nodes_scored_B=torch.full_like(ads_B, num_nodes),
        ads_scored_B=ads_B,
    )


@torch.no_grad()
def scan_scores(model: RetrievalModel, index: Index, state: UserState, *, ad_scorer: bool = False) -> Tensor:
    """Scores [B, S] of every slot: the serving score, or the ad's own logit alone."""
    over, own_state = model.level(len(index.levels)), state.levels[-1]
    blocks = []
    visits_CBS = state.interest.visits(index.slot_N, index.num_ads)
    width = max(256, SCAN_CELLS // max(1, state.num_rows))
    for first in range(0, index.num_ads, width):
        block = slice(first, first + width)
        feature_FBM = torch.cat([state.interest.shared(index.group_SG[block]), visits_CBS[:, :, block]])
        blocks.append(over.shared(own_state, index.vector_SQd[block], feature_FBM))
    score_BS = torch.cat(blocks, dim=1)
    if ad_scorer:
        return score_BS
    weight_L = model.ensemble_weights()[-1]
    for number, level in enumerate(index.levels):
        score_BS += weight_L[number] * all_node_logits(model, index, state, number)[:, level.node_S]
    return score_BS


def all_node_logits(model: RetrievalModel, index: Index, state: UserState, number: int) -> Tensor:
    """Logits [B, nodes] of every node of a level."""
    level, interest = index.levels[number], state.interest
    group_FBM = interest.shared_nodes(level.value_KGR, level.weight_KGR)
    feature_FBM = torch.cat([group_FBM, interest.visits(level.node_N, level.num_nodes)])
    return model.level(number).shared(state.levels[number], level.vector_KQd, feature_FBM)


def _root(model: RetrievalModel, index: Index, state: UserState) -> _Beam:
    logit_BM = all_node_logits(model, index, state, 0)
    node_BM = torch.arange(index.levels[0].num_nodes, device=logit_BM.device).expand_as(logit_BM)
    return _Beam(node_BM, torch.ones_like(node_BM, dtype=torch.bool), (logit_BM,), logit_BM)


def _keep(beam: _Beam, width: int) -> _Beam:
    """The best `width` candidates of every request, best first."""
    score_BW, place_BW = beam.score_BM.topk(min(width, beam.score_BM.shape[1]), dim=1)
    logits = tuple(logit.gather(1, place_BW) for logit in beam.logit_LBM)
    return _Beam(beam.node_BM.gather(1, place_BW), beam.there_BM.gather(1, place_BW), logits, score_BW)


def _children(level: NodeLevel, beam: _Beam) -> tuple[Tensor, Tensor, Tensor]:
    """Children of each request's beam side by side, [B, M]: child, place of its parent in the beam, whether there."""
    start_BW = level.child_start_K1[beam.node_BM]
    count_BW = (level.child_start_K1[beam.node_BM + 1] - start_BW) * beam.there_BM
    end_BW = count_BW.cumsum(1)
    width = int(end_BW[:, -1].max())
    place_BM = torch.arange(width, device=end_BW.device).expand(len(end_BW), -1).contiguous()
    parent_BM = torch.searchsorted(end_BW, place_BM, right=True).clamp(max=end_BW.shape[1] - 1)
    there_BM = place_BM < end_BW[:, -1:]
    offset_BW = start_BW - (end_BW - count_BW)
    child_BM = torch.where(there_BM, place_BM + offset_BW.gather(1, parent_BM), 0)
    return child_BM, parent_BM, there_BM


def _node_features(index: Index, state: UserState, number: int, node_BM: Tensor) -> Tensor:
    level, interest = index.levels[number], state.interest
    group_FBM = interest.own_nodes(level.value_KGR[node_BM], level.weight_KGR[node_BM])
    visits_CBK = interest.visits(level.node_N, level.num_nodes)
    return torch.cat([group_FBM, visits_CBK.gather(2, node_BM.expand(len(visits_CBK), -1, -1))])


def _node_logits(model: RetrievalModel, index: Index, state: UserState, number: int, node_BM: Tensor) -> Tensor:
    feature_FBM = _node_features(index, state, number, node_BM)
    return model.level(number).own(state.levels[number], index.levels[number].vector_KQd[node_BM], feature_FBM)


def _ad_features(index: Index, state: UserState, slot_BM: Tensor) -> Tensor:
    return torch.cat([state.interest.own(index.group_SG[slot_BM]), state.interest.seen(index.ad_code_S[slot_BM])])


def _ad_logits(model: RetrievalModel, index: Index, state: UserState, slot_BM: Tensor) -> Tensor:
    over = model.level(len(index.levels))
    return over.own(state.levels[-1], index.vector_SQd[slot_BM], _ad_features(index, state, slot_BM))


def _ensemble(weight_L: Tensor, logit_BM: Tensor, above: tuple[Tensor, ...]) -> Tensor:
    score_BM = logit_BM
    for number, earlier_BM in enumerate(above):
        score_BM = score_BM + weight_L[number] * earlier_BM
    return score_BM


def _finish(
    model: RetrievalModel, index: Index, state: UserState, slot_BM: Tensor, score_BM: Tensor, k: int,
    excluded: Tensor | None, *, ensemble: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes and scores [B, k]: a short list by the given scores, scored again pair by pair and sorted."""
    if model.config.exclude_seen:
        score_BM = score_BM.masked_fill(state.interest.holds(index.ad_code_S[slot_BM]), -torch.inf)
    if excluded is not None:
        code_BM = index.ad_code_S[slot_BM]
        out_BM = excluded[code_BM] if excluded.dim() == 1 else excluded.gather(1, code_BM)
        score_BM = score_BM.masked_fill(out_BM, -torch.inf)
    place_BX = _short_list(score_BM, k)
    slot_BX, there_BX = slot_BM.gather(1, place_BX), score_BM.gather(1, place_BX) > -torch.inf
    exact_BX = _pair_scores(model, index, state, slot_BX, ensemble=ensemble).masked_fill(~there_BX, -torch.inf)
    id_BX = index.ad_id_S[slot_BX]
    order_BX = torch.argsort(id_BX, dim=1, stable=True)
    by_score_BX = torch.argsort(exact_BX.gather(1, order_BX), dim=1, descending=True, stable=True)
    order_BK = order_BX.gather(1, by_score_BX)[:, :k]
    score_BK = exact_BX.gather(1, order_BK)
    code_BK = index.ad_code_S[slot_BX.gather(1, order_BK)].masked_fill(score_BK == -torch.inf, -1)
    missing = k - code_BK.shape[1]
    if missing > 0:
        code_BK = torch.nn.functional.pad(code_BK, (0, missing), value=-1)
        score_BK = torch.nn.functional.pad(score_BK, (0, missing), value=-torch.inf)
    return code_BK, score_BK


def _short_list(score_BM: Tensor, k: int) -> Tensor:
    """Places of the best scores, [B, >= k]: long enough that rounding can't have pushed a winner off it."""
    num_candidates = score_BM.shape[1]
    length = min(num_candidates, k + SLACK)
    while True:
        best_BX, place_BX = score_BM.topk(length, dim=1)
        if length == num_candidates:
            return place_BX
        winner_B, last_B = best_BX[:, k - 1], best_BX[:, -1]
        if bool((last_B < winner_B - ROUNDING * (1.0 + winner_B.abs())).logical_or(last_B == -torch.inf).all()):
            return place_BX
        length = min(num_candidates, 4 * length)


def _pair_scores(model: RetrievalModel, index: Index, state: UserState, slot_BX: Tensor, *, ensemble: bool) -> Tensor:
    over = model.level(len(index.levels))
    score_BX = over.exactly(state.levels[-1], index.vector_SQd[slot_BX], _ad_features(index, state, slot_BX))
    if not ensemble:
        return score_BX
    weight_L = model.ensemble_weights()[-1]
    for number, level in enumerate(index.levels):
        node_BX = level.node_S[slot_BX]
        feature_FBX = _node_features(index, state, number, node_BX)
        logit_BX = model.level(number).exactly(state.levels[number], level.vector_KQd[node_BX], feature_FBX)
        score_BX = score_BX + weight_L[number] * logit_BX
    return score_BX
