"""Days of a source and inputs of a day's build: what came before, what may be absent, what is looked back at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from feature_repo.lake import Lake
from feature_repo.sql import Input
from feature_repo.tables import CONTRACT, SourceFacts

MICROSECONDS = 1_000_000
DAY_SECONDS = 86_400


def previous_day(facts: SourceFacts, day: str) -> str | None:
    """The day before, None for the first one; raises ValueError when the source has no such day."""
    days = facts.days
    if day not in days:
        raise ValueError(f"day: {day!r} is outside the source's days {facts.first_day}..{facts.last_day}")
    position = days.index(day)
    return days[position - 1] if position else None


def day_bounds_us(facts: SourceFacts, day: str) -> tuple[int, int]:
    """Start (inclusive) and end (exclusive) of a day in UTC microseconds."""
    start, end = facts.bounds(day)
    return int(start.timestamp()) * MICROSECONDS, int(end.timestamp()) * MICROSECONDS


def trailing_days(facts: SourceFacts, day: str, num_days: int) -> list[str]:
    """The last `num_days` days up to and including `day`, fewer at the start of the source."""
    previous_day(facts, day)
    days = facts.days
    position = days.index(day)
    return days[max(0, position + 1 - num_days) : position + 1]


def attribution_days(facts: SourceFacts, day: str) -> list[str]:
    """Days whose impressions an outcome of `day` may belong to: the longest window and a day for late reports."""
    longest_s = max(facts.labels.values())
    return trailing_days(facts, day, math.ceil(longest_s / DAY_SECONDS) + 2)


def contract_rows(lake: Lake, table: str, days: Sequence[str]) -> Input:
    """Paths of a contract table's partitions; an empty table of the right schema where none exists."""
    present = [day for day in days if lake.has(table, day)]
    return lake.paths(table, present) if present else CONTRACT[table].empty_table()


def codes_table(names: Sequence[str]) -> pa.Table:
    """Names with their positions as codes, for joins in SQL: columns name, code (uint8)."""
    if len(names) > 255:
        raise ValueError(f"names: {len(names)} of them do not fit 8-bit codes")
    return pa.table({"name": pa.array(names, pa.string()), "code": pa.array(range(len(names)), pa.uint8())})
