"""Level-wise batched beam search and the exact scan it is measured against.

`exact_search` scans the serving score (`models/index/scoring.py`) over every ad; `beam_search` visits the children of
the best nodes of each level, and scores the ads that follow most often from the history beside them: the inverted
index from a history's ads to their neighbours (I2IF, HSNN arXiv 2408.06653 section 3) reaches ads whose leaf as a whole
is of no interest. No step loops over requests. Both end in the same short list (`models/index/shortlist.py`), so that
a beam that holds every node returns the same ads in the same order as the scan.

Shape legend: B requests, L levels, W nodes of a beam, M candidates, K results, S slots, R related ads a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.index.cost import candidate_cost
from models.index.covisits import mixed
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, NodeLevel
from models.index.scoring import ad_logits, all_node_logits, ensemble, node_logits, scan_scores
from models.index.shortlist import finish
from models.index.terms import NO_TERMS, Terms, open_nodes, ranked


@dataclass(frozen=True)
class SearchResult:
    """Ads in falling order of value; places that could not be filled hold code -1 and value -inf."""

    ad_code_BK: Tensor
    score_BK: Tensor
    """Scores; with an auction, log(click probability x bid)."""
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


def check_beams(beams: Sequence[int], num_levels: int) -> None:
    """Raise ValueError unless `beams` is one width a level, and perhaps a number of related ads."""
    if len(beams) not in (num_levels, num_levels + 1) or min(beams[:num_levels]) < 1 or min(beams) < 0:
        raise ValueError(
            f"beams: {tuple(beams)} must be {num_levels} numbers of at least 1, and perhaps a number of related ads"
        )


@torch.no_grad()
def beam_search(
    model: RetrievalModel,
    index: Index,
    state: UserState,
    *,
    beams: Sequence[int],
    k: int,
    terms: Terms = NO_TERMS,
) -> SearchResult:
    """Best `k` ads under the best nodes of each level, and among the ads most related to the history.

    Args:
        beams: the nodes kept at each level; one number more is how many related ads are scored beside the beam
            (none where the model counts no co-visits).

    Raises:
        ValueError: `k` or a width is below 1, or `beams` doesn't fit the index.
    """
    if k < 1:
        raise ValueError(f"k: {k} is not at least 1")
    check_beams(beams, len(index.levels))
    root = _root(model, index, state)
    beam, scored, kept = _descend(model, index, state, root, beams, terms)
    slot_BM, score_BM = beam.node_BM, beam.score_BM
    if len(beams) > len(index.levels) and beams[-1] and state.interest.covisits is not None:
        leaf_BW = _nodes(kept[-1])
        slot_BR, there_BR = _related(
            index, state, leaf_BW, beams[-1], terms, without_seen=model.config.exclude_seen
        )  # fmt: skip
        related_BR = _path_scores(model, index, state, root.score_BM, slot_BR)
        slot_BM = torch.cat([slot_BM, slot_BR], dim=1)
        score_BM = torch.cat([score_BM, related_BR.masked_fill(~there_BR, -torch.inf)], dim=1)
        # A related ad costs itself and the nodes on its path, of which the roots are known already.
        scored = [scored[0], *(count_B + there_BR.sum(1) for count_B in scored[1:])]
    code_BK, score_BK = finish(model, index, state, slot_BM, score_BM, k, terms, with_path=True)
    nodes_BL, ads_B = torch.stack(scored[:-1], dim=1), scored[-1]
    cost = candidate_cost(model.config, len(model.schema.groups))
    return SearchResult(
        ad_code_BK=code_BK,
        score_BK=score_BK,
        cost_B=cost.request(nodes_BL, ads_B, index.num_ads),
        nodes_scored_B=nodes_BL.sum(1),
        ads_scored_B=ads_B,
        beam_LBW=tuple(_nodes(level) for level in kept),
        beam_score_LBW=tuple(level.score_BM for level in kept),
    )


@torch.no_grad()
def exact_search(
    model: RetrievalModel,
    index: Index,
    state: UserState,
    k: int,
    *,
    terms: Terms = NO_TERMS,
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
    code_BK, score_BK = finish(model, index, state, slot_BS, score_BS, k, terms, with_path=not ad_scorer)
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


def _descend(
    model: RetrievalModel, index: Index, state: UserState, beam: _Beam, beams: Sequence[int], terms: Terms
) -> tuple[_Beam, list[Tensor], list[_Beam]]:
    """Ads under the best nodes, how many candidates of every level were scored [B] each, and every level's beam."""
    weight_LL = model.ensemble_weights()
    open_LK = None if terms.excluded is None else open_nodes(index, terms.excluded)
    scored, kept = [beam.there_BM.sum(1)], []
    for number, level in enumerate(index.levels):
        beam = _keep(beam, beams[number], _node_values(beam, terms, open_LK, number))
        kept.append(beam)
        node_BM, parent_BM, there_BM = _children(level, beam)
        if number + 1 == len(index.levels):
            logit_BM = ad_logits(model, index, state, node_BM)
        else:
            logit_BM = node_logits(model, index, state, number + 1, node_BM)
        above = tuple(logit.gather(1, parent_BM) for logit in beam.logit_LBM)
        score_BM = ensemble(weight_LL[number + 1], logit_BM, above).masked_fill(~there_BM, -torch.inf)
        beam = _Beam(node_BM, there_BM, (*above, logit_BM), score_BM)
        scored.append(there_BM.sum(1))
    return beam, scored, kept


def _nodes(beam: _Beam) -> Tensor:
    """Nodes of a beam, -1 where there is none."""
    return beam.node_BM.masked_fill(~beam.there_BM, -1)


def _root(model: RetrievalModel, index: Index, state: UserState) -> _Beam:
    logit_BM = all_node_logits(model, index, state, 0)
    node_BM = torch.arange(index.levels[0].num_nodes, device=logit_BM.device).expand_as(logit_BM)
    return _Beam(node_BM, torch.ones_like(node_BM, dtype=torch.bool), (logit_BM,), logit_BM)


def _node_values(beam: _Beam, terms: Terms, open_LK: list[Tensor] | None, number: int) -> Tensor:
    """What the candidates of a level are ranked by, [B, M]; -inf where nothing below may be shown."""
    log_bid_BM = None if terms.auction is None else terms.auction.log_best_LK[number][beam.node_BM]
    value_BM = ranked(beam.score_BM, log_bid_BM)
    if open_LK is not None:
        open_XK = open_LK[number]
        open_BM = open_XK[beam.node_BM] if open_XK.dim() == 1 else open_XK.gather(1, beam.node_BM)
        value_BM = value_BM.masked_fill(~open_BM, -torch.inf)
    return value_BM


def _keep(beam: _Beam, width: int, value_BM: Tensor) -> _Beam:
    """The `width` candidates of every request with the largest values, best first; -inf is no candidate."""
    value_BW, place_BW = value_BM.topk(min(width, value_BM.shape[1]), dim=1)
    logits = tuple(logit.gather(1, place_BW) for logit in beam.logit_LBM)
    there_BW = beam.there_BM.gather(1, place_BW) & (value_BW > -torch.inf)
    return _Beam(beam.node_BM.gather(1, place_BW), there_BW, logits, beam.score_BM.gather(1, place_BW))


def _children(level: NodeLevel, beam: _Beam) -> tuple[Tensor, Tensor, Tensor]:
    """Children of each request's beam side by side, [B, M]: child, place of its parent in the beam, whether there."""
    start_BW = level.child_start_K1[beam.node_BM]
    count_BW = (level.child_start_K1[beam.node_BM + 1] - start_BW) * beam.there_BM
    end_BW = count_BW.cumsum(1)
    width = max(1, int(end_BW[:, -1].max()))
    place_BM = torch.arange(width, device=end_BW.device).expand(len(end_BW), -1).contiguous()
    parent_BM = torch.searchsorted(end_BW, place_BM, right=True).clamp(max=end_BW.shape[1] - 1)
    there_BM = place_BM < end_BW[:, -1:]
    offset_BW = start_BW - (end_BW - count_BW)
    child_BM = torch.where(there_BM, place_BM + offset_BW.gather(1, parent_BM), 0)
    return child_BM, parent_BM, there_BM


def _related(
    index: Index, state: UserState, leaf_BW: Tensor, count: int, terms: Terms, *, without_seen: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Slots [B, R] of the ads most related to each history whose leaf isn't in the beam, and whether there is one.

    Ads that the terms forbid (excluded, or without a bid in an auction) take no place.
    """
    interest, last = state.interest, index.levels[-1]
    key_Z, value_ZK = interest.related_pairs
    row_Z, value_Z = key_Z // interest.num_ads, mixed(value_ZK.T)
    code_Z = key_Z % interest.num_ads
    slot_Z = index.slot_N[code_Z]
    beam_BK = torch.zeros((len(leaf_BW), last.num_nodes + 1), dtype=torch.bool, device=leaf_BW.device)
    beam_BK.scatter_(1, torch.where(leaf_BW < 0, last.num_nodes, leaf_BW), True)
    kept_Z = (slot_Z >= 0) & (value_Z > 0.0) & ~beam_BK[row_Z, last.node_S[slot_Z.clamp(min=0)]]
    if without_seen:
        kept_Z &= ~torch.isin(key_Z, interest.distinct[0])
    if terms.excluded is not None:
        kept_Z &= ~terms.excluded[code_Z if terms.excluded.dim() == 1 else (row_Z, code_Z)]
    if terms.auction is not None:
        kept_Z &= terms.auction.log_bid_S[slot_Z.clamp(min=0)] > -torch.inf
    row_X, slot_X, value_X = row_Z[kept_Z], slot_Z[kept_Z], value_Z[kept_Z]
    order_X = torch.argsort(value_X, descending=True, stable=True)
    order_X = order_X[torch.argsort(row_X[order_X], stable=True)]
    row_X, slot_X = row_X[order_X], slot_X[order_X]
    rank_X = torch.arange(len(row_X), device=row_X.device) - torch.searchsorted(row_X, row_X)
    best_X = rank_X < count
    slot_BR = slot_X.new_zeros((len(leaf_BW), count))
    there_BR = torch.zeros_like(slot_BR, dtype=torch.bool)
    slot_BR[row_X[best_X], rank_X[best_X]] = slot_X[best_X]
    there_BR[row_X[best_X], rank_X[best_X]] = True
    return slot_BR, there_BR


def _path_scores(
    model: RetrievalModel, index: Index, state: UserState, root_BK: Tensor, slot_BR: Tensor
) -> Tensor:  # fmt: skip
    """Serving scores [B, R] of each request's own slots; the logits of the first level are known."""
    above = [root_BK.gather(1, index.levels[0].node_S[slot_BR])]
    for number, level in enumerate(index.levels[1:], 1):
        above.append(node_logits(model, index, state, number, level.node_S[slot_BR]))
    return ensemble(model.ensemble_weights()[-1], ad_logits(model, index, state, slot_BR), above)
