"""Bodies of the transfer assets: label a day, train the domain model, train a vertical. Imports torch."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from dagster_project.lib.assets import Made
from dagster_project.lib.gem_stages import GEM, load_gem
from dagster_project.lib.progress import report
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import click_probabilities, frame_data, frame_days, made_artifact, new_artifact
from models.artifact import Draft
from models.data import FrameData
from models.training.storage import load_student, save_student
from models.transfer.distill import compare, comparison_table, newest, train_by_day
from models.transfer.labels import label_day, save_labels
from models.transfer.student import Student

LABELS, DOMAIN, VERTICAL = "transfer/teacher_labels", "transfer/domain_model", "transfer/vertical_model"
A_DAY_AGO, TWO_DAYS_AGO = "a_day_ago", "two_days_ago"


def label(home: Home, day: str, before: str, code: str) -> Made:
    """Teacher logits of a day's training sample as an artefact."""
    labels = label_day(load_gem(home, before), before, day, frame_data(home, day), kept_only=True)
    with new_artifact(home, "teacher_labels", LABELS, day, code) as draft:
        save_labels(draft.path / "labels.safetensors", labels)
        draft.parents = {f"{GEM}/{before}": home.artifact(GEM, before).version}
    known_R = ~torch.isnan(labels.logit_RT[:, 0])
    rate = float(torch.sigmoid(labels.logit_RT[known_R, 0]).mean()) if bool(known_R.any()) else 0.0
    return Made(
        made_artifact(draft).version,
        {"dagster/row_count": int(known_R.sum()), "mean_probability": rate, "teacher": before},
    )


def train_domain(home: Home, as_of: str, code: str) -> tuple[str, dict[str, Any]]:
    """Train through `as_of`, judged on that day before learning from it; the version and the metrics.

    Verticals start from what the model was one and two days ago: their heads need days that its tables haven't seen.

    Raises:
        ValueError: fewer than three days have teacher labels.
    """
    values = recipe(home).preset
    days = home.facts().days[1 : home.facts().days.index(as_of) + 1]
    if len(days) < 3:
        raise ValueError(f"as_of: {as_of} has {len(days)} days with teacher labels; a domain model needs 3")
    data = list(frame_days(home, days, teacher=True))
    trained = train_by_day(values.student, values.transfer, data, home.seed)
    snapshots: list[Student] = []
    for number, student in enumerate(trained, 1):
        report(f"{DOMAIN}: day {number} of {len(days)}")
        snapshots = [*snapshots[-2:], copy.deepcopy(student)]
    two_days_ago, a_day_ago, newest = snapshots
    metrics = _judge(home, {"taught": a_day_ago}, data[-1], as_of, None)[0]
    with new_artifact(home, "transfer_domain_model", DOMAIN, as_of, code) as draft:
        save_student(draft.path, newest, {A_DAY_AGO: a_day_ago, TWO_DAYS_AGO: two_days_ago})
        _describe(home, draft, as_of, metrics)
    return made_artifact(draft).version, metrics


def train_vertical(home: Home, partition: str, code: str) -> tuple[str, list[dict[str, Any]]]:
    """Continue the domain model on a vertical's newest day, compare with an untaught student, store the result.

    Compared on the last day: the untaught student saw this surface's earlier days from nothing; the vertical is the
    domain model of two days ago whose serving head learnt the day after. What is stored is one day newer.
    """
    as_of, vertical = partition.split("|")
    values, surface = recipe(home).preset, home.feature_schema().surface_code(vertical)
    days = home.facts().days[1 : home.facts().days.index(as_of) + 1]
    *earlier, last = frame_days(home, days, teacher=True)
    domain = home.artifact(DOMAIN, as_of).path

    def vertical_of(snapshot: str, day: FrameData) -> Student:
        shared = load_student(domain, snapshot)
        return newest(
            train_by_day(values.student, values.transfer, [day], home.seed, surface=surface, start_from=shared)
        )

    untaught = replace(values.transfer, technique="none")
    students = {
        "none": newest(train_by_day(values.student, untaught, earlier, home.seed, surface=surface)),
        "domain model": load_student(domain, TWO_DAYS_AGO),
        "vertical": vertical_of(TWO_DAYS_AGO, earlier[-1]),
    }
    rows = _judge(home, students, last, as_of, surface)
    with new_artifact(home, "transfer_vertical_model", VERTICAL, partition, code) as draft:
        save_student(draft.path, vertical_of(A_DAY_AGO, last))
        draft.parents = {f"{DOMAIN}/{as_of}": home.artifact(DOMAIN, as_of).version}
        _describe(home, draft, partition, rows[-1])
    return made_artifact(draft).version, rows


def _judge(
    home: Home, students: dict[str, Student], day: FrameData, as_of: str, surface: int | None
) -> list[dict[str, Any]]:
    generator = np.random.default_rng(home.seed)
    found = compare(students, day, generator, surface=surface, probability_R=click_probabilities(home, as_of))
    rows = comparison_table(found)
    for row in rows:
        row["calibration_error"] = row["calibration"] / max(row["rate"] * row["rows"], 1.0) ** 0.5
    return rows


def _describe(home: Home, draft: Draft, partition: str, metrics: dict[str, Any]) -> None:
    draft.config = {"transfer": asdict(recipe(home).preset.transfer), "partition": partition}
    draft.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float, str))}
