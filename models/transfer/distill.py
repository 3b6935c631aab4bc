"""Training students with and without a teacher, and the comparison of the techniques.

Techniques:
- `none`: truth only.
- `plain`: one head fits truth and teacher together (ordinary distillation).
- `auxiliary`: ExFM's separate distillation head with gradient scale beta, label scale alpha and weight w.
- `adapter`: auxiliary, taught by the student adapter's refined logits instead of the teacher's own.

Parameter sharing is orthogonal: a vertical may start from the domain model's weights. Then only its serving head is
trained, and it should be on days that the domain model has not seen: tables memorise the rows they are trained on
(one-epoch overfitting, Zhang et al., CIKM 2022), and whatever is trained on top of them on the same rows learns to
believe them too much. Measured on the simulator: NE of a vertical +0.05 with a backbone retrained on seen days.

Shape legend: B rows, R rows of a day, T tasks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from models import metrics
from models.batch import Batch
from models.data import FrameData
from models.schema import FeatureSchema
from models.training.loop import Loss, TrainConfig, evaluate, predict, task_weights, train_day, truth_loss
from models.training.optimizer import TableOptimizer
from models.transfer.student import TABLES, Adapter, Student, StudentConfig

SHARED_TRAINS = ("serving", "bias_ST")
"""What a student that shares parameters trains itself."""

Technique = Literal["none", "plain", "auxiliary", "adapter"]


@dataclass(frozen=True)
class TransferConfig:
    """How students are taught (ExFM section 3)."""

    technique: Technique = "auxiliary"
    alpha: float = 1.0
    """Label scale: the teacher's probability times alpha, at most 1, is the target."""
    beta: float = 1.0
    """Gradient scale from the distillation head into the backbone."""
    weight: float = 1.0
    """Weight of the distillation loss."""
    adapter_rate: float = 1e-2
    train: TrainConfig = field(default_factory=TrainConfig)


def teacher_loss(logit_BT: Tensor, teacher_BT: Tensor, alpha: float, weight_T: Tensor) -> Tensor:
    """BCE against min(1, alpha * sigmoid(teacher)), over the rows that have a teacher."""
    known_BT = ~torch.isnan(teacher_BT)
    target_BT = (alpha * torch.sigmoid(torch.where(known_BT, teacher_BT, 0.0))).clamp(max=1.0)
    loss_BT = functional.binary_cross_entropy_with_logits(logit_BT, target_BT, reduction="none") * known_BT
    return ((loss_BT.sum(0) / known_BT.sum(0).clamp(min=1)) * weight_T).sum()


class Teaching:
    """The loss of one student; keeps the adapter and its optimiser across days."""

    def __init__(self, config: TransferConfig, schema: FeatureSchema, seed: int) -> None:
        self.config = config
        self.weight_T = task_weights(config.train, len(schema.tasks))
        self.adapter: Adapter | None = None
        if config.technique == "adapter":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.adapter = Adapter(len(schema.surfaces), len(schema.tasks))
            self.adapter_optimizer = torch.optim.Adam(self.adapter.parameters(), lr=config.adapter_rate)

    def __call__(self, model: nn.Module, batch: Batch, data: FrameData) -> Tensor:
        """Loss of a batch: truth on the serving head plus what the technique adds."""
        assert isinstance(model, Student)
        config = self.config
        if config.technique == "none":
            return truth_loss(model(batch, data.ads), batch, self.weight_T)
        if config.technique == "plain":
            logit_BT = model(batch, data.ads)
            taught = teacher_loss(logit_BT, batch.teacher_BT, config.alpha, self.weight_T)
            return truth_loss(logit_BT, batch, self.weight_T) + config.weight * taught
        teacher_BT = batch.teacher_BT if self.adapter is None else self._refine(self.adapter, batch)
        served_BT, taught_BT = model.both_heads(batch, data.ads, config.beta)
        taught = teacher_loss(taught_BT, teacher_BT, config.alpha, self.weight_T)
        return truth_loss(served_BT, batch, self.weight_T) + config.weight * taught

    def _refine(self, adapter: Adapter, batch: Batch) -> Tensor:
        known_B = ~torch.isnan(batch.teacher_BT).any(dim=1)
        teacher_BT = torch.nan_to_num(batch.teacher_BT)
        seen = replace(batch, mature_BT=batch.mature_BT * known_B[:, None])
        self.adapter_optimizer.zero_grad()
        truth_loss(adapter(teacher_BT, batch.user.surface_B), seen, self.weight_T).backward()  # type: ignore[no-untyped-call]
        self.adapter_optimizer.step()
        with torch.no_grad():
            refined_BT: Tensor = adapter(teacher_BT, batch.user.surface_B)
        return torch.where(known_B[:, None], refined_BT, torch.nan)


def train_by_day(
    config: StudentConfig,
    transfer: TransferConfig,
    days: Sequence[FrameData],
    seed: int,
    *,
    surface: int | None = None,
    start_from: Student | None = None,
) -> Iterator[Student]:
    """Train a student over days in order and yield it after each: the same object, which the next day changes.

    Days without training rows (held out by the source, or without the surface) change nothing.

    Args:
        config: sizes; ignored when `start_from` is given, whose sizes are kept.
        transfer: technique and training values.
        days: days in order; `auxiliary`, `plain` and `adapter` need days with teacher logits.
        seed: decides initial weights and the order of rows.
        surface: train on the rows of one surface only (a vertical); all by default (a domain model).
        start_from: parameter sharing, the student is a copy of this one and trains its serving head only; `days`
            should be newer than those it was trained on.

    Raises:
        ValueError: there is no day, or a taught technique has no teacher logits.
    """
    if not days:
        raise ValueError("days: at least one day is needed to train a student")
    schema = days[0].schema
    model = Student(config, schema, seed) if start_from is None else copy.deepcopy(start_from)
    if start_from is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in SHARED_TRAINS)
    optimizer = TableOptimizer(model, transfer.train.optimizer, TABLES)
    if start_from is not None:
        optimizer.num_steps = transfer.train.optimizer.warmup_steps  # keeps the domain model's biases
    loss: Loss = Teaching(transfer, schema, seed)
    for number, day in enumerate(days):
        data = day if surface is None else day.only_surface(surface)
        rows = data.rows(kept_only=True)
        if len(rows):
            if transfer.technique != "none" and bool(torch.isnan(data.teacher_RT[rows]).all()):
                raise ValueError(f"days[{number}]: technique {transfer.technique!r} needs teacher logits")
            train_day(model, optimizer, data, transfer.train, seed + number, loss=loss)
        yield model


def newest(students: Iterator[Student]) -> Student:
    """The student of `train_by_day` after the last day."""
    *_, student = students
    return student


@dataclass(frozen=True)
class Comparison:
    """A technique on the hold-out: metrics and the paired difference of NE against the untaught student."""

    values: Mapping[str, float]
    against_untaught: metrics.Interval | None


def compare(
    students: Mapping[str, Student],
    holdout: FrameData,
    generator: np.random.Generator,
    *,
    surface: int | None = None,
    probability_R: NDArray[np.float64] | None = None,
) -> dict[str, Comparison]:
    """Score students on the rows of a hold-out day, main task.

    NE is taken against true probabilities [R of the whole day] where an oracle gives them, else against clicks.
    Intervals are of NE(student) - NE(`none`), bootstrapped by user; negative is better than untaught.
    """
    rows_R = holdout.rows(surface=surface)
    rows_R = rows_R[holdout.mature_RT[rows_R, 0] > 0]
    logits = {name: predict(model, holdout, rows_R) for name, model in students.items()}
    soft_R = None if probability_R is None else probability_R[rows_R.numpy()]
    label_R = holdout.label_RT[rows_R, 0].numpy() if soft_R is None else soft_R
    user_R = holdout.user_code_R[rows_R].numpy()
    main = f"{holdout.schema.tasks[0].name}/all"
    result: dict[str, Comparison] = {}
    for name, logit_RT in logits.items():
        values = evaluate(holdout, logit_RT, rows_R, probability_R=soft_R)[main]
        interval = None
        if name != "none" and "none" in logits:
            interval = metrics.paired_entropy_difference(
                label_R,
                logit_RT[:, 0].numpy() + holdout.judged_offset,
                logits["none"][:, 0].numpy() + holdout.judged_offset,
                user_R,
                generator=generator,
            )
        result[name] = Comparison(values, interval)
    return result


def comparison_table(result: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Rows for reports: technique, metrics, difference with its interval."""
    table = []
    for name, one in result.items():
        row: dict[str, Any] = {"technique": name, **one.values}
        if one.against_untaught is not None:
            row |= {
                "ne_difference": one.against_untaught.estimate,
                "ne_difference_low": one.against_untaught.low,
                "ne_difference_high": one.against_untaught.high,
            }
        table.append(row)
    return table
