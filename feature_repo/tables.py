"""Arrow schemas of the contract's tables and the facts that a source states about itself.

Adapters produce these tables day by day; everything downstream reads nothing else. Times are UTC
microseconds; ids are int64 (adapters hash strings); the partition of a row is the day on which it became
known, in the source's own time zone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
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

    @property
    def days(self) -> list[str]:
        """All partition keys, oldest first (`YYYY-MM-DD`)."""
        first, last = date.fromisoformat(self.first_day), date.fromisoformat(self.last_day)
        return [(first + timedelta(days=i)).isoformat() for i in range((last - first).days + 1)]

    @property
    def main_label(self) -> str:
        """The label by which ads are retrieved."""
        return next(iter(self.labels))

    def bounds(self, day: str) -> tuple[datetime, datetime]:
        """Start (inclusive) and end (exclusive) of a partition day, as aware UTC times."""
        zone = ZoneInfo(self.timezone)
        start = date.fromisoformat(day)
        return (
            datetime.combine(start, time(), zone).astimezone(UTC),
            datetime.combine(start + timedelta(days=1), time(), zone).astimezone(UTC),
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
