"""The lake in an object store: the same partitions as on a disk, the manifest last, and one winner of two writers."""

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.adapters.registry import open_source
from feature_repo.erasure import erase_from_lake
from feature_repo.features import build_catalogue, build_event_log, build_frame, build_statistics
from feature_repo.files import RemoteFolder, open_filesystem
from feature_repo.ingest import ingest_days
from feature_repo.lake import Lake
from feature_repo.sql import query
from feature_repo.tables import has_facts, read_facts
from tests.objects import bucket, s3_server

__all__ = ["bucket", "s3_server"]
ROWS = pa.table({"x": [1, 2, 3]})


def test_write_read_replace_and_remove(bucket: str) -> None:
    lake = Lake(f"{bucket}/lake")
    assert (lake.keys("t"), lake.tables(), lake.has("t", "a")) == ([], [], False)
    first = lake.write("t", "a", ROWS, {"dropped": 2})
    assert lake.partition("t", "a") == first
    assert lake.read("t", "a", columns=["x"]).equals(ROWS)
    second = lake.write("t", "a", {"data": ROWS.slice(1), "more": ROWS})
    assert lake.read("t", "a").num_rows == 2
    assert lake.read("t", "a", "more").num_rows == 3
    assert lake.files.folders("t/a") == [second.version], "the replaced version stays"
    assert (lake.keys("t"), lake.tables()) == (["a"], ["t"])
    lake.remove("t", "a")
    assert not lake.has("t", "a")
    lake.remove("t", "a")
    with pytest.raises(ValueError, match="t/a does not exist; partitions: none"):
        lake.read("t", "a")


def test_what_no_manifest_names_is_not_there(bucket: str, tmp_path: Path) -> None:
    """An upload that was killed before its last step."""
    lake = Lake(f"{bucket}/lake")
    before = lake.write("t", "a", ROWS)
    pq.write_table(ROWS.slice(2), tmp_path / "data.parquet")
    lake.files.hand_over(tmp_path, "t/a/0123456789abcdef")
    lake.files.hand_over(tmp_path, "t/b/0123456789abcdef")
    assert lake.keys("t") == ["a"]
    assert (lake.partition("t", "a"), lake.read("t", "a").num_rows) == (before, 3)
    lake.write("t", "a", ROWS.slice(1))
    assert len(lake.files.folders("t/a")) == 1, "what a killed writer uploaded goes with the next one"


def test_a_failed_block_leaves_everything_as_it_was(bucket: str) -> None:
    lake = Lake(f"{bucket}/lake")
    lake.write("t", "a", ROWS)
    with pytest.raises(OSError, match="disk full"), lake.together() as batch:
        batch.write("t", "a", ROWS.slice(1))
        batch.write("t", "b", ROWS)
        raise OSError("disk full")
    assert (lake.keys("t"), lake.read("t", "a").num_rows) == (["a"], 3)


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_writers_one_wins_and_the_other_is_told(bucket: str, exists: bool) -> None:
    lake = Lake(f"{bucket}/lake")
    if exists:
        lake.write("t", "a", ROWS)
    message = "t/a/manifest.json: another writer replaced it meanwhile"
    with pytest.raises(ValueError, match=message), lake.together() as late:
        late.write("t", "a", ROWS.slice(2))
        lake.write("t", "a", ROWS.slice(1))
    assert lake.read("t", "a").num_rows == 2


def test_many_writers_at_once_lose_nothing(bucket: str) -> None:
    folder = RemoteFolder(f"{bucket}/counters")
    folder.write("n", b"0", None)
    wins = []

    def count() -> None:
        for _ in range(8):
            tag, value = folder.tag("n"), int(folder.read("n") or b"")
            try:
                folder.write("n", str(value + 1).encode(), tag)
            except ValueError:
                continue
            wins.append(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(folder.read("n") or b"") == len(wins) >= 8


def test_duckdb_reads_it_by_url(bucket: str) -> None:
    lake = Lake(f"{bucket}/lake")
    lake.write("t", "a", ROWS)
    lake.write("t", "b", ROWS)
    answer = query("SELECT sum(x) AS s FROM t", {"t": lake.paths("t", ["a", "b"])})
    assert answer["s"].to_pylist() == [12]


def test_ingest_and_features_are_those_of_a_disk(bucket: str, tmp_path: Path) -> None:
    source = open_source("simulator", preset="tiny", seed=0)
    facts, days = source.facts, source.facts.days[:2]
    lakes = [Lake(f"{bucket}/lake"), Lake(tmp_path / "lake")]
    assert not has_facts(lakes[0].root)
    for lake in lakes:
        ingest_days(lake, source, days)
        for day in days:
            build_catalogue(lake, facts, day)
            build_event_log(lake, facts, day)
            build_statistics(lake, facts, day)
            build_frame(lake, facts, day)
    assert read_facts(lakes[0].root) == facts
    assert lakes[0].tables() == lakes[1].tables()
    for table in lakes[1].tables():
        for day in days:
            assert lakes[0].partition(table, day) == lakes[1].partition(table, day), f"{table}/{day}"
    lakes[0].fetch("catalogue", days[0], tmp_path / "users.parquet", "users")
    assert pq.read_table(tmp_path / "users.parquet").equals(lakes[1].read("catalogue", days[0], "users"))


def test_a_user_is_erased_there_too(bucket: str) -> None:
    source = open_source("simulator", preset="tiny", seed=0)
    lake, day = Lake(f"{bucket}/lake"), source.facts.days[0]
    ingest_days(lake, source, [day])
    user = lake.read("impressions", day)["user_id"][0].as_py()
    assert erase_from_lake(lake, user).num_rows > 1
    assert user not in lake.read("impressions", day)["user_id"].to_pylist()
    ingest_days(lake, source, [day])
    assert user not in lake.read("impressions", day)["user_id"].to_pylist()


def test_a_store_without_conditional_replacement_still_compares(tmp_path: Path) -> None:
    folder = RemoteFolder("memory://mirach-tests/lake")
    folder.write("m", b"1", None)
    tag = folder.tag("m")
    folder.write("m", b"2", tag)
    assert folder.read("m") == b"2"
    with pytest.raises(ValueError, match="another writer replaced it meanwhile"):
        folder.write("m", b"3", "what it never was")
    open_filesystem("memory").rm("/mirach-tests", recursive=True)
