"""Data sets of the index benchmarks as frames: contract tables and features of a source in a lake of its own.

Built once below a cache folder, without the orchestrator: the benchmarks judge models, not the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from feature_repo.adapters.amazon_reviews import AmazonReviews
from feature_repo.adapters.base import Source
from feature_repo.adapters.kuairand import KuaiRandSource
from feature_repo.days import previous_day
from feature_repo.features import build_day, schema_for
from feature_repo.ingest import ingest_day
from feature_repo.lake import Lake
from feature_repo.oracle import click_matrix
from feature_repo.simulator.config import SimulatorConfig, preset
from feature_repo.simulator.source import SimulatorSource
from feature_repo.training_tables import load_frame, load_history, load_tables
from models.batch import History
from models.data import FrameData, to_ad_table, to_history, to_user_table

TRAINED_DAYS = 12
"""Newest days before the last one that models of dense logs learn from; sparse logs take all."""
LARGE = SimulatorConfig(num_users=22_000, num_ads=100_000, num_impressions=1_040_000)
MILLION = SimulatorConfig(num_users=22_000, num_ads=1_000_000, num_impressions=520_000, num_days=6)
FOLDERS = {"beauty": "amazon_beauty", "beauty_shuffled": "amazon_beauty", "sports": "amazon_sports",
           "sports_shuffled": "amazon_sports", "kuairand": "kuairand_pure_part"}  # fmt: skip
SIMULATED = {"tiny": preset("tiny"), "laptop": preset("laptop"), "simulator": LARGE, "million": MILLION}
MADE = tuple(SIMULATED)
"""Worlds that need no files: the simulator's presets, and those with 100,000 and a million ads."""
NAMES = (*MADE, *FOLDERS)


@dataclass(frozen=True)
class World:
    """A data set that is ready to be learnt from."""

    name: str
    source: Source
    lake: Lake
    train: tuple[str, ...]
    """Partition days that models learn from."""
    judged: str
    """The day whose requests are judged: the last one, or the one before it for choices (`validation`)."""

    @property
    def positives_only(self) -> bool:
        """Whether there are no impressions."""
        return self.source.facts.positives_only

    def days(self) -> list[FrameData]:
        """Training days over the history known by the end of the last of them."""
        history = self._history(self.train[-1])
        return [self._frame(day, history) for day in self.train]

    def judged_day(self) -> FrameData:
        """The judged day as its requests saw it."""
        return self._frame(self.judged, self._history(self.judged))

    def truth(self, data: FrameData, row_B: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """True click probability of every ad for every request [B, N]; None without an oracle."""
        if not self.source.facts.has_oracle:
            return None
        user_B = data.users.user_id_U[data.user_code_R[torch.from_numpy(row_B)]].numpy()
        surface_B, time_B = data.surface_R.numpy()[row_B], data.time_us_R.numpy()[row_B]
        ads = data.ads.ad_id_N.numpy(), (~data.ads.retired_N).numpy()
        return click_matrix(self.source, user_B, surface_B, time_B, *ads)

    def _history(self, day: str) -> History:
        days = self.source.facts.days
        num_users = int(self.lake.partition("catalogue", day).facts["num_users"])
        return to_history(vars(load_history(self.lake, days[: days.index(day) + 1], num_users)))

    def _frame(self, day: str, history: History) -> FrameData:
        facts = self.source.facts
        schema = schema_for(facts)
        tables = vars(load_tables(self.lake, facts, previous_day(facts, day), day))
        return FrameData.from_columns(
            schema, load_frame(self.lake, day), to_user_table(tables, schema), to_ad_table(tables, schema), history,
            negative_rate=facts.negative_rate, drawn_negatives=facts.positives_only,
        )  # fmt: skip


def missing(name: str, data_root: Path | None) -> str | None:
    """Why a data set can't be used here, or None."""
    if name in MADE:
        return None
    if data_root is None:
        return "no folder of data sets was given (--data)"
    folder = data_root / FOLDERS[name]
    return None if folder.is_dir() else f"{folder} does not exist"


def open_world(
    name: str, cache: Path, data_root: Path | None, *, validation: bool = False, report: Callable[[str], None] = print
) -> World:
    """The data set, built where the cache lacks it.

    Args:
        validation: judge the day before the last one, and learn from what is older: for choices.

    Raises:
        ValueError: the name is unknown, or the files are absent.
    """
    if name not in NAMES:
        raise ValueError(f"name: {name!r} is unknown; known data sets: {', '.join(NAMES)}")
    reason = missing(name, data_root)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    source, lake = _source(name, data_root), Lake(cache / "lakes" / name)
    days = source.facts.days
    for day in days:
        if not lake.has("training_frame", day):
            report(f"{name}: features of {day}")
            ingest_day(lake, source, day)
            build_day(lake, source.facts, day)
    judged = days[-2] if validation else days[-1]
    return World(name, source, lake, _sampled(lake, source, days[: days.index(judged)]), judged)


def _source(name: str, data_root: Path | None) -> Source:
    if name in SIMULATED:
        return SimulatorSource(SIMULATED[name], seed=0)
    assert data_root is not None
    folder = data_root / FOLDERS[name]
    if name == "kuairand":
        return KuaiRandSource(folder)
    return AmazonReviews(FOLDERS[name], folder, shuffled=name.endswith("_shuffled"))


def _sampled(lake: Lake, source: Source, days: Sequence[str]) -> tuple[str, ...]:
    kept = [day for day in days if lake.partition("training_frame", day).facts["num_kept"]]
    return tuple(kept if source.facts.positives_only else kept[-TRAINED_DAYS:])
