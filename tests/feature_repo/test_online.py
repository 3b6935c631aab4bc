from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_repo import store
from feature_repo.feature_schema import schema_for
from feature_repo.history_bytes import HISTORY_EVENT
from feature_repo.lake import Lake
from feature_repo.online import OnlineReader, _values
from feature_repo.tail import PUSHED_EVENT, TAIL_KEY, join_history, merge_tail
from feature_repo.training_tables import load_frame, load_history, load_tables
from tests.feature_repo.handmade import DAY1, DAY2, DAY3, FACTS, at_us
from tests.feature_repo.test_store import fill

SCHEMA = schema_for(FACTS)
VIEW, LIKE, CLICK = range(3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    fill(folder)
    return folder


@pytest.fixture(scope="module")
def reader(home: Path) -> OnlineReader:
    return OnlineReader(home, SCHEMA)


def events(*rows: tuple[int, str, int, int]) -> NDArray[Any]:
    """(event_id, clock, item, kind) -> pushed events."""
    return np.array([(i, at_us(clock), item, kind, 0) for i, clock, item, kind in rows], PUSHED_EVENT)


def test_online_equals_offline_for_the_same_cut(home: Path, reader: OnlineReader) -> None:
    lake = Lake(home / "lake")
    tables = load_tables(lake, FACTS, DAY2, DAY2)
    history = load_history(lake, [DAY1, DAY2], 5)
    found = reader.read(tables.user_id_U.tolist(), at_us("03 06:00"))
    for code, person in enumerate(found):
        assert person.known
        assert person.user_id == tables.user_id_U[code]
        assert (person.published_at_us, person.feature_age_s) == (at_us("03 00:00"), 6 * 3600.0)
        np.testing.assert_array_equal(person.categorical, tables.user_categorical_UC[code])
        np.testing.assert_array_equal(person.dense, tables.user_dense_UD[code])
        newest = slice(*history.offset_U1[code : code + 2])
        np.testing.assert_array_equal(person.history["item"], history.item_E[newest][-FACTS.history_length :])
        np.testing.assert_array_equal(person.history["time"], history.time_E[newest][-FACTS.history_length :])
        np.testing.assert_array_equal(person.history["kind"], history.kind_E[newest][-FACTS.history_length :])


def test_pushed_events_give_the_history_of_the_frame(tmp_path: Path) -> None:
    """Replay day 3 through the push path: at each request the online history is the offline prefix."""
    lake = fill(tmp_path)
    reader = OnlineReader(tmp_path, SCHEMA)
    frame = load_frame(lake, DAY3)
    history = load_history(lake, [DAY1, DAY2, DAY3], 5)
    tables = load_tables(lake, FACTS, DAY2, DAY3)
    person = int(np.bincount(frame["user_code"]).argmax())
    first, last = history.offset_U1[person : person + 2]
    rows = np.flatnonzero(frame["user_code"] == person)
    available = lake.read("event_log", DAY3, "available")["available_us"].to_numpy()
    segment = lake.read("event_log", DAY3, "users").to_pydict()
    place = segment["user_code"].index(person)
    start = sum(segment["num_events"][:place])
    before = segment["num_before"][place]
    pushed = 0
    for row in rows:
        now_us = int(frame["timestamp_us"][row])
        while pushed < segment["num_events"][place] and available[start + pushed] < now_us:
            at = first + before + pushed
            event = (pushed, available[start + pushed], history.item_E[at], history.kind_E[at], history.surface_E[at])
            reader.push_events(int(tables.user_id_U[person]), np.array([event], PUSHED_EVENT))
            pushed += 1
        online = reader.read([int(tables.user_id_U[person])], now_us)[0].history
        end = first + frame["end_offset"][row]
        offline = slice(max(first, end - FACTS.history_length), end)
        assert online["item"].tolist() == history.item_E[offline].tolist()
        assert online["kind"].tolist() == history.kind_E[offline].tolist()
    assert last - first > FACTS.history_length

    store.materialize(tmp_path, lake, FACTS, DAY3)  # the batch history now holds what the tail holds too
    again = reader.read([int(tables.user_id_U[person])], at_us("04 01:00"))[0]
    assert again.published_at_us == at_us("04 00:00")
    assert again.history["item"].tolist() == history.item_E[last - FACTS.history_length : last].tolist()


def test_an_unknown_user_is_cold_and_flagged(reader: OnlineReader) -> None:
    cold = reader.read([424242], at_us("03 06:00"))[0]
    assert not cold.known
    assert cold.categorical.tolist() == [424242, 0]
    assert cold.dense.tolist() == [0.0] * len(SCHEMA.dense_of("user"))
    assert len(cold.history) == 0
    assert np.isnan(cold.feature_age_s)
    reader.push_events(424242, events((1, "03 05:00", 2, LIKE)))
    assert reader.read([424242], at_us("03 06:00"))[0].history["item"].tolist() == [2]


def test_old_and_future_values_are_left_out(reader: OnlineReader) -> None:
    assert reader.read([1], at_us("10 00:00"))[0].known
    expired = reader.read([1], at_us("10 00:00:00.000001"))[0]
    assert not expired.known
    assert len(expired.history) > 0  # histories live longer than statistics
    assert not reader.read([1], at_us("02 23:59"))[0].known


def test_late_events_are_merged_by_time_and_id_and_only_once(reader: OnlineReader) -> None:
    person = 900
    assert reader.push_events(person, events((5, "03 05:00", 3, VIEW), (4, "03 04:00", 1, VIEW))) == 2
    assert reader.push_events(person, events((9, "03 04:30", 2, LIKE), (5, "03 05:00", 3, VIEW))) == 3
    assert reader.push_events(person, events((3, "03 05:00", 4, CLICK))) == 4
    now = reader.read([person], at_us("03 06:00"))[0].history
    assert now["item"].tolist() == [1, 2, 4, 3]
    assert now["time"].tolist() == [at_us(f"03 {c}") // 10**6 for c in ("04:00", "04:30", "05:00", "05:00")]
    assert reader.read([person], at_us("03 04:45"))[0].history["item"].tolist() == [1, 2]
    reader.push_events(person, events(*[(100 + i, f"03 05:{i:02d}", i, VIEW) for i in range(20)]))
    newest = reader.read([person], at_us("03 06:00"))[0].history
    assert newest["item"].tolist() == list(range(12, 20))  # history_length is 8


def test_bad_events_are_named(reader: OnlineReader) -> None:
    with pytest.raises(ValueError, match=r"events\.kind: 3 is outside 0\.\.2"):
        reader.push_events(1, events((1, "03 05:00", 3, 3)))
    with pytest.raises(ValueError, match=r"events\.item: -1 is outside"):
        reader.push_events(1, events((1, "03 05:00", -1, 0)))
    with pytest.raises(ValueError, match="events: dtype"):
        reader.push_events(1, np.zeros(1, HISTORY_EVENT))


def test_threads_that_write_one_user_lose_nothing(reader: OnlineReader) -> None:
    length = FACTS.history_length

    def push(number: int) -> int:
        return reader.push_events(901, events((number, f"03 05:{number:02d}", number, VIEW)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(push, range(length)))
    assert reader.read([901], at_us("03 06:00"))[0].history["item"].tolist() == list(range(length))


WRITER = """
import sys
from pathlib import Path
from feature_repo.online import OnlineReader
from tests.feature_repo.test_online import SCHEMA, events
reader = OnlineReader(Path(sys.argv[1]), SCHEMA)
print("ready", flush=True)
for i in range(4):
    reader.push_events(902, events((i, f"03 05:{i:02d}", i, 0)))
"""


@pytest.mark.slow
def test_processes_that_write_one_user_lose_nothing(home: Path, reader: OnlineReader) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(home)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for i in range(4, 8):
            reader.push_events(902, events((i, f"03 05:{i:02d}", i, VIEW)))
        assert writer.wait(120) == 0
    assert reader.read([902], at_us("03 06:00"))[0].history["item"].tolist() == list(range(8))


def test_reads_go_on_while_another_writer_holds_the_store(home: Path, reader: OnlineReader) -> None:
    with closing(sqlite3.connect(home / "feast" / "online.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.push_events, 903, events((1, "03 05:00", 4, VIEW)))
            time.sleep(0.2)
            started = time.monotonic()
            for _ in range(20):
                assert reader.read([1], at_us("03 06:00"))[0].known
            assert time.monotonic() - started < 1.0
            assert not waiting.done()
            other.execute("COMMIT")
            assert waiting.result(timeout=20) == 1
    assert reader.read([903], at_us("03 06:00"))[0].history["item"].tolist() == [4]


def test_a_reader_of_another_schema_is_refused(home: Path) -> None:
    other = replace(SCHEMA, history_length=9)
    with pytest.raises(ValueError, match=f"has no feature service retrieval_{other.fingerprint}; it has"):
        OnlineReader(home, other)


def test_a_full_batch_history_keeps_what_it_cut_off_out() -> None:
    history = np.array([(1, 50, 0, 0), (2, 60, 0, 0)], HISTORY_EVENT)
    tail = np.array([(9, 40, 0, 0), (8, 55, 0, 0), (2, 60, 0, 0)], HISTORY_EVENT)
    assert join_history(history, tail, 2, 100)["item"].tolist() == [2, 8]
    assert join_history(history, tail, 5, 100)["item"].tolist() == [1, 2, 9, 8]
    assert join_history(history, tail, 5, 55)["item"].tolist() == [1, 9, 8]


def test_merging_keeps_the_first_of_an_id() -> None:
    tail, keys = np.empty(0, HISTORY_EVENT), np.empty(0, TAIL_KEY)
    tail, keys = merge_tail(tail, keys, events((1, "03 05:00:00.000002", 7, VIEW)), 8)
    tail, keys = merge_tail(tail, keys, events((1, "03 06:00", 8, VIEW), (2, "03 05:00:00.000001", 9, VIEW)), 8)
    assert tail["item"].tolist() == [9, 7]
    assert keys["event_id"].tolist() == [2, 1]


def test_an_empty_request_is_an_empty_answer(reader: OnlineReader) -> None:
    assert reader.read([], at_us("03 06:00")) == []


def test_values_of_a_wrong_type_or_length_are_named(home: Path, reader: OnlineReader, monkeypatch: Any) -> None:
    fetch = reader._fetch

    def short(*arguments: Any) -> Any:
        found = fetch(*arguments)
        found[0]["user_vector"].values["dense"] = found[0]["user_vector"].values["dense"][:-1]
        return found

    monkeypatch.setattr(reader, "_fetch", short)
    with pytest.raises(ValueError, match=f"the online features do not fit schema {SCHEMA.fingerprint}"):
        reader.read([1], at_us("03 06:00"))


def test_a_store_that_stays_locked_or_breaks_is_reported(reader: OnlineReader, monkeypatch: Any) -> None:
    from feature_repo import online

    class Broken:
        def __init__(self, message: str) -> None:
            self.message = message

        def write_to_online_store(self, *arguments: Any) -> None:
            raise sqlite3.OperationalError(self.message)

    monkeypatch.setattr(online, "LOCKED_SECONDS", 0.01)
    tail, keys = np.empty(0, HISTORY_EVENT), np.empty(0, TAIL_KEY)
    monkeypatch.setattr(reader, "_writer", Broken("database is locked"))
    with pytest.raises(TimeoutError, match="user 7: the online store stayed locked"):
        reader._write_tail(7, tail, keys, 0)
    monkeypatch.setattr(reader, "_writer", Broken("disk I/O error"))
    with pytest.raises(sqlite3.OperationalError, match="disk"):
        reader._write_tail(7, tail, keys, 0)


def test_values_that_are_no_list_or_bytes_are_named() -> None:
    from feast.protos.feast.types.Value_pb2 import Int64List, Value

    column = {
        "user_vector__event_timestamp_us": [Value(int64_val=5)],
        "user_vector__categorical": [Value(string_val="a")],
        "user_vector__dense": [Value()],
    }
    with pytest.raises(ValueError, match=r"online store: user_vector\.categorical holds string_val for row 0"):
        _values(column, "user_vector", "user_vector", 0)
    column["user_vector__categorical"] = [Value(int64_list_val=Int64List(val=[1, 2]))]
    with pytest.raises(ValueError, match=r"online store: user_vector\.dense holds nothing for row 0"):
        _values(column, "user_vector", "user_vector", 0)
