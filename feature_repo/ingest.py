"""Bring one table of one day from a source into the lake: check it, then write it, or write nothing."""

from __future__ import annotations

import logging

import duckdb
import pyarrow as pa

from feature_repo.adapters.base import Source
from feature_repo.contract import EXAMPLES, check, check_oracle, fetch_rows, refusal
from feature_repo.lake import Lake, Partition
from feature_repo.tables import CONTRACT, SourceFacts

logger = logging.getLogger(__name__)

ORACLE_TABLE = "oracle"


def tables_of(facts: SourceFacts) -> tuple[str, ...]:
    """Names of the tables that a source has."""
    return (*CONTRACT, ORACLE_TABLE) if facts.has_oracle else tuple(CONTRACT)


def ingest_table(lake: Lake, source: Source, table: str, day: str) -> Partition:
    """Check one table of a day and write it as the partition `<table>/<day>`.

    The partition's facts hold `num_dropped` (exact repeats) and, for outcomes, `num_orphans` (rows whose
    impression is in no partition of this day and the day before).

    Raises:
        ValueError: the source lacks the table or day, or rows break the contract; nothing is written then.
    """
    _check_known(source.facts, table)
    for name, rows in source.tables(day):
        if name == table:
            return _write(lake, source.facts, table, rows, day)
    raise ValueError(f"table: source {source.facts.name!r} gave no {table!r} for {day}")


def ingest_day(lake: Lake, source: Source, day: str) -> dict[str, Partition]:
    """Ingest every table of a day in one pass over the source; impressions come before their outcomes."""
    facts = source.facts
    return {name: _write(lake, facts, name, rows, day) for name, rows in source.tables(day)}


def _check_known(facts: SourceFacts, table: str) -> None:
    known = tables_of(facts)
    if table not in known:
        raise ValueError(f"table: {table!r} is unknown; source {facts.name!r} has {', '.join(known)}")


def _write(lake: Lake, facts: SourceFacts, table: str, rows: pa.Table, day: str) -> Partition:
    _check_known(facts, table)
    report = check_oracle(rows, facts, day) if table == ORACLE_TABLE else check(table, rows, facts, day)
    report.raise_if_broken()
    remembered = {"num_dropped": report.num_dropped}
    if table == "outcomes":
        remembered["num_orphans"] = _check_causality(lake, facts, report.rows, day)
    if report.num_dropped:
        logger.warning("%s/%s: dropped %d exact repeats", table, day, report.num_dropped)
    facts.write(lake.root)
    partition = lake.write(table, day, report.rows, remembered)
    logger.info("%s/%s: wrote %d rows", table, day, partition.num_rows)
    return partition


def _check_causality(lake: Lake, facts: SourceFacts, outcomes: pa.Table, day: str) -> int:
    """Refuse outcomes that precede their impression; return the number without a known impression."""
    days = facts.days
    index = days.index(day)
    paths = [
        lake.paths("impressions", [d])[0] for d in days[max(index - 1, 0) : index + 1] if lake.has("impressions", d)
    ]
    if not paths or outcomes.num_rows == 0:
        return 0
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("outcomes", outcomes)
        connection.execute(
            """
            CREATE TEMP TABLE joined AS
            SELECT o.request_id, o.ad_id, o.label, o.event_time, i.timestamp AS shown_at
            FROM outcomes o LEFT JOIN read_parquet(?) i USING (request_id, ad_id)
            """,
            [paths],
        )
        query = "SELECT count(*) FILTER (shown_at IS NULL), count(*) FILTER (event_time < shown_at) FROM joined"
        orphans, early = connection.execute(query).fetchall()[0]
        if early:
            query = f"SELECT * FROM joined WHERE event_time < shown_at LIMIT {EXAMPLES}"
            examples = fetch_rows(connection, query)
            reason = "an outcome lies before the impression that it belongs to"
            raise ValueError(refusal("outcomes", day, "event_after_impression", early, examples, reason))
    return int(orphans)
