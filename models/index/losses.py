"""Losses of the retrieval model: of the scorer, and of the levels of the index.

Scorer: log-loss of impressions (mature rows, exact correction for down-sampled negatives), in-batch softmax on
clicks, squared error to the teacher's logits on unlabelled pairs. The softmax corrects for how often an ad
stands in the batch relative to how often it was *shown*, so that its optimum is the click logit up to a constant
of the request, the same that the log-loss aims at.

Levels (HSNN arXiv 2408.06653 section 4, HILL arXiv 2604.12965): the pseudo ad of each level is scored like an
ad against the same labels; an alignment term ties the level's interaction tower to that of ads; the beam loss asks
the nodes that a beam would visit for those that hold the best ads of the full scan (OTM, arXiv 2006.15408: train
on the nodes that the beam visits, let a node inherit the target of its best ads).

Shape legend: B rows, U distinct ads of the batch, Y clicked rows, L levels, K nodes, D code width, J pairs a row,
F interaction features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.batch import AdTable, Batch
from models.gem.embeddings import local_codes
from models.index.config import RetrievalTraining
from models.index.interactions import Interest
from models.index.monn import LevelState, RetrievalModel, UserState
from models.index.publish import Index
from models.index.quantizer import Quantised
from models.index.search import scan_scores


@dataclass(frozen=True)
class Clicks:
    """The clicked rows of a batch as queries of an in-batch softmax over its distinct ads."""

    row_Y: Tensor
    target_Y: Tensor
    log_weight_U: Tensor
    """Log of how many impressions each distinct ad of the batch stands for."""

    def loss(self, logit_YU: Tensor) -> Tensor:
        """Cross entropy of the clicked ads; 0 without clicks."""
        if len(self.row_Y) == 0:
            return logit_YU.sum() * 0.0
        return functional.cross_entropy(logit_YU + self.log_weight_U, self.target_Y)


@dataclass(frozen=True)
class Forward:
    """What the losses of one batch share."""

    batch: Batch
    ads: AdTable
    trunk_BT: Tensor
    interest: Interest
    clicks: Clicks
    clicked_interest: Interest
    code_U: Tensor
    local_B: Tensor
    vector_UQd: Tensor
    own_feature_BF1: Tensor
    shared_feature_YFU: Tensor
    position_N: Tensor
    """Place of an ad code among the batch's distinct ads, -1 for others."""


def forward(model: RetrievalModel, batch: Batch, ads: AdTable) -> Forward:
    """Towers and interaction features of a batch."""
    trunk_BT, interest = model.trunk(batch.user, ads)
    code_U, (local_B,) = local_codes(len(ads.ad_id_N), batch.ad_code_B)
    label_B = batch.label_BT[:, 0]
    row_Y = (label_B > 0.5).nonzero().squeeze(1)
    shown_B = torch.where(label_B > 0.5, 1.0, batch.logit_offset_B.exp())
    weight_U = torch.zeros(len(code_U)).index_add(0, local_B, shown_B)
    position_N = torch.full_like(ads.ad_id_N, -1)
    position_N[code_U] = torch.arange(len(code_U))
    clicked = interest.rows(row_Y)
    own_ad_B = position_N[batch.ad_code_B]
    own_BF1 = torch.cat(
        [interest.matched(ads.group_NG[batch.ad_code_B][:, :, None]), interest.matched_positions(position_N, own_ad_B)],
        dim=1,
    )
    shared_YFU = torch.cat([clicked.shared(ads.group_NG[code_U]), clicked.visits(position_N, len(code_U))], dim=1)
    return Forward(
        batch=batch,
        ads=ads,
        trunk_BT=trunk_BT,
        interest=interest,
        clicks=Clicks(row_Y, local_B[row_Y], weight_U.log()),
        clicked_interest=clicked,
        code_U=code_U,
        local_B=local_B,
        vector_UQd=model.ad_vectors(ads, code_U),
        own_feature_BF1=own_BF1,
        shared_feature_YFU=shared_YFU,
        position_N=position_N,
    )


def impression_loss(logit_B: Tensor, batch: Batch) -> Tensor:
    """Mean log-loss of the main task over mature rows; the offset undoes the down-sampling of negatives."""
    loss_B = functional.binary_cross_entropy_with_logits(
        logit_B + batch.logit_offset_B, batch.label_BT[:, 0], reduction="none"
    )
    mature_B = batch.mature_BT[:, 0]
    return (loss_B * mature_B).sum() / mature_B.sum().clamp(min=1.0)


def scorer_losses(model: RetrievalModel, step: Forward) -> tuple[dict[str, Tensor], Tensor]:
    """Log-loss and softmax of the ad scorer, and its logits [Y, U] of the clicked rows."""
    over = model.level(model.config.num_levels)
    state = over.state(step.trunk_BT)
    own_B = over.own(state, step.vector_UQd[step.local_B][:, None], step.own_feature_BF1).squeeze(1)
    logit_YU = over.shared(state.rows(step.clicks.row_Y), step.vector_UQd, step.shared_feature_YFU)
    losses = {"impressions": impression_loss(own_B, step.batch), "softmax": step.clicks.loss(logit_YU)}
    return losses, logit_YU


def distillation_loss(
    model: RetrievalModel, batch: Batch, ads: AdTable, ad_code_BJ: Tensor, teacher_BJ: Tensor
) -> Tensor:
    """Mean squared difference to the teacher's logits on unlabelled pairs of each user with J ads."""
    trunk_BT, interest = model.trunk(batch.user, ads)
    over = model.level(model.config.num_levels)
    code_U, (local_X,) = local_codes(len(ads.ad_id_N), ad_code_BJ.flatten())
    vector_BJQd = model.ad_vectors(ads, code_U)[local_X.view(ad_code_BJ.shape)]
    feature_BFJ = torch.cat([interest.own(ads.group_NG[ad_code_BJ]), interest.seen(ad_code_BJ)], dim=1)
    logit_BJ = over.own(over.state(trunk_BT), vector_BJQd, feature_BFJ)
    known_BJ = ~torch.isnan(teacher_BJ)
    error_BJ = torch.where(known_BJ, logit_BJ - teacher_BJ, 0.0)
    return error_BJ.square().sum() / known_BJ.sum().clamp(min=1)


def level_losses(
    model: RetrievalModel, step: Forward, index: Index, quantised: Quantised, logit_YU: Tensor
) -> dict[str, Tensor]:
    """Supervision of every level by the batch's labels, alignment of interaction towers, and the ensemble's weights."""
    num_levels = model.config.num_levels
    ad_over = model.level(num_levels)
    ad_interaction = ad_over.interaction(step.own_feature_BF1).detach()
    totals = {"level_impressions": logit_YU.new_zeros(()), "level_softmax": logit_YU.new_zeros(())}
    totals["alignment"] = logit_YU.new_zeros(())
    weight_L = model.ensemble_weights()[-1]
    served_YU = logit_YU.detach()
    for number in range(num_levels):
        over = model.level(number)
        state = over.state(step.trunk_BT)
        pseudo_UQd = model.as_vectors(quantised.pseudo_LND[number])
        node_U = index.levels[number].node_N[step.code_U]
        own_BF1 = _own_node_features(index, step.interest, number, node_U[step.local_B])
        own_B = over.own(state, pseudo_UQd[step.local_B][:, None], own_BF1).squeeze(1)
        shared_YFU = _shared_node_features(index, step.clicked_interest, number, node_U)
        level_YU = over.shared(state.rows(step.clicks.row_Y), pseudo_UQd, shared_YFU)
        totals["level_impressions"] = totals["level_impressions"] + impression_loss(own_B, step.batch) / num_levels
        totals["level_softmax"] = totals["level_softmax"] + step.clicks.loss(level_YU) / num_levels
        gap = (over.interaction(own_BF1) - ad_interaction).square().mean()
        totals["alignment"] = totals["alignment"] + gap / num_levels
        served_YU = served_YU + weight_L[number] * level_YU.detach()
    totals["ensemble"] = step.clicks.loss(served_YU)
    return totals


def beam_loss(model: RetrievalModel, index: Index, state: UserState, training: RetrievalTraining) -> Tensor:
    """Listwise loss of every level: which nodes, among those a beam visits, hold the best ads of the full scan."""
    with torch.no_grad():
        best_BX = scan_scores(model, index, state).topk(min(training.beam_best, index.num_ads), dim=1).indices
    weight_LL = model.ensemble_weights()
    total = weight_LL.new_zeros(())
    above: list[Tensor] = []
    visited_BK: Tensor | None = None
    for number, level in enumerate(index.levels):
        logit_BK = node_logits(model, index, state.levels[number], state.interest, number)
        score_BK = logit_BK
        for earlier, earlier_BK in enumerate(above):
            score_BK = score_BK + weight_LL[number, earlier] * earlier_BK
        target_BK = torch.zeros_like(score_BK).scatter_add(
            1, level.node_S[best_BX], torch.full(best_BX.shape, 1.0 / best_BX.shape[1])
        )
        if visited_BK is not None:
            score_BK = score_BK.masked_fill(~visited_BK & (target_BK == 0), -1e9)
        total = total - (target_BK * torch.log_softmax(score_BK, dim=1)).sum(1).mean()
        if number + 1 < len(index.levels):
            parent_X = torch.repeat_interleave(torch.arange(level.num_nodes), level.child_start_K1.diff())
            width = min(training.beam_width, level.num_nodes)
            kept_BK = score_BK >= score_BK.topk(width, dim=1).values[:, -1:]
            visited_BK = kept_BK[:, parent_X]
            above = [earlier_BK[:, parent_X] for earlier_BK in (*above, logit_BK)]
    return total / len(index.levels)


def node_logits(model: RetrievalModel, index: Index, state: LevelState, interest: Interest, number: int) -> Tensor:
    """Logits [B, K] of all nodes of a level by the current codebooks, differentiable with respect to them."""
    level = index.levels[number]
    vector_KQd = model.as_vectors(model.index.node_vectors(level.path_KL))
    return model.level(number).shared(state, vector_KQd, _level_features(index, interest, number))


def _level_features(index: Index, interest: Interest, number: int) -> Tensor:
    level = index.levels[number]
    group_BFK = interest.shared_nodes(level.value_KGR, level.weight_KGR)
    return torch.cat([group_BFK, interest.visits(level.node_N, level.num_nodes)], dim=1)


def _shared_node_features(index: Index, interest: Interest, number: int, node_U: Tensor) -> Tensor:
    """Features [Y, F, U] of the nodes of the batch's ads; an ad without a published node has zeros."""
    there_U = node_U >= 0
    return _level_features(index, interest, number)[:, :, node_U.clamp(min=0)] * there_U


def _own_node_features(index: Index, interest: Interest, number: int, node_B: Tensor) -> Tensor:
    """Features [B, F, 1] of the node of each row's own ad."""
    level, place_B = index.levels[number], node_B.clamp(min=0)
    group_BF1 = interest.matched(level.value_KGR[place_B], level.weight_KGR[place_B])
    return (
        torch.cat([group_BF1, interest.matched_positions(level.node_N, node_B)], dim=1) * (node_B >= 0)[:, None, None]
    )
