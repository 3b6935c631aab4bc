"""Any log by a mapping file: csv or Parquet, one file or many, with or without impressions.

The files are read once by DuckDB and kept in memory as Arrow, sorted by time; a partition is a slice of them. Ids that
are non-negative integers stay as they are, everything else is hashed. Feedback without a time of its own happens at
the impression. What the log lacks gets the contract's unknown: ads and users that only events name are made by the
catalogue.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feature_repo.adapters.base import check_day
from feature_repo.adapters.generic_rows import read_rows
from feature_repo.adapters.mapping import Mapping, read_mapping
from feature_repo.tables import CONTRACT, GRAINS, TIME, SourceFacts

MAPPING_NAME = "mirach.toml"
MAX_SURFACES = 255
NUM_VERTICALS = 3
MIN_PARTITIONS = 3
"""One to learn from, one to release on, one to serve and be judged on."""


class GenericSource:
    """A mapped log. `location` is the mapping file, or the folder that holds it as `mirach.toml`."""

    def __init__(self, location: Path) -> None:
        path = location / MAPPING_NAME if location.is_dir() else location
        if not path.exists():
            raise ValueError(f"data_dir: there is no mapping file {path}; docs/bring_your_data.md shows one")
        self.mapping: Mapping = read_mapping(path)
        self._tables: dict[str, pa.Table] = {}

    @functools.cached_property
    def facts(self) -> SourceFacts:
        """What the mapping and the files say."""
        mapping, events = self.mapping, self._events()
        surfaces, kinds = self._surfaces(), self._kinds()
        first, last = self._range()
        ad_ids = [t[name] for t, name in events] + ([self._read("ads")["ad_id"]] if "ads" in mapping.tables else [])
        num_ads = len(np.unique(np.concatenate([ids.to_numpy() for ids in ad_ids])))
        labels = {mapping.positive: 0} if mapping.positives_only else dict.fromkeys(mapping.labels, 0)
        kinds = [k for k in kinds if k not in labels]
        facts = SourceFacts(
            name=mapping.name, timezone=mapping.timezone, first_day=first, last_day=last, surfaces=surfaces,
            verticals=surfaces[:NUM_VERTICALS], labels=labels,
            history_kinds=(*kinds, *labels) if mapping.positives_only else (*kinds, "impression", *labels),
            history_length=mapping.history_length, user_categorical=self._names("users", "categorical"),
            user_dense=self._names("users", "dense"), ad_attributes=self._names("ads", "dense"),
            category_levels=max(1, len(self._names("ads", "category"))), embedding_dim=0, evaluation_cut=last,
            negative_rate=mapping.negatives / num_ads if mapping.positives_only else mapping.negative_rate,
            max_ads=num_ads, max_users=len(np.unique(np.concatenate([t["user_id"].to_numpy() for t, _ in events]))),
            has_oracle=False, grain=mapping.grain, positives_only=mapping.positives_only,
            num_negatives=mapping.negatives if mapping.positives_only else 0, repeats=mapping.repeats,
        )  # fmt: skip
        if len(facts.days) < MIN_PARTITIONS:
            raise ValueError(
                f"{mapping.path}: the log covers {len(facts.days)} partitions of grain {mapping.grain!r} "
                f"({first} .. {last}); {MIN_PARTITIONS} are needed at least: try a finer grain"
            )
        return facts

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        """Contract tables of a partition."""
        first = check_day(self.facts, day) == 0
        start, end = (int(bound.timestamp()) * 1_000_000 for bound in self.facts.bounds(day))
        impressions = self._slice("impressions", start, end)
        yield "impressions", _conform("impressions", impressions)
        yield "outcomes", self._outcomes(impressions)
        yield "engagements", _conform("engagements", self._slice("engagements", start, end))
        for table in ("ads", "users"):
            yield table, self._entities(table, start) if first else CONTRACT[table].empty_table()

    def _events(self) -> list[tuple[pa.Table, str]]:
        """Event tables that are mapped, with the name of their ad column."""
        names = {"impressions": "ad_id", "engagements": "item_id"}
        return [(self._read(table), name) for table, name in names.items() if table in self.mapping.tables]

    def _names(self, table: str, name: str) -> tuple[str, ...]:
        mapped = self.mapping.tables.get(table)
        return tuple(mapped.many(name)) if mapped else ()

    def _surfaces(self) -> tuple[str, ...]:
        """Surfaces, most frequent first."""
        counts = pa.concat_arrays([t["surface"].combine_chunks() for t, _ in self._events()]).value_counts().to_pylist()
        found = [row["values"] for row in sorted(counts, key=lambda row: (-row["counts"], row["values"]))]
        if len(found) > MAX_SURFACES:
            raise ValueError(
                f"{self.mapping.path}: surface has {len(found)} values, at most {MAX_SURFACES} fit: map coarser ones"
            )
        return tuple(found)

    def _kinds(self) -> list[str]:
        if "engagements" not in self.mapping.tables:
            return []
        kinds: list[str] = sorted(pc.unique(self._read("engagements")["kind"]).to_pylist())
        if self.mapping.positives_only and self.mapping.positive not in kinds:
            raise ValueError(
                f"{self.mapping.path}: positive = {self.mapping.positive!r} is no kind of [engagements]: {kinds}"
            )
        return kinds

    def _range(self) -> tuple[str, str]:
        """First and last partition key."""
        times = [t["timestamp"].cast(pa.int64()).to_numpy() for t, _ in self._events() if t.num_rows]
        if not times:
            raise ValueError(f"{self.mapping.path}: no row passes the conditions: there are no events")
        zone = ZoneInfo(self.mapping.timezone)
        ends = (min(t[0] for t in times), max(t[-1] for t in times))
        first, last = (_floor(datetime.fromtimestamp(us // 1_000_000, zone).date(), self.mapping.grain) for us in ends)
        return first, last

    def _slice(self, table: str, start_us: int, end_us: int) -> pa.Table:
        if table not in self.mapping.tables:
            return CONTRACT[table].empty_table()
        rows = self._read(table)
        time_us = rows["timestamp"].cast(pa.int64()).to_numpy()
        begin, stop = np.searchsorted(time_us, [start_us, end_us])
        return rows.slice(int(begin), int(stop - begin))

    def _outcomes(self, impressions: pa.Table) -> pa.Table:
        parts = [CONTRACT["outcomes"].empty_table()]
        for label in self.mapping.labels if impressions.num_rows else ():
            rows = impressions.filter(impressions[f"label_{label}"])
            columns = {
                "request_id": rows["request_id"], "ad_id": rows["ad_id"], "label": pa.repeat(label, rows.num_rows),
                "value": pa.repeat(pa.scalar(1.0, pa.float32()), rows.num_rows),
                "event_time": rows["timestamp"], "known_at": rows["timestamp"],
            }  # fmt: skip
            parts.append(_conform("outcomes", pa.table(columns)))
        return pa.concat_tables(parts).combine_chunks()

    def _entities(self, table: str, start_us: int) -> pa.Table:
        """All ads or users of the log, known just before its first partition."""
        if table not in self.mapping.tables:
            return CONTRACT[table].empty_table()
        rows = self._read(table)
        before = pa.array(np.full(rows.num_rows, start_us - 1)).cast(TIME)
        for name in ("created_at", "known_at") if table == "ads" else ("valid_from",):
            rows = rows.append_column(name, before)
        return _conform(table, rows)

    def _read(self, table: str) -> pa.Table:
        """All rows of a mapped table in contract types, events sorted by time; files are read once."""
        if table not in self._tables:
            self._tables[table] = read_rows(self.mapping, self.mapping.tables[table])
        return self._tables[table]


def _floor(day: date, grain: str) -> str:
    """Key of the partition that holds a date."""
    if grain == "day":
        return day.isoformat()
    months = (day.year * 12 + day.month - 1) // GRAINS[grain] * GRAINS[grain]
    return date(months // 12, months % 12 + 1, 1).isoformat()


def _conform(table: str, rows: pa.Table) -> pa.Table:
    """Columns in the contract's order and types; those that are missing are null."""
    schema = CONTRACT[table]
    arrays = [
        rows[f.name].cast(f.type) if f.name in rows.column_names else pa.nulls(rows.num_rows, f.type) for f in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema).combine_chunks()
