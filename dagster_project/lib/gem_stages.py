"""Bodies of the foundation model's assets: train a day, judge a day. Imports torch."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dagster_project.lib.assets import Made
from dagster_project.lib.metadata import chart, numbers
from dagster_project.lib.progress import report_step
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import digest
from dagster_project.lib.training import click_probabilities, examples, frame_data, made_artifact, new_artifact
from models import metrics
from models.artifact import write_json_atomically
from models.data import FrameData
from models.gem.model import Gem
from models.schema import FeatureSchema
from models.training.checkpoint import load_optimizer, load_weights, save_model
from models.training.logistic import Logistic
from models.training.loop import CheckpointPlan, TrainConfig, TrainReport, evaluate, predict, train_day
from models.training.optimizer import TableOptimizer
from models.training.storage import TABLES, load_gem_model

logger = logging.getLogger(__name__)

GEM, BASELINE = "gem/foundation_model", "gem/baseline"
CHECKPOINT_STEPS = 200
JUDGED_ROWS = 6_000
"""Impressions, drawn by seed, on which a training day is judged; test days are judged on all of them."""


def load_gem(home: Home, day: str) -> Gem:
    """The foundation model as of a day."""
    return load_gem_model(home.artifact(GEM, day).path)


def train(home: Home, day: str, before: str | None, code: str) -> Made:
    """Train GEM and its baseline one more day and store both; the version is GEM's."""
    values, schema = recipe(home).preset, home.feature_schema()
    data = frame_data(home, day)
    losses: list[float] = []
    gem = Gem(values.gem, schema, home.seed)
    version, report = _train_one(home, GEM, gem, data, day, before, code, values.gem_training, losses)
    baseline = Logistic(schema, home.seed)
    _train_one(home, BASELINE, baseline, data, day, before, code, values.gem_training, [])
    metadata = {
        "dagster/row_count": report.num_examples,
        **numbers(examples(report)),
        "parameters": sum(p.numel() for p in gem.parameters()),
        "training loss": chart("Training loss", {"loss": _smooth(losses)}, ["first step", "last step"]),
    }
    return Made(version, metadata)


def _train_one(
    home: Home, name: str, model: nn.Module, data: FrameData, day: str, before: str | None,
    code: str, config: TrainConfig, losses: list[float],
) -> tuple[str, TrainReport]:  # fmt: skip
    schema: FeatureSchema = data.schema
    optimizer = TableOptimizer(model, config.optimizer, TABLES)
    parents = {f"lake/training_frame/{day}": home.lake.partition("training_frame", day).version}
    if before is not None:
        previous = home.artifact(name, before)
        load_weights(previous.path, model)
        load_optimizer(previous.path, optimizer)
        parents[f"{name}/{before}"] = previous.version
    folder = home.path / "artifacts" / "checkpoints" / digest([name, parents, asdict(config), code])

    def on_step(step: int, total: int, loss: float) -> None:
        losses.append(loss)
        report_step(f"{name} {day}", step, total, loss)

    if len(data.rows(kept_only=True)):
        report = train_day(
            model, optimizer, data, config, home.seed * 1000 + home.facts().days.index(day),
            progress=on_step,
            checkpoint=CheckpointPlan(folder, CHECKPOINT_STEPS),
        )  # fmt: skip
    else:
        logger.info("%s/%s: the source holds this partition out of training; weights stay", name, day)
        report = TrainReport(num_steps=0, num_examples=0, mean_loss=0.0, seconds=0.0, examples_per_second=0.0)
    with new_artifact(home, name.replace("/", "_"), name, day, code) as draft:
        save_model(draft.path, model, schema, _sizes(model), optimizer)
        draft.parents, draft.config = parents, {"trained_through": day, "seed": home.seed}
        draft.metrics = examples(report)
    shutil.rmtree(folder, ignore_errors=True)
    return made_artifact(draft).version, report


def _sizes(model: nn.Module) -> dict[str, Any]:
    return asdict(model.config) if isinstance(model, Gem) else {}


def _smooth(losses: Sequence[float], points: int = 60) -> list[float]:
    if not losses:
        return []
    return [float(np.mean(part)) for part in np.array_split(np.asarray(losses), min(points, len(losses)))]


def judge(home: Home, day: str, before: str) -> dict[str, Any]:
    """Metrics of yesterday's models on impressions of a day; clicks, or expected clicks where an oracle is.

    Test days (after the source's evaluation cut) are judged on all impressions, training days on a sample of them.
    """
    data, probability_R = frame_data(home, day), click_probabilities(home, day)
    if not data.num_rows:
        return {"note": f"nothing happened in {day}: there is nothing to judge"}
    row_R = judged_rows(home, data, day)
    if probability_R is not None:
        probability_R = probability_R[row_R.numpy()]
    baseline = Logistic(data.schema, home.seed)
    load_weights(home.artifact(BASELINE, before).path, baseline)
    logit_RT, other_RT = predict(load_gem(home, before), data, row_R), predict(baseline, data, row_R)
    found = evaluate(data, logit_RT, row_R, probability_R=probability_R)
    floor = evaluate(data, other_RT, row_R, probability_R=probability_R)
    task = data.schema.tasks[0].name
    overall, base = found[f"{task}/all"], floor[f"{task}/all"]
    return {
        "day": day, "trained_through": before, "examples": _examples_seen(home, before), **overall,
        **{f"baseline_{name}": base[name] for name in ("ne", "auc", "gauc")},
        "calibration_error": overall["calibration"] / max(overall["rate"] * overall["rows"], 1.0) ** 0.5,
        "difference": _difference(data, row_R, logit_RT, other_RT, probability_R, home.seed),
        "by_surface": [{"slice": name, **values} for name, values in found.items()],
    }  # fmt: skip


def judged_rows(home: Home, data: FrameData, day: str) -> Tensor:
    """Row numbers, ascending, of the impressions on which a day is judged."""
    if day > home.facts().evaluation_cut or data.num_rows <= JUDGED_ROWS:
        return torch.arange(data.num_rows)
    generator = torch.Generator().manual_seed(home.seed)
    return torch.randperm(data.num_rows, generator=generator)[:JUDGED_ROWS].sort().values


def _examples_seen(home: Home, day: str) -> int:
    days = home.facts().days
    return sum(int(home.lake.partition("training_frame", d).facts["num_kept"]) for d in days[: days.index(day) + 1])


def _difference(
    data: FrameData, row_R: Tensor, logit_RT: Tensor, other_RT: Tensor,
    probability_R: np.ndarray[Any, Any] | None, seed: int,
) -> dict[str, float]:  # fmt: skip
    """NE of GEM minus NE of the baseline with its standard error, bootstrapped by user."""
    mature_R = data.mature_RT[row_R, 0].numpy() > 0
    label_R = data.label_RT[row_R, 0].numpy() if probability_R is None else probability_R
    interval = metrics.paired_entropy_difference(
        label_R[mature_R], logit_RT[:, 0].numpy()[mature_R] + data.judged_offset,
        other_RT[:, 0].numpy()[mature_R] + data.judged_offset,
        data.user_code_R[row_R].numpy()[mature_R], generator=np.random.default_rng(seed),
    )  # fmt: skip
    return asdict(interval)


def _report_path(home: Home, day: str) -> Path:
    return home.reports / "gem" / f"{day}.json"


def write_report(home: Home, day: str, report: dict[str, Any]) -> None:
    """Store a day's evaluation."""
    write_json_atomically(_report_path(home, day), report)


def read_report(home: Home, day: str) -> dict[str, Any]:
    """A day's evaluation."""
    report: dict[str, Any] = json.loads(_report_path(home, day).read_text())
    return report


def read_reports(home: Home, days: Sequence[str], last: str) -> list[dict[str, Any]]:
    """Evaluations through a day that have numbers, oldest first."""
    through = [day for day in days if day <= last and _report_path(home, day).exists()]
    return [report for report in (read_report(home, day) for day in through) if "ne" in report]
