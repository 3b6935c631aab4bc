"""Joint training of the retrieval model and its index under one loss (HSNN arXiv 2408.06653 section 4).

The scorer trains alone first; then residual k-means places the codebooks, the index loss warms up linearly, and
alpha rises from soft to hard. An index that may bend the ads gets its coverage by making the scorer worse, so what the
levels say to the towers is scaled (`level_gradient`, `trunk_gradient`); at 0 the scorer is, bit for bit, the one that
learns without an index. Paths and node features are
those of a snapshot that is taken again every few steps, which is what serving will see too.

Shape legend: B rows, J ads a row, X rows with teacher pairs, N ads.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.batch import AdTable, Batch
from models.data import FrameData
from models.index.config import RetrievalConfig
from models.index.learners import WITH_CODEBOOKS, LearnerSchedule
from models.index.losses import (
    Forward,
    Sample,
    beam_loss,
    distillation_loss,
    engagement_loss,
    ensemble_loss,
    forward,
    node_softmax,
    pseudo_ad_losses,
    scale_gradient,
    score_nodes,
    scorer_losses,
)
from models.index.monn import RetrievalModel
from models.index.publish import Index, publish
from models.index.quantizer import BalanceQueue
from models.index.sketching import distil_sketch
from models.schema import FeatureSchema
from models.training.loop import decay, even_batches
from models.training.optimizer import OptimizerConfig, TableOptimizer

TABLES = ("tables.weight",)
Progress = Callable[[int, int, dict[str, float]], None]
Build = Callable[[RetrievalConfig, FeatureSchema, int], RetrievalModel]
INDEX = ("index.", "ensemble_LL", "sharpness_L")
"""Parameters of the index beside those of its levels."""
LEVELS_ONLY = ("levels.", "ensemble_LL", "sharpness_L")
"""Parameters that learn in the second part of a separate index; the levels' last one, which scores ads, does not."""


@dataclass(frozen=True)
class TeacherPairs:
    """Teacher's logits of the main task on unlabelled pairs: rows of one day, each with J live ads."""

    row_X: Tensor
    ad_code_XJ: Tensor
    logit_XJ: Tensor


@dataclass(frozen=True)
class TrainingReport:
    """What happened: steps, seconds, mean losses of the last tenth of the steps, and the index's history."""

    num_steps: int
    num_rows: int
    seconds: float
    losses: dict[str, float]
    nodes_moved: int
    used_leaves: list[int] = field(default_factory=list)
    """Published leaves at every snapshot."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(vars(self))


def train_retrieval(
    config: RetrievalConfig,
    schema: FeatureSchema,
    days: Sequence[FrameData],
    *,
    pairs: Sequence[TeacherPairs | None] = (),
    seed: int,
    with_index: bool = True,
    initial: RetrievalModel | None = None,
    progress: Progress | None = None,
    build: Build = RetrievalModel,
) -> tuple[RetrievalModel, TrainingReport]:
    """Train on the training samples of `days`, oldest first; learner `separate` goes through them twice.

    Args:
        pairs: one entry a day (or none at all): unlabelled pairs with the teacher's logits.
        with_index: False trains the same scorer on the same rows without any loss of the index: the control.
        initial: weights to start from (a warm start); its configuration must be `config`.
        progress: called with step, number of steps, and the step's losses.
        build: makes the model from configuration, schema and seed; baselines with another scorer give their own.

    Raises:
        ValueError: there is no day, or `pairs` has another length than `days`.
    """
    if not days:
        raise ValueError("days: there is nothing to train on")
    if pairs and len(pairs) != len(days):
        raise ValueError(f"pairs: {len(pairs)} entries for {len(days)} days")
    separate = with_index and config.learner == "separate" and initial is None
    trainer = _Trainer(build(config, schema, seed), days, seed, with_index and not separate, initial)
    started = time.perf_counter()
    trainer.run(pairs, progress)
    if separate:
        scorer = trainer
        trainer = _Trainer(build(config, schema, seed), days, seed, True, scorer.model, levels_only=True)
        trainer.run((), progress)
        trainer.num_rows += scorer.num_rows
    if with_index and trainer.index is None:
        trainer.start_index(days[-1].ads)
    trainer.model.eval()
    if with_index:
        distil_sketch(trainer.model, publish(trainer.model, days[-1].ads), days[-1], seed=seed)
    return trainer.model, trainer.report(time.perf_counter() - started)


class _Trainer:
    """State of one training."""

    def __init__(
        self, model: RetrievalModel, days: Sequence[FrameData], seed: int, with_index: bool,
        initial: RetrievalModel | None, *, levels_only: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.levels_only = model, levels_only
        config = self.config = model.config
        self.training = config.training
        if initial is not None:
            if self.model.covisits is not None:
                self.model.covisits.resize(initial.state_dict(), "covisits.")
            self.model.load_state_dict(initial.state_dict())
        if self.model.covisits is not None and initial is None:
            self.model.covisits.fill(
                days, history_length=config.history_length, max_neighbours=config.covisit_neighbours
            )
        # Levels alone learn in evaluation mode: running statistics of the ads must stay what the scorer learnt with.
        self.model.train(not levels_only)
        if levels_only:
            ads_scorer = f"levels.{config.num_levels}."
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith(LEVELS_ONLY) and not name.startswith(ads_scorer))
        self.generator = torch.Generator().manual_seed(seed)
        # Draws of the index come from their own stream: both variants see the same rows in the same order.
        self.index_generator = torch.Generator().manual_seed(seed + 1)
        rates = OptimizerConfig(
            dense_rate=self.training.learning_rate, table_rate=self.training.table_learning_rate,
            weight_decay=self.training.dense_decay,
        )  # fmt: skip
        of_index = (*(f"levels.{number}." for number in range(config.num_levels)), *INDEX)
        self.optimizer = TableOptimizer(self.model, rates, TABLES, apart=of_index)
        batch_size = self.training.batch_size
        per_epoch = sum(-(-len(self._rows(day)) // batch_size) for day in days)
        self.epochs = max(self.training.epochs, -(-self.training.min_steps // max(1, per_epoch)))
        self.num_steps = per_epoch * self.epochs
        self.with_index = with_index
        self.warm = initial is not None and not levels_only
        self.index_start = 0.0 if initial is not None else self.training.index_start
        self.learner = LearnerSchedule(config.learner, self.training)
        self.queue = BalanceQueue(config.level_sizes, self.training.queue_length)
        self.index: Index | None = None
        self.log_shown_N = torch.zeros(0)
        self.log_engaged_N = torch.zeros(0)
        self.share_N = torch.zeros(0)
        self.days = days
        self.step = 0
        self.num_rows = 0
        self.nodes_moved = 0
        self.used_leaves: list[int] = []
        self.losses: dict[str, list[float]] = defaultdict(list)

    def _rows(self, data: FrameData) -> Tensor:
        """The training sample of a day; without a log-loss of impressions its positives only."""
        rows_R = data.rows(kept_only=True)
        return rows_R if self.training.impression_weight > 0.0 else rows_R[data.label_RT[rows_R, 0] > 0.5]

    def run(self, pairs: Sequence[TeacherPairs | None], progress: Progress | None) -> None:
        """All epochs over all days."""
        for _ in range(self.epochs):
            for number, day in enumerate(self.days):
                self.day(day, pairs[number] if pairs else None, progress)

    def report(self, seconds: float) -> TrainingReport:
        """What happened; losses are means of the last tenth of the steps."""
        tail = max(1, self.step // 10)
        return TrainingReport(
            num_steps=self.step,
            num_rows=self.num_rows,
            seconds=seconds,
            losses={name: sum(values[-tail:]) / len(values[-tail:]) for name, values in self.losses.items()},
            nodes_moved=self.nodes_moved,
            used_leaves=self.used_leaves,
        )

    def day(self, data: FrameData, pairs: TeacherPairs | None, progress: Progress | None) -> None:
        """One pass over the training sample of a day."""
        live = (~data.ads.retired_N).nonzero().squeeze(1)
        # One impression is added to each ad, so that nodes never shown keep a finite weight.
        self.log_shown_N = (torch.bincount(data.ad_code_R, minlength=len(data.ads.ad_id_N)) + 1.0).log()
        if self.training.sampled_ads:
            # Nothing was shown: every ad is a candidate once.
            self.log_shown_N = torch.zeros(len(data.ads.ad_id_N))
            self.share_N = self._positive_share(len(data.ads.ad_id_N))
        item_E = data.history.item_E.to(torch.int64)
        engaged_N = torch.bincount(item_E[item_E < len(data.ads.ad_id_N)], minlength=len(data.ads.ad_id_N)) + 1.0
        self.log_engaged_N = (engaged_N / engaged_N.sum()).log()
        if self.index is not None:
            self._snapshot(data.ads)
        for rows_B, batch in self._batches(data):
            share = self.step / max(1, self.num_steps)
            if self.with_index and self.index is None and share >= self.index_start:
                self.start_index(data.ads)
            losses = self._losses(rows_B, batch, data, pairs, live, share)
            total = torch.stack(list(losses.values())).sum()
            self._optimise(total)
            self.step += 1
            self.num_rows += len(batch.ad_code_B)
            values = {name: float(value.detach()) for name, value in losses.items()}
            for name, value in values.items():
                self.losses[name].append(value)
            if progress is not None:
                progress(self.step, self.num_steps, values)
            if self.index is not None and self.step % self.training.refresh_every == 0:
                self._refresh(data.ads, live, share)

    def _batches(self, data: FrameData) -> Iterator[tuple[Tensor, Batch]]:
        """Shuffled rows of the training sample and their batches."""
        rows_R = self._rows(data)
        rows_R = rows_R[torch.randperm(len(rows_R), generator=self.generator)]
        for rows_B in even_batches(rows_R, self.training.batch_size):
            if len(rows_B):
                yield rows_B, data.batch(rows_B)

    def start_index(self, ads: AdTable) -> None:
        """Place the codebooks by residual k-means on the live ads and take the first snapshot."""
        if not self.warm:
            with torch.no_grad():
                vector_ND = self._codes(ads, (~ads.retired_N).nonzero().squeeze(1))
            self.learner.start(self.model, vector_ND, self.index_generator)
        self._snapshot(ads)

    def _refresh(self, ads: AdTable, live: Tensor, share: float) -> None:
        """Let the codebooks follow the ads, revive dead nodes (not at the very end), and take a snapshot."""
        with torch.no_grad():
            vector_ND = self._codes(ads, live)
        progress = self._index_share(share)
        self.nodes_moved += self.learner.refresh(self.model, vector_ND, share, progress, self.index_generator)
        self._snapshot(ads)

    def _codes(self, ads: AdTable, code_M: Tensor) -> Tensor:
        """What the index sorts ads by, [M, D]."""
        with fixed_statistics(self.model):
            return self.model.ad_vectors(ads, code_M).flatten(1)

    def _optimise(self, total: Tensor) -> None:
        """One step; codebooks move by `codebook_rate` of what the optimiser would have moved them."""
        before = [codebook.detach().clone() for codebook in self.model.index.codebook_LKD]
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(decay(self.step, self.num_steps, self.training.final_rate))
        with torch.no_grad():
            for old, codebook in zip(before, self.model.index.codebook_LKD, strict=True):
                codebook.copy_(torch.lerp(old, codebook, self.learner.codebook_rate))

    def _snapshot(self, ads: AdTable) -> None:
        with fixed_statistics(self.model):
            self.index = publish(self.model, ads)
        self.used_leaves.append(self.index.level_sizes[-1])

    def _index_share(self, share: float) -> float:
        """How far the index's own part of training has come, 0 to 1."""
        return (share - self.index_start) / max(1e-9, 1.0 - self.index_start)

    def _losses(
        self, rows_B: Tensor, batch: Batch, data: FrameData, pairs: TeacherPairs | None, live: Tensor, share: float
    ) -> dict[str, Tensor]:
        training = self.training
        sample = self._sample(live) if training.sampled_ads else None
        step = forward(self.model, batch, data.ads, training.trunk_gradient, sample)
        losses, logit_YU = scorer_losses(self.model, step, training.impression_weight)
        if self.levels_only:
            assert self.index is not None
            return self._index_losses(step, logit_YU, live, share, self.index)
        losses["softmax"] = losses["softmax"] * training.softmax_weight
        if training.engagement_weight > 0.0:
            place_X, item_X = next_engagements(data, rows_B, training.engagement_rows)
            engagement = engagement_loss(self.model, step.trunk_BT[place_X], data.ads, item_X, self.log_engaged_N)
            losses["engagement"] = engagement * training.engagement_weight
        if pairs is not None and len(pairs.row_X) and training.distillation_weight > 0.0:
            chosen = torch.randint(len(pairs.row_X), (training.pair_rows,), generator=self.generator)
            code_BJ = pairs.ad_code_XJ[chosen]
            unlabelled = data.pairs(pairs.row_X[chosen], code_BJ[:, 0])
            error = distillation_loss(
                self.model, unlabelled, data.ads, code_BJ, pairs.logit_XJ[chosen],
                centred=training.impression_weight == 0.0,
            )  # fmt: skip
            losses["distillation"] = error * training.distillation_weight
        if self.index is not None:
            losses |= self._index_losses(step, logit_YU, live, share, self.index)
        return losses

    def _positive_share(self, num_ads: int) -> Tensor:
        """Share of each ad among the positives of all days."""
        count_N = torch.zeros(num_ads)
        for day in self.days:
            code_X = day.ad_code_R[self._rows(day)]
            count_N += torch.bincount(code_X[code_X < num_ads], minlength=num_ads)
        return count_N / count_N.sum().clamp(min=1.0)

    def _sample(self, live: Tensor) -> Sample:
        """Fresh candidates for the softmax of a step."""
        drawn = torch.randint(len(live), (self.training.sampled_ads,), generator=self.generator)
        return Sample(torch.unique(live[drawn]), self.share_N)

    def _index_losses(
        self, step: Forward, logit_YU: Tensor, live: Tensor, share: float, index: Index
    ) -> dict[str, Tensor]:
        training, model = self.training, self.model
        progress = self._index_share(share)
        warm = min(1.0, progress / max(1e-9, training.index_warm_up))
        gradient = training.level_gradient * (share >= training.gradient_start) * warm
        alpha = training.min_alpha + (training.max_alpha - training.min_alpha) * progress**training.alpha_exponent
        asked = step.first(training.level_rows)
        nodes = score_nodes(model, index, asked.clicked, training.beam_width)
        scale = training.index_weight * warm
        pseudo_LUD: tuple[Tensor, ...] = ()
        if training.impression_weight > 0.0:
            pseudo_LUD = self._pseudo_ads(step, scale_gradient(step.vector_UQd.flatten(1), gradient), alpha, index)
        losses = {
            "level_softmax": node_softmax(index, asked, nodes, self.log_shown_N) * scale * training.softmax_weight,
            "ensemble": ensemble_loss(model, index, asked, logit_YU[: len(asked.row_Y)], nodes),
        }
        if model.config.learner == "joint":
            chosen = live[torch.randint(len(live), (training.ads_per_step,), generator=self.index_generator)]
            uniform = model.index(scale_gradient(self._codes(step.ads, chosen), gradient), alpha)
            losses["reconstruction"] = uniform.reconstruction * training.reconstruction_weight
            losses["balance"] = self.queue.loss(uniform) * training.balance_weight * warm
        if pseudo_LUD:
            impressions, gap = pseudo_ad_losses(model, step, index, pseudo_LUD)
            losses["level_impressions"] = impressions * scale * training.impression_weight
            losses["alignment"] = gap * scale * training.alignment_weight
        if training.beam_weight > 0.0 and self.step % training.beam_every == 0:
            beam = beam_loss(model, index, asked.clicked, nodes, training, self.step // training.beam_every)
            losses["beam"] = beam * training.beam_weight * warm
        return losses

    def _pseudo_ads(self, step: Forward, vector_UD: Tensor, alpha: float, index: Index) -> tuple[Tensor, ...]:
        """What stands for each ad of the batch at every level: a soft mixture of nodes, or the node it is in."""
        if self.config.learner in WITH_CODEBOOKS:
            pseudo_LUD: tuple[Tensor, ...] = self.model.index(vector_UD, alpha).pseudo_LND
            return pseudo_LUD
        # Ads without a published path have no node; their rows stand for a handful of retired ads.
        return tuple(level.vector_KQd.flatten(1)[level.node_N[step.code_U].clamp(min=0)] for level in index.levels)


@contextmanager
def fixed_statistics(model: RetrievalModel) -> Iterator[None]:
    """Ads that pass here leave the running statistics of the ad tower alone, which the scorer learns with."""
    model.ad_tower.eval()
    try:
        yield
    finally:
        model.ad_tower.train(model.training)


def next_engagements(data: FrameData, rows_B: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Places in `rows_B` of at most `limit` rows with a later event in the history, and the next event's item.

    Only items that the day's table of ads knows count; what a user does after the request is a target here, never
    an input.
    """
    place_X = data.history.offset_U1[data.user_code_R[rows_B]] + data.end_offset_R[rows_B]
    there_X = (place_X < data.history.offset_U1[data.user_code_R[rows_B] + 1]).nonzero().squeeze(1)
    item_X = data.history.item_E[place_X[there_X]].to(torch.int64)
    known = item_X < len(data.ads.ad_id_N)
    return there_X[known][:limit], item_X[known][:limit]
