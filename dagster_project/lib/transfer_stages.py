"""Bodies of the transfer assets: label a day, train the domain model, train a vertical. Imports torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from dagster_project.lib.assets import Made
from dagster_project.lib.gem_stages import GEM, load_gem
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.training import click_probabilities, frame_data, frame_days, made_artifact, new_artifact
from models.data import FrameData
from models.training.storage import save_student
from models.transfer.distill import compare, comparison_table, train_student
from models.transfer.labels import label_day, save_labels
from models.transfer.student import Student

LABELS, DOMAIN, VERTICAL = "transfer/teacher_labels", "transfer/domain_model", "transfer/vertical_model"


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
    """Train on the days before `as_of`, judge on it, then learn from it; the version and the metrics."""
    values = recipe(home).preset
    days = home.facts().days[1 : home.facts().days.index(as_of) + 1]
    *earlier, last = frame_days(home, days, teacher=True)
    student = train_student(values.student, values.transfer, _learnable(earlier), home.seed)
    metrics = _judge(home, {"taught": student}, last, as_of, None)[0]
    if _learnable([last]):
        student = train_student(values.student, values.transfer, [last], home.seed + 1, start_from=student)
    _store(home, DOMAIN, as_of, student, metrics, code)
    return home.artifact(DOMAIN, as_of).version, metrics


def train_vertical(home: Home, partition: str, code: str) -> tuple[str, list[dict[str, Any]]]:
    """Train a vertical's student with and without the teacher, compare on the last day, store the taught one.

    All students start from nothing and see the same days, so that the difference is the teacher's; what is stored has
    learnt from the last day too. Starting from the domain model of the same day was worse: it had seen the rows.
    """
    as_of, vertical = partition.split("|")
    values, surface = recipe(home).preset, home.feature_schema().surface_code(vertical)
    days = home.facts().days[1 : home.facts().days.index(as_of) + 1]
    *earlier, last = frame_days(home, days, teacher=True)
    students = {
        "none" if technique == "none" else "taught": train_student(
            values.student, replace(values.transfer, technique=technique), _learnable(earlier, surface), home.seed,
            surface=surface,
        )
        for technique in ("none", values.transfer.technique)
    }  # fmt: skip
    rows = _judge(home, students, last, as_of, surface)
    learnt = _learnable([*earlier, last], surface)
    stored = train_student(values.student, values.transfer, learnt, home.seed, surface=surface)
    _store(home, VERTICAL, partition, stored, rows[-1], code)
    return home.artifact(VERTICAL, partition).version, rows


def _learnable(days: list[FrameData], surface: int | None = None) -> list[FrameData]:
    """Days with a training sample: nothing may have happened on some, and an official split holds others out."""
    sampled = [day if surface is None else day.only_surface(surface) for day in days]
    return [day for day, sample in zip(days, sampled, strict=True) if len(sample.rows(kept_only=True))]


def _judge(
    home: Home, students: dict[str, Student], day: FrameData, as_of: str, surface: int | None
) -> list[dict[str, Any]]:
    generator = np.random.default_rng(home.seed)
    found = compare(students, day, generator, surface=surface, probability_R=click_probabilities(home, as_of))
    rows = comparison_table(found)
    for row in rows:
        row["calibration_error"] = row["calibration"] / max(row["rate"] * row["rows"], 1.0) ** 0.5
    return rows


def _store(home: Home, name: str, partition: str, student: Student, metrics: dict[str, Any], code: str) -> None:
    values = recipe(home).preset
    with new_artifact(home, name.replace("/", "_"), name, partition, code) as draft:
        save_student(draft.path, student)
        draft.config = {"transfer": asdict(values.transfer), "partition": partition}
        draft.metrics = {key: value for key, value in metrics.items() if isinstance(value, (int, float, str))}
