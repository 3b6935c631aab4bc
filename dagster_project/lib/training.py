"""What the training stages share: days as `FrameData`, true probabilities, artefacts by partition, teacher pairs.

Only asset bodies import this module: it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dagster_project.lib.resources import Home
from feature_repo.lake import Lake
from feature_repo.oracle import click_matrix, frame_probabilities
from feature_repo.tables import read_facts
from feature_repo.training_tables import load_frame, load_history, load_tables
from models.artifact import Artifact, Draft
from models.batch import AdTable, History
from models.data import FrameData, to_ad_table, to_history, to_user_table

if TYPE_CHECKING:
    from models.index.joint import TeacherPairs
    from models.training.loop import TrainReport


def frame_data(home: Home, day: str) -> FrameData:
    """Rows, tables and histories of one day, as its requests saw them; the last day asked for is kept in memory."""
    return _frame_data(home.lake.root, day, day, home.lake.partition("training_frame", day).version)


def frame_days(home: Home, days: Sequence[str], *, teacher: bool = False) -> Iterator[FrameData]:
    """Several days over one shared history, oldest first, with teacher logits where they are asked for."""
    history_day = days[-1]
    for day in days:
        data = _frame_data(home.lake.root, day, history_day, home.lake.partition("training_frame", day).version)
        yield with_teacher(home, data, day) if teacher else data


def with_teacher(home: Home, data: FrameData, day: str) -> FrameData:
    """The day with its teacher's logits; as it is where no teacher had been trained yet (the first day)."""
    from models.transfer.labels import load_labels

    if not home.remembers("transfer/teacher_labels", day):
        return data
    return data.with_teacher(
        load_labels(home.artifact("transfer/teacher_labels", day).file("labels.safetensors")).logit_RT
    )


def lake_frame(lake_root: Path | str, day: str, history_day: str) -> FrameData:
    """A day of any lake over the history known by the end of `history_day`."""
    return _frame_data(lake_root, day, history_day, Lake(lake_root).partition("training_frame", day).version)


def frozen_frame_data(home: Home, day: str, cut: str) -> FrameData:
    """Rows of a day with the statistics as published at the end of an earlier day; only histories go on."""
    return _frame_data(home.lake.root, day, day, home.lake.partition("training_frame", day).version, cut)


@lru_cache(maxsize=2)
def _frame_data(lake_root: Path | str, day: str, history_day: str, version: str, cut: str | None = None) -> FrameData:
    lake, facts = Lake(lake_root), read_facts(lake_root)
    from feature_repo.days import previous_day
    from feature_repo.features import schema_for

    schema = schema_for(facts)
    tables = vars(load_tables(lake, facts, cut or previous_day(facts, day), day))
    return FrameData.from_columns(
        schema,
        load_frame(lake, day),
        to_user_table(tables, schema),
        to_ad_table(tables, schema),
        _history(lake_root, history_day, lake.partition("event_log", history_day).version),
        negative_rate=facts.negative_rate,
        drawn_negatives=facts.positives_only,
    )


@lru_cache(maxsize=1)
def _history(lake_root: Path | str, day: str, version: str) -> History:
    lake, facts = Lake(lake_root), read_facts(lake_root)
    days = facts.days[: facts.days.index(day) + 1]
    arrays = load_history(lake, days, int(lake.partition("catalogue", day).facts["num_users"]))
    return to_history(vars(arrays))


def published_ads(home: Home, day: str) -> AdTable:
    """All ads with the features published at the end of a day: what an index of that day is made of."""
    return to_ad_table(vars(load_tables(home.lake, home.facts(), day, day)), home.feature_schema())


def click_probabilities(home: Home, day: str) -> NDArray[np.float64] | None:
    """True click probabilities of a day's rows, in row order; None where the source has no oracle."""
    return frame_probabilities(home.lake, day)["click"] if home.facts().has_oracle else None


def oracle_matrix(home: Home, data: FrameData, row_B: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """True click probability of every ad for every given request [B, N]; None without an oracle."""
    if not home.facts().has_oracle:
        return None
    user_B = data.users.user_id_U[data.user_code_R[torch.from_numpy(row_B)]].numpy()
    surface_B, time_B = data.surface_R.numpy()[row_B], data.time_us_R.numpy()[row_B]
    ads = data.ads.ad_id_N.numpy(), (~data.ads.retired_N).numpy()
    return click_matrix(home.open_source(), user_B, surface_B, time_B, *ads)


@contextmanager
def new_artifact(home: Home, kind: str, name: str, partition: str, code: str) -> Iterator[Draft]:
    """Write an artefact and remember it as what the partition of asset `name` stands for."""
    with home.artifacts.create(kind, schema=home.feature_schema(), code_version=code) as draft:
        yield draft
    assert draft.result is not None
    home.remember(name, partition, draft.result)


def made_artifact(draft: Draft) -> Artifact:
    """The artefact that a finished draft became."""
    assert draft.result is not None
    return draft.result


def examples(report: TrainReport) -> dict[str, float]:
    """What a training run tells about itself."""
    return {
        "steps": report.num_steps,
        "examples": report.num_examples,
        "examples_per_s": round(report.examples_per_second, 1),
        "mean_loss": round(report.mean_loss, 6),
    }


@torch.no_grad()
def teacher_pairs(
    model: torch.nn.Module, data: FrameData, *, num_rows: int, ads_per_row: int, seed: int
) -> TeacherPairs:
    """Main-task logits of a teacher on unlabelled pairs: random rows of a day, each with random live ads."""
    from models.index.joint import TeacherPairs

    generator = torch.Generator().manual_seed(seed)
    live_N = (~data.ads.retired_N).nonzero().squeeze(1)
    row_X = torch.randperm(data.num_rows, generator=generator)[:num_rows]
    ad_code_XJ = live_N[torch.randint(len(live_N), (len(row_X), ads_per_row), generator=generator)]
    flat_row, flat_ad = row_X.repeat_interleave(ads_per_row), ad_code_XJ.flatten()
    model.eval()
    parts = [
        model(data.pairs(flat_row[first : first + 2048], flat_ad[first : first + 2048]), data.ads)[:, 0]
        for first in range(0, len(flat_row), 2048)
    ]
    return TeacherPairs(row_X, ad_code_XJ, torch.cat(parts).view(len(row_X), ads_per_row))
