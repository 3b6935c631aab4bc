"""Ingest: what reaches the lake, what is refused, and that a refusal leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.adapters.base import mixed_ids, string_ids
from feature_repo.adapters.registry import open_source
from feature_repo.ingest import ingest_day, ingest_days, ingest_table, tables_of
from feature_repo.lake import Lake
from feature_repo.refusal import Breach, RefusedError
from feature_repo.tables import CONTRACT, SourceFacts, read_facts
from tests.feature_repo.contract_rows import DAY, FACTS, at, good_row, table_of


class HandSource:
    """A source of hand-made rows; counts which tables were asked for."""

    def __init__(self, rows: dict[str, list[dict[str, Any]]], day: str = DAY) -> None:
        self.rows = rows
        self.day = day
        self.yielded: list[str] = []

    @property
    def facts(self) -> SourceFacts:
        return FACTS

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        for table in tables_of(FACTS):
            self.yielded.append(table)
            yield table, table_of(table, self.rows.get(table, []) if day == self.day else [])


def test_table_is_written_with_what_was_dropped(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    good = good_row("impressions")
    source = HandSource({"impressions": [good, good, {**good, "request_id": 9}]})
    partition = ingest_table(lake, source, "impressions", DAY)
    assert partition.num_rows == 2
    assert partition.facts == {"num_dropped": 1}
    assert lake.read("impressions", DAY)["request_id"].to_pylist() == [1, 9]
    assert lake.read("impressions", DAY).schema.names == CONTRACT["impressions"].names
    assert read_facts(tmp_path) == FACTS
    assert source.yielded == ["impressions"], "tables after the wanted one must not be made"


def test_refused_table_leaves_the_lake_untouched(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    ingest_table(lake, HandSource({"users": [good_row("users")]}), "users", DAY)
    broken = HandSource({"users": [good_row("users"), {**good_row("users"), "user_id": 8, "dense": [float("nan")]}]})
    with pytest.raises(ValueError, match=r"users/2026-01-06: dense_finite: 1 row refused .*'user_id': 8"):
        ingest_table(lake, broken, "users", DAY)
    assert lake.read("users", DAY)["user_id"].to_pylist() == [3]
    with pytest.raises(ValueError, match="outcomes/"):
        ingest_table(lake, HandSource({"outcomes": [{**good_row("outcomes"), "label": "x"}]}), "outcomes", DAY)
    assert not lake.has("outcomes", DAY)


def test_outcome_before_its_impression_is_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    rows = {"impressions": [good_row("impressions")], "outcomes": [{**good_row("outcomes"), "event_time": at(9.5)}]}
    source = HandSource(rows)
    ingest_table(lake, source, "impressions", DAY)
    with pytest.raises(ValueError, match=r"outcomes/2026-01-06: event_after_impression: 1 row .*'request_id': 1"):
        ingest_table(lake, source, "outcomes", DAY)
    assert not lake.has("outcomes", DAY)


def test_outcome_of_yesterdays_impression_is_checked_and_orphans_are_counted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    yesterday = {**good_row("impressions"), "timestamp": at(23.5, day=5)}
    ingest_table(lake, HandSource({"impressions": [yesterday]}, day="2026-01-05"), "impressions", "2026-01-05")
    known = {**good_row("outcomes"), "event_time": at(23.75, day=5), "known_at": at(0.1)}
    orphan = {**good_row("outcomes"), "request_id": 404}
    partition = ingest_table(lake, HandSource({"outcomes": [known, orphan]}), "outcomes", DAY)
    assert partition.facts == {"num_dropped": 0, "num_orphans": 1}
    early = {**known, "event_time": at(23.25, day=5)}
    with pytest.raises(ValueError, match="event_after_impression"):
        ingest_table(lake, HandSource({"outcomes": [early]}), "outcomes", DAY)


def test_outcomes_without_any_impressions_are_accepted(tmp_path: Path) -> None:
    partition = ingest_table(Lake(tmp_path), HandSource({"outcomes": [good_row("outcomes")]}), "outcomes", DAY)
    assert partition.facts["num_orphans"] == 0


def test_day_at_once_equals_table_by_table(tmp_path: Path) -> None:
    source = open_source("simulator", preset="tiny", seed=5)
    day = source.facts.days[1]
    together, single = Lake(tmp_path / "a"), Lake(tmp_path / "b")
    partitions = ingest_day(together, source, day)
    assert list(partitions) == list(tables_of(source.facts))
    for table in tables_of(source.facts):
        assert ingest_table(single, source, table, day).version == partitions[table].version


def test_second_source_in_one_home_is_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    ingest_table(lake, HandSource({"users": [good_row("users")]}), "users", DAY)
    with pytest.raises(ValueError, match="this home holds source 'hand'"):
        ingest_table(lake, open_source("simulator", preset="tiny", seed=5), "users", "2026-01-05")


def test_unknown_names(tmp_path: Path) -> None:
    source = HandSource({})
    with pytest.raises(ValueError, match=r"'clicks' is unknown; source 'hand' has impressions, .*oracle"):
        ingest_table(Lake(tmp_path), source, "clicks", DAY)
    with pytest.raises(ValueError, match="'criteo' is unknown; known sources: simulator, kuairand"):
        open_source("criteo")
    with pytest.raises(ValueError, match="preset: 'huge' is unknown; known presets: tiny, laptop"):
        open_source("simulator", preset="huge")
    with pytest.raises(ValueError, match="data_dir"):
        open_source("kuairand")
    with pytest.raises(ValueError, match=r"lacks interactions\.parquet, history\.parquet"):
        open_source("kuairand", data_dir=tmp_path)


def test_hashed_ids_are_stable_non_negative_and_distinct() -> None:
    assert string_ids(["feed", "user-1"]).tolist() == string_ids(["feed", "user-1"]).tolist()
    many = string_ids(str(i) for i in range(5000))
    assert (many >= 0).all()
    assert len(set(many.tolist())) == 5000
    grid = np.stack(np.meshgrid(np.arange(100), np.arange(100)), axis=-1).reshape(-1, 2)
    mixed = mixed_ids(grid[:, 0], grid[:, 1])
    assert (mixed >= 0).all()
    assert len(np.unique(mixed)) == 10_000


class FileSource(HandSource):
    """The same, from files."""

    def file_of(self, table: str) -> str:
        return f"{table}.parquet"


def many(day: str, number: int) -> HandSource:
    start = FACTS.bounds(day)[0]
    rows = [{**good_row("impressions"), "request_id": i, "timestamp": start} for i in range(number)]
    return HandSource({"impressions": rows}, day=day)


def test_a_day_ten_times_as_large_as_those_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feature_repo.ingest.VOLUME_DAYS", 2)
    lake, (first, second, third) = Lake(tmp_path), FACTS.days
    for day, number in ((first, 100), (second, 110)):
        ingest_table(lake, many(day, number), "impressions", day)
    with pytest.raises(
        ValueError, match=r"impressions/2026-01-07: volume: 1100 rows refused .*the 105 rows that the 2"
    ):
        ingest_table(lake, many(third, 1100), "impressions", third)
    assert ingest_table(lake, many(third, 1050), "impressions", third).num_rows == 1050


def test_a_refusal_names_the_file_and_touches_no_day(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    source = FileSource({"users": [{**good_row("users"), "user_id": -1}], "impressions": [good_row("impressions")]})
    with pytest.raises(ValueError, match=r"users\.parquet: users/2026-01-06: user_id_non_negative: 1 row refused"):
        ingest_days(lake, source, FACTS.days)
    assert list(tmp_path.iterdir()) == [], "neither the day before nor the tables before are visible"


def test_a_file_that_can_t_be_read_belongs_to_its_table(tmp_path: Path) -> None:
    class Unreadable(FileSource):
        def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
            yield "impressions", table_of("impressions", [])
            raise RefusedError([Breach("file_readable", "*", 0, "cut off", file="users.parquet")])

    for source in (Unreadable({}), _without_files(Unreadable)):
        with pytest.raises(RefusedError) as refused:
            ingest_days(Lake(tmp_path), source, [DAY])
        assert refused.value.breaches[0].table == ("users" if isinstance(source, FileSource) else "")


def _without_files(kind: type[FileSource]) -> HandSource:
    class Plain(HandSource):
        tables = kind.tables

    return Plain({})


def test_a_source_that_lacks_a_table_says_so(tmp_path: Path) -> None:
    class Short(HandSource):
        def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
            yield "impressions", table_of("impressions", [])

    with pytest.raises(ValueError, match="'hand' gave no ads, users for 2026-01-06"):
        ingest_days(Lake(tmp_path), Short({}), [DAY], ["users", "ads"])
