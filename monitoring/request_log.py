"""Read the service's request log: hourly Parquet files into one checked table of a time range.

The log is written by many processes and may hold half a day of anything, so each file is checked before it is
used: a file that can't be read or lacks a column is left out and named; rows that break a rule are left out and
counted; a request that was logged twice (a retried call) counts once, the first time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

COLUMNS: dict[str, pa.DataType] = {
    "request_id": pa.int64(), "timestamp_us": pa.int64(), "user_id": pa.int64(), "surface": pa.string(),
    "k": pa.int32(), "release": pa.string(), "tier": pa.string(), "cost": pa.float32(),
    "latency_ms": pa.float32(), "ad_ids": pa.list_(pa.int64()), "scores": pa.list_(pa.float32()),
    "feature_age_s": pa.float64(), "cold": pa.bool_(), "nodes_scored": pa.int32(), "ads_scored": pa.int32(),
    "categorical": pa.list_(pa.int64()), "dense": pa.list_(pa.float32()), "history": pa.binary(),
    "rank_by": pa.string(), "restricted": pa.bool_(),
}  # fmt: skip
"""Columns of the log, in order. `user_id` is null for users whose features came with the request."""

RULES: dict[str, str] = {
    "request_id is null": "request_id is null",
    "timestamp_us is null": "timestamp_us is null",
    "k is below 1": "k is null or k < 1",
    "more ads than asked for": "ad_ids is null or len(ad_ids) > k",
    "ads and scores differ in number": "scores is null or len(scores) != len(ad_ids)",
    "a score is not finite": "len(list_filter(scores, lambda s: not isfinite(s))) > 0",
    "an ad is repeated": "len(list_distinct(ad_ids)) != len(ad_ids)",
    "cost is negative or not finite": "cost is null or not isfinite(cost) or cost < 0",
}
"""Name -> SQL predicate of a broken row."""


@dataclass(frozen=True)
class RequestLog:
    """Requests of a time range and what was left out."""

    rows: pa.Table
    """`COLUMNS`, ordered by (timestamp_us, request_id)."""
    num_files: int
    bad_files: dict[str, str]
    """File -> why it was left out."""
    broken: dict[str, int]
    """Rule -> rows left out because of it."""
    num_repeats: int

    @property
    def num_broken(self) -> int:
        """Rows left out because they break a rule."""
        return sum(self.broken.values())


def read_requests(logs: Path, start: datetime, end: datetime) -> RequestLog:
    """Requests with `start <= timestamp < end` from `<home>/logs/requests` (the folder given).

    Raises:
        ValueError: `start` is not before `end`, or a time has no zone.
    """
    if start.tzinfo is None or end.tzinfo is None or start >= end:
        raise ValueError(f"start, end: {start} .. {end} is not a range of zoned times")
    good, bad = _check_files(_hour_files(logs, start, end))
    empty = pa.schema(list(COLUMNS.items())).empty_table()
    if not good:
        return RequestLog(empty, 0, bad, {}, 0)
    bounds = [int(t.timestamp()) * 1_000_000 for t in (start, end)]
    with duckdb.connect() as connection:
        connection.execute("set threads = 2")
        connection.execute(
            f"create temp table log as select {', '.join(COLUMNS)} from read_parquet(?) "
            "where timestamp_us is null or (timestamp_us >= ? and timestamp_us < ?)",
            [[str(p) for p in good], *bounds],
        )
        broken: dict[str, int] = {}
        for name, predicate in RULES.items():
            broken[name] = _one(connection, f"select count(*) from log where {predicate}")
            connection.execute(f"delete from log where {predicate}")
        before = _one(connection, "select count(*) from log")
        rows = connection.sql(
            "select * from log qualify row_number() over "
            "(partition by request_id, release, tier order by timestamp_us) = 1 order by timestamp_us, request_id"
        ).to_arrow_table()
    rows = rows.cast(pa.schema(list(COLUMNS.items())))
    found = {name: count for name, count in broken.items() if count}
    for name, count in found.items():
        logger.warning("request log: %d rows left out: %s", count, name)
    return RequestLog(rows, len(good), bad, found, before - rows.num_rows)


def erase_requests(logs: Path, user_id: int) -> int:
    """Drop a user's requests from every file of `<home>/logs/requests`, each replaced in one step; rows dropped.

    A file that can't be read is removed: nobody can say whose requests it holds.
    """
    num_dropped = 0
    for path in sorted(logs.rglob("*.parquet")):
        try:
            rows = pq.read_table(path)
        except (pa.ArrowException, OSError):
            path.unlink()
            continue
        kept = rows.filter(pa.compute.fill_null(pa.compute.not_equal(rows["user_id"], user_id), True))
        num_dropped += rows.num_rows - kept.num_rows
        if kept.num_rows == 0:
            path.unlink()
        elif kept.num_rows < rows.num_rows:
            temporary = path.with_name(f".{path.name}.tmp")
            pq.write_table(kept, temporary, compression="zstd")
            os.replace(temporary, path)
    return num_dropped


def answer_features(rows: pa.Table) -> pa.Table:
    """Columns of answers whose distribution is watched (`monitoring.drift`): scores, cost, length, age, tier.

    Scores of answers ranked by value are on another scale, hence null.
    """
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        answers: pa.Table = connection.sql(
            "select case rank_by when 'score' then scores[1]::double end as dense_top_score, "
            "case rank_by when 'score' then list_avg(scores)::double end as dense_mean_score, "
            "len(ad_ids)::double / k as dense_filled, cost::double as dense_cost, "
            "feature_age_s::double as dense_feature_age_s, surface as cat_surface, tier as cat_tier, "
            "cold::varchar as cat_cold from rows"
        ).to_arrow_table()
    return answers


def _hour_files(logs: Path, start: datetime, end: datetime) -> list[Path]:
    hour = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    files: list[Path] = []
    while hour < end:
        files += sorted((logs / hour.strftime("%Y-%m-%d/%H")).glob("*.parquet"))
        hour += timedelta(hours=1)
    return files


def _check_files(files: Sequence[Path]) -> tuple[list[Path], dict[str, str]]:
    good: list[Path] = []
    bad: dict[str, str] = {}
    for path in files:
        try:
            names = set(pq.read_schema(path).names)
        except (pa.ArrowException, OSError) as error:
            bad[str(path)] = f"not readable: {error}"
            continue
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            bad[str(path)] = f"columns missing: {', '.join(missing)}"
        else:
            good.append(path)
    for name, reason in bad.items():
        logger.warning("request log: %s left out: %s", name, reason)
    return good, bad


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> int:
    return int(connection.execute(query).fetchall()[0][0])
