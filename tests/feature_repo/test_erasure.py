"""Erasing a user from a lake: rows of every table, what was derived, and what is ingested later."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.erasure import Erased, erase_from_lake, without
from feature_repo.ingest import ingest_days
from feature_repo.lake import Lake
from tests.feature_repo.contract_rows import DAY, at, good_row
from tests.feature_repo.test_ingest import HandSource

SECOND = {
    "impressions": {"request_id": 7, "user_id": 8},
    "users": {"user_id": 8},
    "engagements": {"event_id": 5, "user_id": 8},
}


@pytest.fixture
def source() -> HandSource:
    rows = {
        table: [good_row(table), {**good_row(table), **SECOND.get(table, {"request_id": 7})}]
        for table in ("impressions", "outcomes", "engagements", "users", "oracle")
    }
    return HandSource({**rows, "ads": [good_row("ads")]})


@pytest.fixture
def lake(tmp_path: Path, source: HandSource) -> Lake:
    lake = Lake(tmp_path / "lake")
    ingest_days(lake, source, source.facts.days)
    lake.write("catalogue", "2026-01-05", pa.table({"user_id": [3]}))
    lake.write("catalogue", DAY, pa.table({"user_id": [3, 8]}))
    return lake


def test_rows_of_every_table_go_with_the_user(lake: Lake) -> None:
    erasure = erase_from_lake(lake, 8)
    assert set(erasure.rewritten) == {
        (table, DAY) for table in ("impressions", "outcomes", "engagements", "users", "oracle")
    }
    assert (erasure.num_rows, erasure.first_day) == (5, DAY)
    for table in ("impressions", "engagements", "users"):
        assert lake.read(table, DAY)["user_id"].to_pylist() == [3]
    for table in ("outcomes", "oracle"):
        assert lake.read(table, DAY)["request_id"].to_pylist() == [1], "an outcome belongs to the user of its request"
    assert lake.read("ads", DAY).num_rows == 1


def test_derived_partitions_go_from_the_first_day_on(lake: Lake) -> None:
    assert erase_from_lake(lake, 8).removed == [("catalogue", DAY)]
    assert lake.keys("catalogue") == ["2026-01-05"]


def test_the_lake_remembers_a_hash_and_ingest_drops_the_user(lake: Lake, source: HandSource) -> None:
    erase_from_lake(lake, 8)
    stored = (Path(lake.root) / "erased.json").read_text()
    assert "8" not in [word.strip('"') for word in stored.replace(",", " ").split()]
    assert Erased(lake).among(pa.chunked_array([[3, 8, 8, None]])).tolist() == [8]
    ingest_days(lake, source, source.facts.days)
    assert lake.read("impressions", DAY)["user_id"].to_pylist() == [3]
    assert lake.read("users", DAY)["user_id"].to_pylist() == [3]
    assert lake.read("outcomes", DAY)["request_id"].to_pylist() == [1]


def test_a_second_erasure_of_the_same_user_changes_nothing(lake: Lake) -> None:
    erase_from_lake(lake, 8)
    before = {table: lake.partition(table, DAY) for table in ("impressions", "users")}
    erasure = erase_from_lake(lake, 8)
    assert (erasure.rewritten, erasure.removed, erasure.num_rows, erasure.first_day) == ({}, [], 0, None)
    assert {table: lake.partition(table, DAY) for table in before} == before


def test_without_keeps_nulls_and_order() -> None:
    rows = pa.table({"user_id": pa.array([5, None, 6, 5], pa.int64())})
    assert without(rows, "user_id", np.array([5]))["user_id"].to_pylist() == [None, 6]
    assert without(rows, "user_id", np.array([], np.int64)) is rows


def test_an_outcome_of_a_later_day_goes_too(tmp_path: Path) -> None:
    late = {**good_row("outcomes"), "event_time": at(1, day=7), "known_at": at(1, day=7)}
    lake = Lake(tmp_path / "lake")
    ingest_days(lake, HandSource({"impressions": [good_row("impressions")]}), [DAY], ["impressions"])
    ingest_days(lake, HandSource({"outcomes": [late]}, day="2026-01-07"), ["2026-01-07"], ["outcomes"])
    assert set(erase_from_lake(lake, 3).rewritten) == {("impressions", DAY), ("outcomes", "2026-01-07")}
    assert lake.read("outcomes", "2026-01-07").num_rows == 0
