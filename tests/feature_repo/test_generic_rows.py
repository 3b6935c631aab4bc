"""Rows of mapped tables: what the log brings itself (requests, positions, users), and files that are broken."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from feature_repo.adapters.base import string_ids
from feature_repo.adapters.generic import GenericSource
from feature_repo.adapters.generic_rows import _ids
from feature_repo.contract import check

SHOWN = """\
who,what,when,page,slot,clicked
-5,1,2026-03-01 09:00:00,70,3,1
8,2,2026-03-02 09:00:00,71,0,0
8,1,2026-03-03 10:00:00,72,1,0
8,2,2026-03-03 10:00:00,72,0,0
"""
MAPPING = """\
name = "shop"
timezone = "UTC"

[labels]
click = "clicked = 1"

[impressions]
files = "shown.csv"
user_id = "who"
ad_id = "what"
timestamp = "when"
request_id = "page"
position = "slot"

[users]
files = "people.csv"
user_id = "id"
categorical = { country = "country" }
dense = { tenure = "tenure / 10" }
"""
PEOPLE = "id,country,tenure\n-5,3,25\n8,,\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four impressions with request ids and positions, and two users, one of them with a negative id."""
    (tmp_path / "shown.csv").write_text(SHOWN)
    (tmp_path / "people.csv").write_text(PEOPLE)
    (tmp_path / "mirach.toml").write_text(MAPPING)
    return tmp_path


def rows(source: GenericSource, day: str, table: str) -> pa.Table:
    """One table of a day, after the contract's check."""
    report = check(table, dict(source.tables(day))[table], source.facts, day)
    report.raise_if_broken()
    return report.rows


def test_requests_and_positions_of_the_log_are_kept(folder: Path) -> None:
    source = GenericSource(folder)
    days = [rows(source, day, "impressions") for day in source.facts.days]
    assert [day["request_id"].to_pylist() for day in days] == [[70], [71], [72, 72]]
    slots = [dict(zip(day["ad_id"].to_pylist(), day["position"].to_pylist(), strict=True)) for day in days]
    assert slots == [{1: 3}, {2: 0}, {1: 1, 2: 0}]
    assert rows(source, "2026-03-01", "outcomes")["request_id"].to_pylist() == [70]


def test_requests_without_positions_are_numbered(folder: Path) -> None:
    (folder / "mirach.toml").write_text(MAPPING.replace('position = "slot"\n', ""))
    source = GenericSource(folder)
    assert rows(source, "2026-03-01", "impressions")["position"].to_pylist() == [0]
    assert rows(source, "2026-03-03", "impressions")["position"].to_pylist() == [0, 1]


def test_users_have_their_attributes_and_negative_ids_are_hashed(folder: Path) -> None:
    source = GenericSource(folder)
    assert (source.facts.user_categorical, source.facts.user_dense) == (("country",), ("tenure",))
    minus, plus = int(string_ids(["-5"])[0]), 8
    users = {row["user_id"]: row for row in rows(source, "2026-03-01", "users").to_pylist()}
    assert set(users) == {minus, plus}
    assert (users[minus]["categorical"], users[minus]["dense"]) == ([3], [2.5])
    assert (users[plus]["categorical"], users[plus]["dense"]) == ([0], [0.0])
    assert users[plus]["valid_from"].isoformat() == "2026-02-28T23:59:59.999999+00:00"
    assert rows(source, "2026-03-01", "impressions")["user_id"].to_pylist() == [minus]
    assert rows(source, "2026-03-02", "users").num_rows == 0


def test_files_that_are_no_parquet_are_named(folder: Path) -> None:
    (folder / "people.parquet").write_bytes(b"id,country,tenure\n8,3,25\n")
    (folder / "mirach.toml").write_text(MAPPING.replace("people.csv", "people.parquet"))
    source = GenericSource(folder)
    with pytest.raises(ValueError, match=r"mirach\.toml: \[users\] files can't be read: .*people\.parquet"):
        list(source.tables("2026-03-01"))


def test_an_id_is_the_same_whatever_else_its_column_holds() -> None:
    (hashed,) = string_ids(["ann"]).tolist()
    (minus,) = string_ids(["-5"]).tolist()
    (padded,) = string_ids(["08"]).tolist()
    assert _ids(pa.array([8, 9, None])).to_pylist() == [8, 9, 0]
    assert _ids(pa.array([8, -5])).to_pylist() == [8, minus]
    assert _ids(pa.array(["8", "ann", "08", None, "0"])).to_pylist() == [8, hashed, padded, 0, 0]
    assert _ids(pa.array([], pa.int64())).to_pylist() == []
