"""Partition grains: keys follow the calendar, bounds touch, and contradictions are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from feature_repo.days import previous_day
from feature_repo.tables import read_facts
from tests.feature_repo.handmade import FACTS

QUARTERS = replace(FACTS, grain="quarter", first_day="2013-10-01", last_day="2014-07-01", evaluation_cut="2014-04-01")


@pytest.mark.parametrize(
    ("grain", "first", "last", "keys"),
    [
        ("day", "2026-02-27", "2026-03-01", ["2026-02-27", "2026-02-28", "2026-03-01"]),
        ("month", "2025-11-01", "2026-01-01", ["2025-11-01", "2025-12-01", "2026-01-01"]),
        ("quarter", "2013-10-01", "2014-07-01", ["2013-10-01", "2014-01-01", "2014-04-01", "2014-07-01"]),
        ("year", "2012-01-01", "2014-01-01", ["2012-01-01", "2013-01-01", "2014-01-01"]),
    ],
)
def test_keys_are_first_days(grain: str, first: str, last: str, keys: list[str]) -> None:
    facts = replace(FACTS, grain=grain, first_day=first, last_day=last)
    assert facts.days == keys
    for before, after in itertools.pairwise(keys):
        assert facts.bounds(before)[1] == facts.bounds(after)[0]
        assert previous_day(facts, after) == before


def test_bounds_are_local(tmp_path) -> None:
    facts = replace(QUARTERS, timezone="America/New_York")
    start, end = facts.bounds("2014-01-01")
    assert (start.isoformat(), end.isoformat()) == ("2014-01-01T05:00:00+00:00", "2014-04-01T04:00:00+00:00")
    facts.write(tmp_path)
    assert read_facts(tmp_path) == facts


def test_training_ends_where_the_protocol_says() -> None:
    facts = replace(QUARTERS, training_through="2014-01-01")
    assert [facts.may_train(day) for day in facts.days] == [True, True, False, False]
    assert all(QUARTERS.may_train(day) for day in QUARTERS.days)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="grain: 'week' is unknown"):
        replace(FACTS, grain="week")
    with pytest.raises(ValueError, match="num_negatives: 0 with positives_only=True"):
        replace(FACTS, positives_only=True)
