"""Bring days of a source into the lake: check every table of every day, then make all of them visible, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol, runtime_checkable

import pyarrow as pa

from feature_repo.adapters.base import Source
from feature_repo.contract import EXAMPLES, check, check_oracle, fetch_rows
from feature_repo.erasure import Erased
from feature_repo.lake import Batch, Lake, Partition
from feature_repo.refusal import Breach, RefusedError
from feature_repo.sql import connect, parquet
from feature_repo.tables import CONTRACT, SourceFacts

logger = logging.getLogger(__name__)

ORACLE_TABLE = "oracle"
VOLUME_TABLES = ("impressions", "outcomes", "engagements")
"""Tables whose days are alike; the first day of `ads` and `users` also holds everything older."""
VOLUME_FACTOR = 10.0
VOLUME_DAYS, VOLUME_ROWS = 3, 100
"""A day is compared with the days before it when they are at least three and their median is at least 100 rows."""


@runtime_checkable
class ReadsFiles(Protocol):
    """A source that reads files: says which one a table comes from, for the text of a refusal."""

    def file_of(self, table: str) -> str:
        """Name of the file that holds a table."""
        ...


def tables_of(facts: SourceFacts) -> tuple[str, ...]:
    """Names of the tables that a source has."""
    return (*CONTRACT, ORACLE_TABLE) if facts.has_oracle else tuple(CONTRACT)


def ingest_days(
    lake: Lake, source: Source, days: Sequence[str], tables: Sequence[str] | None = None
) -> dict[tuple[str, str], Partition]:
    """Check and write tables of several days in one pass over the source; (table, day) -> what became visible.

    A partition's facts hold `num_dropped` (exact repeats) and, for outcomes, `num_orphans` (rows whose impression is
    in no partition of this day and the day before).

    Args:
        lake: where to.
        source: where from.
        days: in order.
        tables: all that the source has by default.

    Raises:
        RefusedError: rows break the contract; the lake is then as it was before, whichever day or table it was.
        ValueError: the source lacks a table or day, or the lake belongs to another source.
    """
    known = tables_of(source.facts)
    for table in tables or ():
        if table not in known:
            raise ValueError(f"table: {table!r} is unknown; source {source.facts.name!r} has {', '.join(known)}")
    written: dict[tuple[str, str], Partition] = {}
    erased = Erased(lake)
    with lake.together() as batch:
        for day in days:
            try:
                written.update(_stage_day(batch, source, day, list(tables or known), erased))
            except RefusedError as error:
                raise _with_table(error, source, tables or known) from None
        source.facts.write(lake.root)
    for (table, day), partition in written.items():
        logger.info("%s/%s: wrote %d rows", table, day, partition.num_rows)
    return written


def ingest_table(lake: Lake, source: Source, table: str, day: str) -> Partition:
    """Check one table of a day and write it as the partition `<table>/<day>`; see `ingest_days`."""
    return ingest_days(lake, source, [day], [table])[table, day]


def ingest_day(lake: Lake, source: Source, day: str) -> dict[str, Partition]:
    """Ingest every table of a day; see `ingest_days`."""
    return {table: partition for (table, _), partition in ingest_days(lake, source, [day]).items()}


def _with_table(error: RefusedError, source: Source, tables: Sequence[str]) -> RefusedError:
    """Name the table of files that could not be read at all."""
    if not isinstance(source, ReadsFiles):
        return error
    owner = {source.file_of(table): table for table in reversed(tables)}
    return RefusedError([replace(b, table=b.table or owner.get(b.file, "")) for b in error.breaches])


def _stage_day(
    batch: Batch, source: Source, day: str, tables: list[str], erased: Erased
) -> dict[tuple[str, str], Partition]:
    """Stage the wanted tables of a day; the source makes no table after the last one of them."""
    waiting, staged = set(tables), {}
    for table, rows in source.tables(day):
        if table in waiting:
            rows = erased.drop(rows)
            try:
                staged[table, day] = _stage(batch, source.facts, table, rows, day)
            except RefusedError as error:
                raise error.within(file=source.file_of(table) if isinstance(source, ReadsFiles) else "") from None
            waiting.discard(table)
        if not waiting:
            return staged
    raise ValueError(f"table: source {source.facts.name!r} gave no {', '.join(sorted(waiting))} for {day}")


def _stage(batch: Batch, facts: SourceFacts, table: str, rows: pa.Table, day: str) -> Partition:
    report = check_oracle(rows, facts, day) if table == ORACLE_TABLE else check(table, rows, facts, day)
    report.raise_if_broken()
    _check_volume(batch, facts, table, report.rows.num_rows, day)
    remembered = {"num_dropped": report.num_dropped}
    if table == "outcomes":
        remembered["num_orphans"] = _check_causality(batch, facts, report.rows, day)
    if report.num_dropped:
        logger.warning("%s/%s: dropped %d exact repeats", table, day, report.num_dropped)
    return batch.write(table, day, report.rows, remembered)


def _check_volume(batch: Batch, facts: SourceFacts, table: str, num_rows: int, day: str) -> None:
    """Refuse a day that is more than ten times as large as the week before it: a file that was loaded many times."""
    days = facts.days
    earlier = [d for d in days[max(0, days.index(day) - 7) : days.index(day)] if batch.has(table, d)]
    if table not in VOLUME_TABLES or len(earlier) < VOLUME_DAYS:
        return
    usual = median(batch.partition(table, d).num_rows for d in earlier)
    if usual >= VOLUME_ROWS and num_rows > VOLUME_FACTOR * usual:
        reason = f"more than {VOLUME_FACTOR:g} times the {usual:g} rows that the {len(earlier)} days before it have"
        raise RefusedError([Breach("volume", "*", num_rows, reason, table=f"{table}/{day}")])


def _check_causality(batch: Batch, facts: SourceFacts, outcomes: pa.Table, day: str) -> int:
    """Refuse outcomes that precede their impression; return the number without a known impression."""
    index = facts.days.index(day)
    paths = [
        batch.path("impressions", d)
        for d in facts.days[max(index - 1, 0) : index + 1]
        if batch.has("impressions", d)
    ]  # fmt: skip
    if not paths or outcomes.num_rows == 0:
        return 0
    with connect() as connection:
        connection.register("outcomes", outcomes)
        connection.execute(
            f"""
            CREATE TEMP TABLE joined AS
            SELECT o.request_id, o.ad_id, o.label, o.event_time, i.timestamp AS shown_at
            FROM outcomes o LEFT JOIN {parquet(connection, paths)} i USING (request_id, ad_id)
            """
        )
        query = "SELECT count(*) FILTER (shown_at IS NULL), count(*) FILTER (event_time < shown_at) FROM joined"
        orphans, early = connection.execute(query).fetchall()[0]
        if early:
            query = f"SELECT * FROM joined WHERE event_time < shown_at LIMIT {EXAMPLES}"
            examples = tuple(fetch_rows(connection, query))
            reason = "an outcome lies before the impression that it belongs to"
            breach = Breach("event_after_impression", "event_time", early, reason, examples, f"outcomes/{day}")
            raise RefusedError([breach])
    return int(orphans)
