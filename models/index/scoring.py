"""Scores of the index's candidates: all of them for every request, each request's own, or pair by pair.

The serving score of an ad is its own logit plus the weighted logits of the nodes on its path; a node's score is made
the same way from its own level and the levels above.

Shape legend: B requests, L levels, M candidates, K nodes of a level, S slots, F features, X (row, place) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index

SCAN_CELLS = 65_536
"""Pairs that a scan scores at a time, so that its intermediate values stay in the cache."""


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
    """Logits [B, K] of every node of a level."""
    level, interest = index.levels[number], state.interest
    group_FBM = interest.shared_nodes(level.value_KGR, level.weight_KGR)
    feature_FBM = torch.cat([group_FBM, interest.visits(level.node_N, level.num_nodes)])
    return model.level(number).shared(state.levels[number], level.vector_KQd, feature_FBM)


def node_logits(model: RetrievalModel, index: Index, state: UserState, number: int, node_BM: Tensor) -> Tensor:
    """Logits [B, M] of each request's own nodes of a level."""
    feature_FBM = _node_features(index, state, number, node_BM)
    return model.level(number).own(state.levels[number], index.levels[number].vector_KQd[node_BM], feature_FBM)


def ad_logits(model: RetrievalModel, index: Index, state: UserState, slot_BM: Tensor) -> Tensor:
    """Logits [B, M] of each request's own slots, without their paths."""
    over = model.level(len(index.levels))
    return over.own(state.levels[-1], index.vector_SQd[slot_BM], ad_features(index, state, slot_BM))


def ensemble(weight_L: Tensor, logit_BM: Tensor, above: Sequence[Tensor]) -> Tensor:
    """Score [B, M]: a candidate's own logit and the weighted logits of its ancestors, root first."""
    score_BM = logit_BM
    for number, earlier_BM in enumerate(above):
        score_BM = score_BM + weight_L[number] * earlier_BM
    return score_BM


def pair_scores(
    model: RetrievalModel, index: Index, state: UserState, slot_BX: Tensor, *, with_path: bool
) -> Tensor:  # fmt: skip
    """Scores [B, X] summed in a fixed order: the bits of a pair's score depend on nothing but the pair."""
    over = model.level(len(index.levels))
    score_BX = over.exactly(state.levels[-1], index.vector_SQd[slot_BX], ad_features(index, state, slot_BX))
    if not with_path:
        return score_BX
    weight_L = model.ensemble_weights()[-1]
    for number, level in enumerate(index.levels):
        node_BX = level.node_S[slot_BX]
        feature_FBX = _node_features(index, state, number, node_BX)
        logit_BX = model.level(number).exactly(state.levels[number], level.vector_KQd[node_BX], feature_FBX)
        score_BX = score_BX + weight_L[number] * logit_BX
    return score_BX


def _node_features(index: Index, state: UserState, number: int, node_BM: Tensor) -> Tensor:
    level, interest = index.levels[number], state.interest
    group_FBM = interest.own_nodes(level.value_KGR[node_BM], level.weight_KGR[node_BM])
    visits_CBK = interest.visits(level.node_N, level.num_nodes)
    return torch.cat([group_FBM, visits_CBK.gather(2, node_BM.expand(len(visits_CBK), -1, -1))])


def ad_features(index: Index, state: UserState, slot_BM: Tensor) -> Tensor:
    """Interaction features [F, B, M] of each request's own slots."""
    return torch.cat([state.interest.own(index.group_SG[slot_BM]), state.interest.seen(index.ad_code_S[slot_BM])])
