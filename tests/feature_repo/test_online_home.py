"""What needs a whole small home: parity, leak audit, erasure from the online store, two schemas side by side."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo import store
from feature_repo.adapters.registry import open_source
from feature_repo.audit import audit_leaks
from feature_repo.erasure import erase_online
from feature_repo.feature_schema import schema_for
from feature_repo.features import build_day
from feature_repo.ingest import ingest_days
from feature_repo.lake import Lake
from feature_repo.online import HISTORY_EVENT, PUSHED_EVENT, OnlineReader
from feature_repo.oracle import frame_probabilities
from feature_repo.parity import _same_events, check_parity
from tests.feature_repo.handmade import DAY1, DAY2, DAY3, FACTS, at_us
from tests.feature_repo.test_store import SCHEMA, fill

CUT_US = at_us("03 00:00")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    fill(folder)
    return folder


@pytest.fixture
def home(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "home"))


def test_online_and_offline_are_compared(home: Path) -> None:
    lake = Lake(home / "lake")
    report = check_parity(home, lake, FACTS, DAY2)
    assert report.passed
    assert (report.users, report.first_difference) == (5, "")
    assert report.events > 20
    assert check_parity(home, lake, FACTS, DAY1).superseded_by == DAY2
    path = Path(lake.path("user_features", DAY2))
    rows = pq.read_table(path)
    place = rows.column_names.index("dense_tenure")
    pq.write_table(rows.set_column(place, "dense_tenure", pa.array([9.0] * 5, pa.float32())), path)
    changed = check_parity(home, lake, FACTS, DAY2)
    assert (changed.passed, changed.different_features) == (False, 5)
    assert "features differ online" in changed.first_difference


def test_unknown_users_and_other_cuts_are_differences(home: Path) -> None:
    erase_online(home, 3)
    report = check_parity(home, Lake(home / "lake"), FACTS, DAY2)
    assert (report.passed, report.unknown) == (False, 1)
    assert check_parity(home, Lake(home / "lake"), FACTS, DAY3).different_features == 4, "the cut of the day after"


def test_events_that_only_one_side_has_are_differences(home: Path) -> None:
    lake, reader = Lake(home / "lake"), OnlineReader(home, SCHEMA)
    pushed = np.array([(1, at_us("02 23:59"), 2, 0, 0)], PUSHED_EVENT)
    reader.push_events(4, pushed)
    report = check_parity(home, lake, FACTS, DAY2)
    assert (report.passed, report.different_histories, report.different_features, report.unknown) == (False, 1, 0, 0)
    assert report.first_difference == "user 4: histories differ online"


def test_histories_of_different_lengths_differ() -> None:
    online = np.array([(7, 10, 0, 0), (8, 20, 1, 0)], HISTORY_EVENT)
    item, time, kind = online["item"], online["time"], online["kind"]
    assert _same_events(online[::-1], item, time, kind), "in any order"
    assert not _same_events(online[:1], item, time, kind)
    assert not _same_events(online, item, time, kind[::-1])


def test_leaks_are_found(home: Path) -> None:
    lake = Lake(home / "lake")
    report = audit_leaks(lake, FACTS, DAY3)
    assert report.passed
    assert (report.rows, report.events_seen > 0) == (40, True)
    rows = lake.read("training_frame", DAY3)
    place = rows.column_names.index("end_offset")
    more = pa.compute.add(rows["end_offset"], pa.scalar(1, pa.int32()))
    lake.write("training_frame", DAY3, rows.set_column(place, "end_offset", more).slice(1))
    broken = audit_leaks(lake, FACTS, DAY3)
    assert not broken.passed
    assert broken.missing_rows == 1
    assert broken.leaked + broken.out_of_range > 0
    assert audit_leaks(lake, FACTS, DAY1).passed


def test_a_user_leaves_the_online_store(home: Path) -> None:
    reader = OnlineReader(home, SCHEMA)
    assert reader.read([3], CUT_US)[0].known
    assert erase_online(home, 3) >= 4
    assert erase_online(home, 3) == 0
    (gone, kept) = OnlineReader(home, SCHEMA).read([3, 4], CUT_US)
    assert (gone.known, len(gone.history), kept.known) == (False, 0, True)
    assert not list((home / "feast" / "offline").glob("user_*/*.parquet"))
    assert store.materialize(home, Lake(home / "lake"), FACTS, DAY2).online


def test_a_home_without_an_online_store_has_nobody_to_erase(tmp_path: Path) -> None:
    assert erase_online(tmp_path, 3) == 0


def test_the_reader_of_an_older_schema_goes_on(home: Path) -> None:
    old = OnlineReader(home, SCHEMA)
    before = old.read([1, 2], CUT_US)
    facts = replace(FACTS, history_length=4)
    assert schema_for(facts).fingerprint != SCHEMA.fingerprint
    (home / "feast" / "source.json").unlink()
    store.apply(home, facts)
    with pytest.raises(ValueError, match="the online store holds features of"):
        OnlineReader(home, schema_for(facts))
    store.materialize(home, Lake(home / "lake"), facts, DAY2)
    new, again = OnlineReader(home, schema_for(facts)), OnlineReader(home, SCHEMA)
    assert new.published_at_us == again.published_at_us == CUT_US
    for reader in (old, again):
        for was, now in zip(before, reader.read([1, 2], CUT_US), strict=True):
            assert now.known
            assert (now.dense == was.dense).all()
            assert (now.categorical == was.categorical).all()
    assert max(len(user.history) for user in new.read([1, 2], CUT_US)) == 4


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff not a registry"])
def test_a_registry_that_was_cut_off_is_made_anew(home: Path, content: bytes) -> None:
    (home / "feast" / "registry.db").write_bytes(content)
    store.apply(home, FACTS)
    assert OnlineReader(home, SCHEMA).read([1], CUT_US)[0].known


def test_probabilities_come_in_the_order_of_the_frame(tmp_path: Path) -> None:
    source = open_source("simulator", preset="tiny", seed=0)
    lake, day = Lake(tmp_path / "lake"), source.facts.days[0]
    ingest_days(lake, source, [day])
    build_day(lake, source.facts, day)
    found = frame_probabilities(lake, day)
    assert len(found["click"]) == lake.partition("training_frame", day).num_rows
    assert ((found["click"] > 0) & (found["click"] < 1)).all()
    lake.write("oracle", day, lake.read("oracle", day).slice(1))
    with pytest.raises(ValueError, match=r"probabilities for \d+ rows of the training frame"):
        frame_probabilities(lake, day)
