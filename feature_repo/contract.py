"""The contract of every table: an Arrow schema and named SQL predicates, checked in one DuckDB pass.

The schema is compared first, so that a wrong type is named as such. Then one SELECT counts the rows that break
each predicate, and a second one fetches examples only for those that failed. Exact repeats of a row are dropped
and counted; repeats of a key with different content are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa

from feature_repo.contract_rules import Predicate, not_null, oracle_predicates, predicates
from feature_repo.refusal import Breach, RefusedError
from feature_repo.tables import CONTRACT, ORACLE, SourceFacts

logger = logging.getLogger(__name__)

EXAMPLES = 3
"""Rows shown for each broken predicate."""

KEYS: dict[str, tuple[str, ...]] = {
    "impressions": ("request_id", "ad_id"),
    "outcomes": ("request_id", "ad_id", "label"),
    "engagements": ("event_id",),
    "ads": ("ad_id", "known_at"),
    "users": ("user_id", "valid_from"),
    "oracle": ("request_id", "ad_id"),
}
"""Columns that identify a row of each table."""


@dataclass(frozen=True)
class ContractReport:
    """Result of a check: the rows without exact repeats, what was dropped, and what is broken."""

    table: str
    day: str
    rows: pa.Table
    num_dropped: int
    violations: list[Breach] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Predicate -> number of broken rows (0 for the kept ones)."""

    def raise_if_broken(self) -> None:
        """Raise RefusedError that names table, day, rule, column, count, reason and examples, if a rule is broken."""
        if self.violations:
            raise RefusedError(self.violations)


def check(table: str, rows: pa.Table, facts: SourceFacts, day: str) -> ContractReport:
    """Check the rows of one table and day against the contract.

    Args:
        table: a table of `tables.CONTRACT`.
        rows: all rows of the partition.
        facts: of the source: its surfaces, labels, lengths and days.
        day: the partition (`YYYY-MM-DD`).

    Returns:
        The report; its `rows` have no exact repeats and keep their order.

    Raises:
        ValueError: the table or the day is unknown.
    """
    if table not in CONTRACT:
        raise ValueError(f"table: {table!r} is not in the contract; tables: {', '.join(CONTRACT)}")
    if day not in facts.days:
        raise ValueError(f"day: {day!r} is outside {facts.first_day} to {facts.last_day} of source {facts.name!r}")
    return _check(table, rows, CONTRACT[table], predicates(table, facts, day), day)


def check_oracle(rows: pa.Table, facts: SourceFacts, day: str) -> ContractReport:
    """Check the oracle of a day: probabilities within [0, 1], one row an impression."""
    assert facts.has_oracle, "only a simulator has an oracle"
    return _check("oracle", rows, ORACLE, oracle_predicates(), day)


def _check(table: str, rows: pa.Table, schema: pa.Schema, rules: Sequence[Predicate], day: str) -> ContractReport:
    wrong = schema_violations(rows.schema, schema)
    where = f"{table}/{day}"
    if wrong:
        wrong = [replace(breach, table=where, count=rows.num_rows) for breach in wrong]
        return ContractReport(table, day, rows, 0, wrong, {breach.rule: breach.count for breach in wrong})
    every = [*not_null(schema), *rules]
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", rows)
        rows, dropped = _drop_repeats(connection, table, rows)
        counts = _count(connection, KEYS[table], every)
        broken = [
            Breach(
                rule.name, columns_of(rule, schema), counts[rule.name], rule.reason,
                tuple(fetch_rows(connection, _broken_rows(rule))),
            )
            for rule in every
            if counts[rule.name]
        ]  # fmt: skip
        if counts["key_unique"]:
            broken.append(_conflict(connection, KEYS[table], counts["key_unique"]))
        if table == "impressions":
            broken.extend(_split_requests(connection))
    broken = [replace(breach, table=where) for breach in broken]
    return ContractReport(table, day, rows, dropped, broken, counts)


def columns_of(rule: Predicate, schema: pa.Schema) -> str:
    """The columns that a rule speaks of, joined by commas."""
    words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", rule.sql)))
    return ", ".join(name for name in schema.names if name in words)


def schema_violations(found: pa.Schema, wanted: pa.Schema) -> list[Breach]:
    """Differences of an Arrow schema from the contract's: missing, unknown, wrongly typed or misplaced columns."""
    broken = []
    for name in wanted.names:
        expected = wanted.field(name).type
        if name not in found.names:
            broken.append(Breach("column_missing", name, 0, f"column is missing; expected {expected}"))
        elif found.field(name).type != expected:
            broken.append(Breach("column_type", name, 0, _wrong_type(found.field(name).type, expected)))
    extra = [name for name in found.names if name not in wanted.names]
    broken.extend(Breach("column_unknown", name, 0, "column is not in the contract") for name in extra)
    if not broken and found.names != wanted.names:
        broken.append(Breach("column_order", "*", 0, f"columns are {found.names}, expected {wanted.names}"))
    return broken


def _wrong_type(found: pa.DataType, expected: pa.DataType) -> str:
    text = f"type is {found}, expected {expected}"
    naive = pa.types.is_timestamp(found) and found.tz is None and pa.types.is_timestamp(expected)
    return f"{text}: times need a time zone" if naive else text


def _drop_repeats(connection: Any, table: str, rows: pa.Table) -> tuple[pa.Table, int]:
    """Drop exact repeats (the first copy stays, order is kept) and re-register `rows`; cheap where keys are unique."""
    key = ", ".join(KEYS[table])
    surplus = connection.execute(f"SELECT count(*) - count(DISTINCT ({key})) FROM rows").fetchall()[0][0]
    if not surplus:
        return rows, 0
    columns = ", ".join(rows.schema.names)
    numbered = rows.append_column("row_number_in_file", pa.array(range(rows.num_rows), pa.int64()))
    connection.register("numbered", numbered)
    first = connection.sql(
        f"SELECT min(row_number_in_file) FROM numbered GROUP BY {columns} ORDER BY 1"
    ).to_arrow_table()
    kept = rows.take(first.column(0))
    connection.unregister("rows")
    connection.register("rows", kept)
    return kept, rows.num_rows - kept.num_rows


def _count(connection: Any, key: tuple[str, ...], rules: Sequence[Predicate]) -> dict[str, int]:
    selected = [f"count(*) FILTER (({r.sql}) IS NOT TRUE)" for r in rules]
    selected.append(f"count(*) - count(DISTINCT ({', '.join(key)}))")
    values = connection.execute(f"SELECT {', '.join(selected)} FROM rows").fetchall()[0]
    return dict(zip([*(r.name for r in rules), "key_unique"], map(int, values), strict=True))


def _broken_rows(rule: Predicate) -> str:
    return f"SELECT * FROM rows WHERE ({rule.sql}) IS NOT TRUE LIMIT {EXAMPLES}"


def fetch_rows(connection: Any, query: str) -> list[dict[str, Any]]:
    """Rows of a query as dictionaries."""
    rows: list[dict[str, Any]] = connection.sql(query).to_arrow_table().to_pylist()
    return rows


def _conflict(connection: Any, key: tuple[str, ...], count: int) -> Breach:
    columns = ", ".join(key)
    query = f"SELECT * FROM rows QUALIFY count(*) OVER (PARTITION BY {columns}) > 1 ORDER BY {columns} LIMIT {EXAMPLES}"
    reason = f"repeats of the key ({columns}) differ in their content"
    return Breach("key_unique", columns, count, reason, tuple(fetch_rows(connection, query)))


def _split_requests(connection: Any) -> list[Breach]:
    """Requests whose impressions disagree about the user, the surface or the time."""
    request = "SELECT request_id FROM rows GROUP BY request_id HAVING count(DISTINCT (user_id, surface, timestamp)) > 1"
    where = f"request_id IN ({request})"
    count = connection.execute(f"SELECT count(*) FROM rows WHERE {where}").fetchall()[0][0]
    if not count:
        return []
    examples = fetch_rows(connection, f"SELECT * FROM rows WHERE {where} ORDER BY request_id LIMIT {EXAMPLES}")
    reason = "the impressions of a request share user, surface and time"
    return [Breach("request_consistent", "user_id, surface, timestamp", int(count), reason, tuple(examples))]
