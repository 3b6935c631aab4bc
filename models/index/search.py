"""Level-wise batched beam search and the exact scan it is measured against.

`exact_search` scans the serving score (`models/index/scoring.py`) over every ad; `beam_search` visits the children of
the best nodes of each level, and scores the ads that follow most often from the history beside them: the inverted
index from a history's ads to their neighbours (I2IF, HSNN arXiv 2408.06653 section 3) reaches ads whose leaf as a whole
is of no interest. A sketch of the score may choose which of all these ads are scored in full
(`models/index/prerank.py`). No step loops over requests. Both end in the same short list
(`models/index/shortlist.py`), so that a beam that holds every node, all of whose ads are scored, returns the same ads
in the same order as the scan.

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
from models.index.shortlist import barred, finish, log_bids
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
    ads_preranked_B: Tensor
    """Ads of which the sketch was taken, to choose those that are scored."""
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


@dataclass(frozen=True)
class Beams:
    """How hard a beam search works."""

    widths: tuple[int, ...]
    """Nodes kept at each level."""
    related: int = 0
    """Ads related to the history that join those under the beam (none where the model counts no co-visits)."""
    spare: int = 0
    """Ads scored in full beyond the K asked for, the best by the sketch; 0 scores all of them."""

    @classmethod
    def parse(cls, beams: Sequence[int], num_levels: int) -> Beams:
        """From one width a level, and perhaps the number of related and of spare ads.

        Raises:
            ValueError: a width is below 1, another number below 0, or there are too few or too many.
        """
        widths, further = tuple(beams[:num_levels]), tuple(beams[num_levels:])
        if len(widths) < num_levels or len(further) > 2 or min(widths) < 1 or min((0, *further)) < 0:
            raise ValueError(
                f"beams: {tuple(beams)} must be {num_levels} numbers of at least 1, and perhaps the number of related "
                "ads and of spare ads"
            )
        return cls(widths, *further)

    def __str__(self) -> str:
        """For people: `6 nodes, 20 spare`."""
        parts = [f"{' x '.join(map(str, self.widths))} nodes"]
        parts += [f"{self.related} related"] * bool(self.related)
        return ", ".join([*parts, f"{self.spare} spare" if self.spare else "every ad"])


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
        beams: the nodes kept at each level, and perhaps how many related and spare ads (`Beams`).

    Raises:
        ValueError: `k` or a width is below 1, or `beams` doesn't fit the index.
    """
    if k < 1:
        raise ValueError(f"k: {k} is not at least 1")
    effort = Beams.parse(beams, len(index.levels))
    kept, scored = _descend(model, index, state, effort.widths, terms)
    found = _candidates(model, index, state, kept, effort.related, terms)
    nodes_BL = torch.stack(scored, dim=1)
    nodes_BL[:, 1:] += found.related_B[:, None]
    preranked_B, width = torch.zeros_like(found.related_B), found.slot_BM.shape[1]
    chosen = found
    if effort.spare:
        preranked_B, width = found.there_BM.sum(1), k + effort.spare
        value_BM = _sketched(model, index, state, found, terms)
        chosen = _best(found, value_BM, width)
    code_BK, score_BK = _finished(model, index, state, chosen, k, terms)
    # A cap may leave places open that ads of lower sketches can fill.
    while terms.cap is not None and width < found.slot_BM.shape[1] and bool((code_BK < 0).any()):
        width *= 4
        chosen = _best(found, value_BM, width)
        code_BK, score_BK = _finished(model, index, state, chosen, k, terms)
    cost, ads_B = candidate_cost(model.config, len(model.schema.groups)), chosen.there_BM.sum(1)
    return SearchResult(
        ad_code_BK=code_BK,
        score_BK=score_BK,
        cost_B=cost.request(nodes_BL, ads_B, index.num_ads, preranked_B),
        nodes_scored_B=nodes_BL.sum(1),
        ads_scored_B=ads_B,
        ads_preranked_B=preranked_B,
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
        ads_preranked_B=torch.zeros_like(ads_B),
    )


def _descend(
    model: RetrievalModel, index: Index, state: UserState, widths: Sequence[int], terms: Terms
) -> tuple[list[_Beam], list[Tensor]]:
    """The beam of every level, and how many of its nodes were scored [B] each."""
    weight_LL = model.ensemble_weights()
    open_LK = None if terms.excluded is None else open_nodes(index, terms.excluded)
    beam = _root(model, index, state)
    kept, scored = [], [beam.there_BM.sum(1)]
    for number, width in enumerate(widths):
        beam = _keep(beam, width, _node_values(beam, terms, open_LK, number))
        kept.append(beam)
        if number + 1 == len(index.levels):
            break
        node_BM, parent_BM, there_BM = _children(index.levels[number], beam)
        logit_BM = node_logits(model, index, state, number + 1, node_BM)
        above = tuple(logit.gather(1, parent_BM) for logit in beam.logit_LBM)
        score_BM = ensemble(weight_LL[number + 1], logit_BM, above).masked_fill(~there_BM, -torch.inf)
        beam = _Beam(node_BM, there_BM, (*above, logit_BM), score_BM)
        scored.append(there_BM.sum(1))
    return kept, scored


@dataclass(frozen=True)
class _Found:
    """Ads that may be scored, and the logits of the nodes on their paths, root first."""

    slot_BM: Tensor
    there_BM: Tensor
    above: tuple[Tensor, ...]
    related_B: Tensor
    """How many of them are related ads, whose paths below the root were scored for them alone."""


def _candidates(
    model: RetrievalModel, index: Index, state: UserState, kept: list[_Beam], num_related: int, terms: Terms
) -> _Found:
    """Ads under the last beam, and those most related to the history beside them."""
    slot_BM, parent_BM, there_BM = _children(index.levels[-1], kept[-1])
    above = tuple(logit.gather(1, parent_BM) for logit in kept[-1].logit_LBM)
    if not num_related or state.interest.covisits is None:
        return _Found(slot_BM, there_BM, above, torch.zeros_like(slot_BM[:, 0]))
    slot_BR, there_BR = _related(
        index, state, _nodes(kept[-1]), num_related, terms, without_seen=model.config.exclude_seen
    )  # fmt: skip
    above = tuple(
        torch.cat([logit_BM, logit_BR], dim=1)
        for logit_BM, logit_BR in zip(above, _path_logits(model, index, state, slot_BR), strict=True)
    )
    slots, there = torch.cat([slot_BM, slot_BR], dim=1), torch.cat([there_BM, there_BR], dim=1)
    return _Found(slots, there, above, there_BR.sum(1))


def _sketched(model: RetrievalModel, index: Index, state: UserState, found: _Found, terms: Terms) -> Tensor:
    """Sketched values [B, M] of candidates, -inf where they may not be answered."""
    sketch = model.preranker.sketch(state.sketch_BP, state.interest, index.slot_N, index.num_ads)
    score_BM = sketch.scores(index.sketch_SP, index.sketch_bias_S, index.group_SG, found.slot_BM)
    value_BM = ranked(score_BM, log_bids(terms, found.slot_BM))
    return value_BM.masked_fill(~found.there_BM | barred(model, index, state, found.slot_BM, terms), -torch.inf)


def _best(found: _Found, value_BM: Tensor, width: int) -> _Found:
    """The `width` candidates of every request with the largest values; -inf is no candidate."""
    value_BW, place_BW = value_BM.topk(min(width, value_BM.shape[1]), dim=1)
    return _Found(
        slot_BM=found.slot_BM.gather(1, place_BW),
        there_BM=value_BW > -torch.inf,
        above=tuple(logit_BM.gather(1, place_BW) for logit_BM in found.above),
        related_B=found.related_B,
    )


def _finished(
    model: RetrievalModel, index: Index, state: UserState, chosen: _Found, k: int, terms: Terms
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes and values [B, k] of the best of the chosen candidates, all of which are scored."""
    logit_BM = ad_logits(model, index, state, chosen.slot_BM)
    score_BM = ensemble(model.ensemble_weights()[-1], logit_BM, chosen.above)
    score_BM = score_BM.masked_fill(~chosen.there_BM, -torch.inf)
    return finish(model, index, state, chosen.slot_BM, score_BM, k, terms, with_path=True)


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


def _path_logits(model: RetrievalModel, index: Index, state: UserState, slot_BR: Tensor) -> list[Tensor]:
    """Logits [B, R] of the nodes on the paths of each request's own slots, root first."""
    return [
        node_logits(model, index, state, number, level.node_S[slot_BR]) for number, level in enumerate(index.levels)
    ]
