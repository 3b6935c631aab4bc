"""Losses of the retrieval model: of the scorer, and of the levels of the index.

Scorer: log-loss of impressions (mature rows, exact correction for down-sampled negatives), in-batch softmax on
clicks, squared error to the teacher's logits on unlabelled pairs. The softmax corrects for how often an ad
stands in the batch relative to how often it was *shown*, so that its optimum is the click logit up to a constant
of the request, the same that the log-loss aims at.

Levels (HSNN arXiv 2408.06653 section 4, HILL arXiv 2604.12965): the pseudo ad of each level is scored like an
ad against the same labels; a softmax finds the clicked node among those that a beam would visit; an alignment term
ties the level's interaction tower to that of ads; the beam loss asks the visited nodes for those that hold the
best ads of the full scan (OTM, arXiv 2006.15408: train on the nodes that the beam visits, let a node inherit the
target of its best ads).

Shape legend: B rows, U distinct ads of the batch, Y clicked rows, L levels, K nodes, D code width, J pairs a row,
F interaction features, N ads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from models.batch import AdTable, Batch
from models.gem.embeddings import local_codes
from models.index.config import RetrievalTraining
from models.index.interactions import Interest
from models.index.learners import WITH_CODEBOOKS
from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index, thinned
from models.index.scoring import scan_scores


@dataclass(frozen=True)
class Forward:
    """What the losses of one batch share."""

    batch: Batch
    ads: AdTable
    trunk_BT: Tensor
    level_trunk_BT: Tensor
    """The same values for the levels, which reach the trunk with a scaled gradient only."""
    interest: Interest
    clicked: UserState
    """User side of the clicked rows, which are the queries of every softmax."""
    row_Y: Tensor
    code_U: Tensor
    local_B: Tensor
    log_weight_U: Tensor
    """Log of how many impressions, or ads, each distinct candidate of the batch stands for."""
    vector_UQd: Tensor
    own_feature_FB1: Tensor

    def first(self, limit: int) -> Forward:
        """The same batch with at most `limit` clicked rows (0: all of them)."""
        if not 0 < limit < len(self.row_Y):
            return self
        return replace(self, row_Y=self.row_Y[:limit], clicked=self.clicked.rows(torch.arange(limit)))


@dataclass(frozen=True)
class Sample:
    """Candidates of a softmax beside the batch's own: ads drawn uniformly, and what the log-q correction needs."""

    code_M: Tensor
    share_N: Tensor
    """Share of each ad among the positives: the distribution that a batch draws from."""

    def log_weight(self, code_U: Tensor, batch_size: int) -> Tensor:
        """Minus the log probability that an ad is among the candidates of a step (batch or drawn)."""
        share_U = self.share_N[code_U].clamp(max=1.0 - 1e-6)
        drawn = min(len(self.code_M) / len(self.share_N), 1.0 - 1e-6)
        log_absent_U = batch_size * torch.log1p(-share_U) + math.log1p(-drawn)
        return -torch.log(-torch.expm1(log_absent_U))


def forward(
    model: RetrievalModel, batch: Batch, ads: AdTable, trunk_gradient: float = 1.0, sample: Sample | None = None
) -> Forward:
    """Towers and interaction features of a batch; levels pass `trunk_gradient` of their gradient to the trunk."""
    label_B = batch.label_BT[:, 0]
    target_B = torch.where(label_B > 0.5, batch.ad_code_B, -1)
    trunk_BT, interest = model.trunk(batch.user, ads, target_B)
    further = [] if sample is None else [sample.code_M]
    code_U, (local_B, *_) = local_codes(len(ads.ad_id_N), batch.ad_code_B, *further)
    row_Y = (label_B > 0.5).nonzero().squeeze(1)
    shown_B = torch.where(label_B > 0.5, 1.0, batch.logit_offset_B.exp())
    log_weight_U = torch.zeros(len(code_U)).index_add(0, local_B, shown_B).log()
    if sample is not None:
        log_weight_U = sample.log_weight(code_U, len(row_Y))
    level_trunk_BT = scale_gradient(trunk_BT, trunk_gradient)
    states = [model.level(i).state(level_trunk_BT[row_Y]) for i in range(model.config.num_levels)]
    states.append(model.level(model.config.num_levels).state(trunk_BT[row_Y]))
    itself_N = torch.arange(len(ads.ad_id_N))
    own_FB1 = torch.cat(
        [
            interest.matched(ads.group_NG[batch.ad_code_B][:, :, None]),
            interest.matched_positions(itself_N, batch.ad_code_B),
        ]
    )
    return Forward(
        batch=batch,
        ads=ads,
        trunk_BT=trunk_BT,
        level_trunk_BT=level_trunk_BT,
        interest=interest,
        clicked=UserState(
            tuple(states),
            interest if len(row_Y) == len(label_B) else interest.rows(row_Y),
            model.preranker.user(trunk_BT[row_Y].detach()),
        ),
        row_Y=row_Y,
        code_U=code_U,
        local_B=local_B,
        log_weight_U=log_weight_U,
        vector_UQd=model.ad_vectors(ads, code_U),
        own_feature_FB1=own_FB1,
    )


def impression_loss(logit_B: Tensor, batch: Batch) -> Tensor:
    """Mean log-loss of the main task over mature rows; the offset undoes the down-sampling of negatives."""
    loss_B = functional.binary_cross_entropy_with_logits(
        logit_B + batch.logit_offset_B, batch.label_BT[:, 0], reduction="none"
    )
    mature_B = batch.mature_BT[:, 0]
    return (loss_B * mature_B).sum() / mature_B.sum().clamp(min=1.0)


def click_softmax(logit_YX: Tensor, log_weight_X: Tensor, target_Y: Tensor) -> Tensor:
    """Cross entropy of the clicked candidates among weighted ones; 0 without clicks."""
    if len(target_Y) == 0:
        return logit_YX.sum() * 0.0
    return functional.cross_entropy(logit_YX + log_weight_X, target_Y)


def scorer_losses(
    model: RetrievalModel, step: Forward, impression_weight: float = 1.0
) -> tuple[dict[str, Tensor], Tensor]:
    """Log-loss (unless its weight is 0) and softmax of the ad scorer, and its logits [Y, U] of the clicked rows."""
    over = model.level(model.config.num_levels)
    losses: dict[str, Tensor] = {}
    if impression_weight > 0.0:
        own_BQd = step.vector_UQd[step.local_B][:, None]
        own_B = over.own(over.state(step.trunk_BT), own_BQd, step.own_feature_FB1).squeeze(1)
        losses["impressions"] = impression_loss(own_B, step.batch) * impression_weight
    interest, code_U = step.clicked.interest, step.code_U
    position_N = torch.full_like(step.ads.ad_id_N, -1)
    position_N[code_U] = torch.arange(len(code_U))
    feature_FYU = torch.cat([interest.shared(step.ads.group_NG[code_U]), interest.visits(position_N, len(code_U))])
    logit_YU = over.shared(step.clicked.levels[-1], step.vector_UQd, feature_FYU)
    losses["softmax"] = click_softmax(logit_YU, step.log_weight_U, step.local_B[step.row_Y])
    return losses, logit_YU


def engagement_loss(
    model: RetrievalModel, trunk_XT: Tensor, ads: AdTable, item_X: Tensor, log_engaged_N: Tensor
) -> Tensor:
    """In-batch softmax of each user's next engagement: organic events teach ads and users one space.

    Corrected by how often an item is engaged with, so that a product is what the user adds to popularity.
    """
    code_U, (target_X,) = local_codes(len(ads.ad_id_N), item_X)
    if len(code_U) < 2:
        return trunk_XT.sum() * 0.0
    vector_UD = model.ad_vectors(ads, code_U).flatten(1)
    logit_XU = model.engagement(trunk_XT) @ vector_UD.T
    # An item of the batch is a negative once, however many users engaged with it: P(in batch), not P(drawn).
    frequency_U = log_engaged_N[code_U].exp()
    log_present_U = torch.log(-torch.expm1(-frequency_U * len(item_X)))
    return functional.cross_entropy(logit_XU - log_present_U, target_X)


def distillation_loss(
    model: RetrievalModel, batch: Batch, ads: AdTable, ad_code_BJ: Tensor, teacher_BJ: Tensor, *, centred: bool = False
) -> Tensor:
    """Mean squared difference to the teacher's logits on unlabelled pairs of each user with J ads.

    `centred` compares them up to a constant of the row, which a softmax leaves open.
    """
    trunk_BT, interest = model.trunk(batch.user, ads)
    over = model.level(model.config.num_levels)
    code_U, (local_X,) = local_codes(len(ads.ad_id_N), ad_code_BJ.flatten())
    vector_BJQd = model.ad_vectors(ads, code_U)[local_X.view(ad_code_BJ.shape)]
    feature_FBJ = torch.cat([interest.own(ads.group_NG[ad_code_BJ]), interest.seen(ad_code_BJ)])
    logit_BJ = over.own(over.state(trunk_BT), vector_BJQd, feature_FBJ)
    known_BJ = ~torch.isnan(teacher_BJ)
    error_BJ = torch.where(known_BJ, logit_BJ - teacher_BJ, 0.0)
    if centred:
        error_BJ = (error_BJ - error_BJ.sum(1, keepdim=True) / known_BJ.sum(1, keepdim=True).clamp(min=1)) * known_BJ
    return error_BJ.square().sum() / known_BJ.sum().clamp(min=1)


def pseudo_ad_losses(
    model: RetrievalModel, step: Forward, index: Index, pseudo_LUD: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean over levels of the log-loss of the rows' pseudo ads and of the misalignment of interaction towers."""
    num_levels = model.config.num_levels
    wanted_IB1 = model.level(num_levels).interaction(step.own_feature_FB1).detach()
    loss, gap = step.trunk_BT.new_zeros(()), step.trunk_BT.new_zeros(())
    for number in range(num_levels):
        over = model.level(number)
        pseudo_BQd = model.as_vectors(pseudo_LUD[number])[step.local_B]
        node_B = index.levels[number].node_N[step.batch.ad_code_B]
        feature_FB1 = _own_node_features(index, step.interest, number, node_B)
        feature_FB1 = scale_gradient(feature_FB1, model.config.training.trunk_gradient)
        logit_B = over.own(over.state(step.level_trunk_BT), pseudo_BQd[:, None], feature_FB1).squeeze(1)
        loss = loss + impression_loss(logit_B, step.batch)
        gap = gap + (over.interaction(feature_FB1) - wanted_IB1).square().mean()
    return loss / num_levels, gap / num_levels


@dataclass(frozen=True)
class Nodes:
    """Scores of all nodes of every level for the clicked rows, and which of them a beam would visit."""

    logit_LYK: tuple[Tensor, ...]
    score_LYK: tuple[Tensor, ...]
    """With the weighted logits of the levels above."""
    visited_LYK: tuple[Tensor, ...]


def score_nodes(model: RetrievalModel, index: Index, state: UserState, beam_width: int) -> Nodes:
    """Score nodes by the current codebooks, differentiable with respect to them."""
    weight_LL = model.ensemble_weights()
    above: list[Tensor] = []
    visited_YK = torch.ones((state.num_rows, index.levels[0].num_nodes), dtype=torch.bool)
    logits, scores, visits = [], [], []
    for number, level in enumerate(index.levels):
        vector_KQd = level.vector_KQd
        if model.config.learner in WITH_CODEBOOKS:
            vector_KQd = model.as_vectors(model.index.node_vectors(level.path_KL))
        feature_FYK = _level_features(index, state.interest, number)
        feature_FYK = scale_gradient(feature_FYK, model.config.training.trunk_gradient)
        logit_YK = model.level(number).shared(state.levels[number], vector_KQd, feature_FYK)
        score_YK = logit_YK
        for earlier, earlier_YK in enumerate(above):
            score_YK = score_YK + weight_LL[number, earlier] * earlier_YK
        logits.append(logit_YK)
        scores.append(score_YK)
        visits.append(visited_YK)
        if number + 1 < len(index.levels):
            seen_YK = score_YK.detach().masked_fill(~visited_YK, -torch.inf)
            kept_YK = seen_YK >= seen_YK.topk(min(beam_width, level.num_nodes), dim=1).values[:, -1:]
            parent_X = torch.repeat_interleave(torch.arange(level.num_nodes), level.child_start_K1.diff())
            visited_YK = (kept_YK & visited_YK)[:, parent_X]
            above = [earlier_YK[:, parent_X] for earlier_YK in (*above, logit_YK)]
    return Nodes(tuple(logits), tuple(scores), tuple(visits))


def node_softmax(index: Index, step: Forward, nodes: Nodes, log_shown_N: Tensor) -> Tensor:
    """Mean over levels of the softmax that finds the clicked ad's node among the nodes that a beam visits.

    A node weighs as much as its ads were shown, as in the softmax over ads.
    """
    total = step.trunk_BT.new_zeros(())
    for level, logit_YK, visited_YK in zip(index.levels, nodes.logit_LYK, nodes.visited_LYK, strict=True):
        target_Y = level.node_N[step.batch.ad_code_B[step.row_Y]]
        known_Y = (target_Y >= 0).nonzero().squeeze(1)
        shown_K = torch.zeros(level.num_nodes).index_add(0, level.node_S, log_shown_N[index.ad_code_S].exp())
        asked_YK = visited_YK[known_Y].scatter(1, target_Y[known_Y, None], True)
        masked_YK = logit_YK[known_Y].masked_fill(~asked_YK, -1e9)
        total = total + click_softmax(masked_YK, shown_K.log(), target_Y[known_Y])
    return total / len(index.levels)


def ensemble_loss(model: RetrievalModel, index: Index, step: Forward, logit_YU: Tensor, nodes: Nodes) -> Tensor:
    """In-batch softmax of the serving score; only the ensemble's weights learn from it."""
    weight_L = model.ensemble_weights()[-1]
    served_YU = logit_YU.detach()
    for number, level in enumerate(index.levels):
        node_U = level.node_N[step.code_U]
        level_YU = nodes.logit_LYK[number].detach()[:, node_U.clamp(min=0)] * (node_U >= 0)
        served_YU = served_YU + weight_L[number] * level_YU
    return click_softmax(served_YU, step.log_weight_U, step.local_B[step.row_Y])


def beam_loss(
    model: RetrievalModel, index: Index, state: UserState, nodes: Nodes, training: RetrievalTraining, turn: int
) -> Tensor:
    """Listwise loss of every level: which nodes, among those a beam visits, hold the best ads of a scan.

    Takes the first `beam_rows` rows of the state, and one ad of every `beam_scan`, others at every `turn`.
    """
    rows = slice(0, training.beam_rows)
    if state.num_rows == 0:
        return nodes.score_LYK[0].sum() * 0.0
    sample = thinned(index, turn % training.beam_scan, training.beam_scan)
    num_best = min(max(1, training.beam_best // training.beam_scan), sample.num_ads)
    with torch.no_grad():
        chosen = state.rows(torch.arange(state.num_rows)[rows])
        best_BX = scan_scores(model, sample, chosen).topk(num_best, dim=1).indices
    share_BX = torch.full(best_BX.shape, 1.0 / best_BX.shape[1])
    total = share_BX.new_zeros(())
    sharpness_L = model.sharpness()
    for number, level in enumerate(sample.levels):
        score_BK, visited_BK = sharpness_L[number] * nodes.score_LYK[number][rows], nodes.visited_LYK[number][rows]
        target_BK = torch.zeros_like(score_BK).scatter_add(1, level.node_S[best_BX], share_BX)
        score_BK = score_BK.masked_fill(~visited_BK & (target_BK == 0), -1e9)
        total = total - (target_BK * torch.log_softmax(score_BK, dim=1)).sum(1).mean()
    return total / len(index.levels)


def _level_features(index: Index, interest: Interest, number: int) -> Tensor:
    level = index.levels[number]
    group_FBK = interest.shared_nodes(level.value_KGR, level.weight_KGR)
    return torch.cat([group_FBK, interest.visits(level.node_N, level.num_nodes)])


def _own_node_features(index: Index, interest: Interest, number: int, node_B: Tensor) -> Tensor:
    """Features [F, B, 1] of the node of each row's own ad; zeros where its path is not published."""
    level, place_B = index.levels[number], node_B.clamp(min=0)
    group_FB1 = interest.matched(level.value_KGR[place_B], level.weight_KGR[place_B])
    return torch.cat([group_FB1, interest.matched_positions(level.node_N, node_B)]) * (node_B >= 0)[:, None]


def scale_gradient(value: Tensor, scale: float) -> Tensor:
    """The same value; its gradient is multiplied by `scale` (0 stops it)."""
    if scale == 1.0:
        return value
    if scale == 0.0:
        return value.detach()
    return value * scale + value.detach() * (1.0 - scale)
