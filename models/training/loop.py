"""Training over one day and evaluation: the same loop for the foundation model, students and the baseline.

A model here is a module whose `forward(batch, ads)` gives true logits [B, T]. One pass over a day's sample,
shuffled by a seed; warm start is simply calling again with the same model and optimiser on the next day.

Shape legend: B rows of a batch, R rows evaluated, T tasks, S surfaces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from models import metrics
from models.batch import Batch
from models.data import FrameData
from models.training.checkpoint import load_checkpoint, save_checkpoint
from models.training.optimizer import OptimizerConfig, TableOptimizer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, float], None]
"""Called after every step with (step, number of steps, loss)."""
Loss = Callable[[nn.Module, Batch, FrameData], Tensor]

_PREDICT_BATCH = 2048


@runtime_checkable
class HasPrior(Protocol):
    """A model whose head biases can start from known rates."""

    def set_prior(self, rate_ST: Tensor) -> None:
        """Take the rates [S, T]."""


@dataclass(frozen=True)
class TrainConfig:
    """How one day is trained."""

    batch_size: int = 1024
    passes: int = 1
    task_weights: tuple[float, ...] = (1.0, 0.2)
    """Weight of each task in the loss; the last one repeats for further tasks."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    final_rate: float = 1.0
    """Learning rates at a day's last step relative to its first. 0.1 on a model that predicts the next day: at the
    full rate the noise of the last steps moved its sum of predicted clicks by up to 70 % on the simulator."""


@dataclass(frozen=True)
class CheckpointPlan:
    """Save into `folder` every `every_steps` steps; `train_day` continues from there when a checkpoint exists."""

    folder: Path
    every_steps: int


@dataclass(frozen=True)
class TrainReport:
    """What a day of training did. Speed covers the steps run in this process."""

    num_steps: int
    num_examples: int
    mean_loss: float
    seconds: float
    examples_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for metadata."""
        return asdict(self)


def task_weights(config: TrainConfig, num_tasks: int) -> Tensor:
    """Weights [T]."""
    given = config.task_weights
    return torch.tensor([given[min(i, len(given) - 1)] for i in range(num_tasks)])


def truth_loss(logit_BT: Tensor, batch: Batch, weight_T: Tensor) -> Tensor:
    """BCE over mature labels, calibrated on a sample that keeps every row with the main label.

    The main task fits logit + offset (exact for sampling on its own label). The sampling of the other tasks
    depends on the main label, so their rows are weighted by the inverse of the probability to be kept.
    """
    offset_B = batch.logit_offset_B
    main_B = functional.binary_cross_entropy_with_logits(
        logit_BT[:, 0] + offset_B, batch.label_BT[:, 0], reduction="none"
    )
    total = weight_T[0] * _weighted_mean(main_B, batch.mature_BT[:, 0])
    if logit_BT.shape[1] > 1:
        inverse_B = torch.where(batch.label_BT[:, 0] > 0.5, torch.ones_like(offset_B), offset_B.exp())
        other_BT = functional.binary_cross_entropy_with_logits(logit_BT[:, 1:], batch.label_BT[:, 1:], reduction="none")
        for index in range(other_BT.shape[1]):
            weight_B = batch.mature_BT[:, index + 1] * inverse_B
            total = total + weight_T[index + 1] * _weighted_mean(other_BT[:, index], weight_B)
    return total


def _weighted_mean(value_B: Tensor, weight_B: Tensor) -> Tensor:
    return (value_B * weight_B).sum() / weight_B.sum().clamp(min=1.0)


def base_rates(data: FrameData) -> Tensor:
    """Rates [S, T] on all impressions, from the mature rows of the sample, smoothed towards the mean of surfaces."""
    rows = data.rows(kept_only=True)
    label_RT, mature_RT = data.label_RT[rows], data.mature_RT[rows]
    weight_R = torch.where(label_RT[:, 0] > 0.5, 1.0, 1.0 / data.negative_rate)
    weight_RT = mature_RT * weight_R[:, None]
    num_surfaces = len(data.schema.surfaces)
    shape = (num_surfaces, label_RT.shape[1])
    positive_ST = torch.zeros(shape).index_add_(0, data.surface_R[rows], label_RT * weight_RT)
    total_ST = torch.zeros(shape).index_add_(0, data.surface_R[rows], weight_RT)
    mean_T = (positive_ST.sum(0) + 0.5) / (total_ST.sum(0) + 1.0)
    return (positive_ST + 100.0 * mean_T) / (total_ST + 100.0)


def train_day(
    model: nn.Module,
    optimizer: TableOptimizer,
    data: FrameData,
    config: TrainConfig,
    seed: int,
    *,
    loss: Loss | None = None,
    progress: Progress | None = None,
    checkpoint: CheckpointPlan | None = None,
) -> TrainReport:
    """Train on the sample of one day, `config.passes` times, in an order decided by `seed`.

    The very first day of a model's life also sets its head biases to the day's rates. With a checkpoint plan
    the run continues from the folder's checkpoint; interrupted and resumed equals uninterrupted, bit for bit.

    Raises:
        ValueError: the day has no training rows, or a loss is not finite.
    """
    rows_R = data.rows(kept_only=True)
    if not len(rows_R):
        raise ValueError("data: the day has no rows with keep=True to train on")
    loss = loss or _default_loss(config)
    model.train()
    if optimizer.num_steps == 0 and isinstance(model, HasPrior):
        model.set_prior(base_rates(data))
    order = _order(rows_R, config, seed)
    first, loss_sum = load_checkpoint(checkpoint.folder, model, optimizer) if checkpoint else (0, 0.0)
    started, num_examples = time.perf_counter(), 0
    with torch.random.fork_rng(devices=[]):
        for step in range(first, len(order)):
            torch.manual_seed(seed * 1_000_003 + step)  # dropout; stateless, so that a resumed run repeats it
            value = _step(model, optimizer, data, order[step], loss, decay(step, len(order), config.final_rate))
            num_examples += len(order[step])
            loss_sum += value
            if progress is not None:
                progress(step + 1, len(order), value)
            if checkpoint is not None and (step + 1) % checkpoint.every_steps == 0:
                save_checkpoint(checkpoint.folder, model, optimizer, step + 1, loss_sum)
    seconds = time.perf_counter() - started
    logger.info("trained %d steps on %d rows in %.1f s", len(order), len(rows_R), seconds)
    return TrainReport(
        num_steps=len(order),
        num_examples=sum(len(rows) for rows in order),
        mean_loss=loss_sum / len(order),
        seconds=seconds,
        examples_per_second=num_examples / max(seconds, 1e-9),
    )


def _default_loss(config: TrainConfig) -> Loss:
    def loss(model: nn.Module, batch: Batch, data: FrameData) -> Tensor:
        weight_T = task_weights(config, batch.label_BT.shape[1])
        return truth_loss(model(batch, data.ads), batch, weight_T)

    return loss


def even_batches(rows_R: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Rows in batches of equal size (to within one), none above `batch_size`.

    A short last batch would take a full step of Adam on a handful of rows: on the simulator one of them doubled
    the predicted clicks of the next day.
    """
    return rows_R.tensor_split(max(1, -(-len(rows_R) // batch_size)))


def _order(rows_R: Tensor, config: TrainConfig, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order: list[Tensor] = []
    for _ in range(config.passes):
        shuffled_R = rows_R[torch.randperm(len(rows_R), generator=generator)]
        order.extend(even_batches(shuffled_R, config.batch_size))
    return order


def decay(step: int, num_steps: int, final_rate: float) -> float:
    """Rate of a step relative to the first one of the day: linear, down to `final_rate` at the last step."""
    return 1.0 - (1.0 - final_rate) * step / max(1, num_steps - 1)


def _step(
    model: nn.Module, optimizer: TableOptimizer, data: FrameData, rows_B: Tensor, loss: Loss, scale: float
) -> float:
    value = loss(model, data.batch(rows_B), data)
    number = float(value.detach())
    if not np.isfinite(number):
        raise ValueError(f"loss: {number} at step {optimizer.num_steps} of the optimizer; lower the learning rates")
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step(scale)
    return number


@torch.no_grad()
def predict(model: nn.Module, data: FrameData, rows_R: Tensor | None = None) -> Tensor:
    """True logits [R, T] of the given rows (default: all of the day)."""
    rows_R = data.rows() if rows_R is None else rows_R
    model.eval()
    parts = [model(batch, data.ads) for batch in data.batches(_PREDICT_BATCH, rows=rows_R)]
    return torch.cat(parts) if parts else torch.zeros((0, len(data.schema.tasks)))


def evaluate(
    data: FrameData,
    logit_RT: Tensor,
    rows_R: Tensor | None = None,
    *,
    probability_R: NDArray[np.float64] | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics per task and surface, keys `<task>/all` and `<task>/<surface>`, over mature rows.

    Args:
        data: the day.
        logit_RT: true logits of `rows_R`. Drawn negatives (positives-only logs) are judged as the sample they are.
        rows_R: rows evaluated; all by default. Never the training sample: its rates are not those of impressions.
        probability_R: true click probabilities of `rows_R` where an oracle knows them; adds `oracle_ne`
            (NE against expected clicks) and `oracle_floor` (NE of the oracle itself) for the main task.
    """
    rows_R = data.rows() if rows_R is None else rows_R
    result: dict[str, dict[str, float]] = {}
    surface_R = data.surface_R[rows_R].numpy()
    user_R = data.user_code_R[rows_R].numpy()
    for index, task in enumerate(data.schema.tasks):
        mature_R = data.mature_RT[rows_R, index].numpy() > 0
        label_R = data.label_RT[rows_R, index].numpy()
        logit_R = logit_RT[:, index].numpy().astype(np.float64) + data.judged_offset
        soft_R = probability_R if index == 0 else None
        for name, chosen_R in _slices(data.schema.surfaces, surface_R, mature_R):
            if chosen_R.any():
                soft = None if soft_R is None else soft_R[chosen_R]
                result[f"{task.name}/{name}"] = _slice_metrics(
                    label_R[chosen_R], logit_R[chosen_R], user_R[chosen_R], soft
                )
    return result


def _slices(
    surfaces: tuple[str, ...], surface_R: NDArray[Any], mature_R: NDArray[Any]
) -> list[tuple[str, NDArray[Any]]]:
    named = [("all", mature_R)]
    return named + [(name, mature_R & (surface_R == code)) for code, name in enumerate(surfaces)]


def _slice_metrics(
    label_R: NDArray[Any], logit_R: NDArray[Any], user_R: NDArray[Any], soft_R: NDArray[np.float64] | None
) -> dict[str, float]:
    values = {
        "rows": float(label_R.size),
        "rate": float(label_R.mean()),
        "ne": metrics.normalised_entropy(label_R, logit_R),
        "auc": metrics.auc(label_R, logit_R),
        "gauc": metrics.gauc(label_R, logit_R, user_R),
        "calibration": metrics.calibration(label_R, logit_R),
    }
    if soft_R is not None:
        clipped = np.clip(soft_R, 1e-9, 1.0 - 1e-9)
        values["oracle_ne"] = metrics.normalised_entropy(soft_R, logit_R)
        values["oracle_floor"] = metrics.normalised_entropy(soft_R, np.log(clipped) - np.log1p(-clipped))
    return values
