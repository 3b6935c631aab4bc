"""Arrow schemas of the contract's tables and the facts that a source states about itself.

Adapters produce these tables day by day; everything downstream reads nothing else. Times are UTC
microseconds; ids are int64 (adapters hash strings); the partition of a row is the day on which it became
known, in the source's own time zone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from feature_repo.files import open_folder

SOURCE_FILE = "source.json"
TIME = pa.timestamp("us", tz="UTC")


def _table(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields])


CONTRACT: dict[str, pa.Schema] = {
    "impressions": _table(
        ("request_id", pa.int64(), False), ("ad_id", pa.int64(), False), ("position", pa.int16(), False),
        ("user_id", pa.int64(), False), ("surface", pa.string(), False), ("timestamp", TIME, False),
        ("propensity", pa.float32(), True), ("split", pa.string(), True),
    ),
    "outcomes": _table(
        ("request_id", pa.int64(), False), ("ad_id", pa.int64(), False), ("label", pa.string(), False),
        ("value", pa.float32(), False), ("event_time", TIME, False), ("known_at", TIME, False),
    ),
    "engagements": _table(
        ("event_id", pa.int64(), False), ("user_id", pa.int64(), False), ("item_id", pa.int64(), False),
        ("kind", pa.string(), False), ("surface", pa.string(), False), ("timestamp", TIME, True),
        ("known_at", TIME, True), ("sequence_number", pa.int64(), False), ("time_quality", pa.string(), False),
    ),
    "ads": _table(
        ("ad_id", pa.int64(), False), ("created_at", TIME, False), ("retired_at", TIME, True),
        ("known_at", TIME, False), ("advertiser_id", pa.int64(), False), ("campaign_id", pa.int64(), False),
        ("objective", pa.string(), False), ("optimisation_event", pa.string(), False),
        ("format", pa.string(), False), ("category_path", pa.list_(pa.int64()), False),
        ("bid", pa.float32(), True), ("budget", pa.float32(), True),
        ("attributes", pa.list_(pa.float32()), False), ("embedding", pa.list_(pa.float32()), False),
        ("title", pa.string(), True),
    ),
    "users": _table(
        ("user_id", pa.int64(), False), ("valid_from", TIME, False),
        ("categorical", pa.list_(pa.int64()), False), ("dense", pa.list_(pa.float32()), False),
    ),
}  # fmt: skip
"""Table -> Arrow schema. `impressions` key: (request_id, ad_id); `outcomes`: (request_id, ad_id, label);
`engagements`: event_id; `ads`: (ad_id, known_at), a change log; `users`: (user_id, valid_from), a change log."""

ORACLE = _table(
    ("request_id", pa.int64(), False), ("ad_id", pa.int64(), False),
    ("click", pa.float64(), False), ("conversion", pa.float64(), False),
)  # fmt: skip
"""Simulator only: true probabilities of every impression. Metrics read it; no feature and no training does."""

TIME_QUALITIES = ("exact", "day", "order")

GRAINS = {"day": 1, "month": 1, "quarter": 3, "year": 12}
"""Partition grain -> its length, in days for `day` and in months for the others."""


@dataclass(frozen=True)
class SourceFacts:
    """What a source says about itself; stored as `<lake>/source.json` by the first ingest.

    `labels` maps each label to its attribution window in seconds, the first one is the main label.
    `history_kinds` are the event kinds that enter user histories, in code order: engagement kinds, label
    names (an outcome with value > 0 is an event), and `impression` where the source wants impressions in.
    `evaluation_cut` is the last training day of the frozen evaluation: test days are all days after it.
    """

    name: str
    timezone: str
    first_day: str
    last_day: str
    surfaces: tuple[str, ...]
    verticals: tuple[str, ...]
    """Surfaces that get a student of their own."""
    labels: dict[str, int]
    history_kinds: tuple[str, ...]
    history_length: int
    user_categorical: tuple[str, ...]
    user_dense: tuple[str, ...]
    ad_attributes: tuple[str, ...]
    category_levels: int
    embedding_dim: int
    evaluation_cut: str
    negative_rate: float
    """Share of rows without the main label that training keeps (1.0 keeps all)."""
    max_ads: int
    max_users: int
    has_oracle: bool
    grain: str = "day"
    """How much time a partition covers, one of `GRAINS`; a key is the partition's first day."""
    positives_only: bool = False
    """True where the log holds what users chose and never what they were shown: `impressions` and `outcomes` are
    empty, every engagement of the main label is a request, and negatives are drawn (`num_negatives`)."""
    num_negatives: int = 0
    """Positives-only: ads drawn uniformly for every positive; `negative_rate` is then this number over the ads."""
    repeats: bool = True
    """Whether a user may take the same item twice; where not, answers leave out what the history holds."""
    training_through: str = ""
    """Last partition that training may learn from; later ones are an official protocol's validation and test.
    Empty: every partition that is asked for."""
    shuffled_control: bool = False
    """True where the order within a day is an artefact of the log: a control learns and is judged with it shuffled."""

    def __post_init__(self) -> None:
        """Raise ValueError where a fact contradicts another one."""
        if self.grain not in GRAINS:
            raise ValueError(f"grain: {self.grain!r} is unknown; known grains: {', '.join(GRAINS)}")
        if self.positives_only != (self.num_negatives > 0):
            raise ValueError(f"num_negatives: {self.num_negatives} with positives_only={self.positives_only}")

    @property
    def days(self) -> list[str]:
        """All partition keys, oldest first (`YYYY-MM-DD`)."""
        return list(_keys(self.first_day, self.last_day, self.grain))

    def may_train(self, day: str) -> bool:
        """Whether rows of a partition may enter a training sample."""
        return not self.training_through or day <= self.training_through

    @property
    def main_label(self) -> str:
        """The label by which ads are retrieved."""
        return next(iter(self.labels))

    def bounds(self, day: str) -> tuple[datetime, datetime]:
        """Start (inclusive) and end (exclusive) of a partition, as aware UTC times."""
        zone = ZoneInfo(self.timezone)
        start = date.fromisoformat(day)
        return (
            datetime.combine(start, time(), zone).astimezone(UTC),
            datetime.combine(next_key(start, self.grain), time(), zone).astimezone(UTC),
        )

    def write(self, lake_root: Path | str) -> None:
        """Store as `<lake>/source.json`.

        Raises:
            ValueError: the lake already belongs to another source.
        """
        files = open_folder(lake_root)
        if has_facts(lake_root):
            stored = read_facts(lake_root)
            if stored != self:
                raise ValueError(
                    f"{lake_root}: this home holds source {stored.name!r} with other facts; "
                    f"use another home for {self.name!r}"
                )
            return
        files.write(SOURCE_FILE, json.dumps(asdict(self), indent=1).encode(), None)


def next_key(start: date, grain: str) -> date:
    """First day of the partition after the one that starts on `start`."""
    if grain == "day":
        return start + timedelta(days=1)
    months = start.year * 12 + start.month - 1 + GRAINS[grain]
    return date(months // 12, months % 12 + 1, 1)


@lru_cache(maxsize=64)
def _keys(first_day: str, last_day: str, grain: str) -> tuple[str, ...]:
    keys, start = [], date.fromisoformat(first_day)
    while start <= date.fromisoformat(last_day):
        keys.append(start.isoformat())
        start = next_key(start, grain)
    return tuple(keys)


def has_facts(lake_root: Path | str) -> bool:
    """Whether something was ingested into a lake."""
    return open_folder(lake_root).read(SOURCE_FILE) is not None


def read_facts(lake_root: Path | str) -> SourceFacts:
    """Read `<lake>/source.json`; raises ValueError when nothing was ingested yet."""
    content = open_folder(lake_root).read(SOURCE_FILE)
    if content is None:
        raise ValueError(f"{lake_root}/{SOURCE_FILE} does not exist: ingest a source first")
    raw: dict[str, Any] = json.loads(content)
    values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return SourceFacts(**values)
