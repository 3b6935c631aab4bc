from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo import store
from feature_repo.feature_schema import schema_for
from feature_repo.features import build_day
from feature_repo.history_bytes import pack_histories, unpack_history
from feature_repo.lake import Lake
from feature_repo.tables import TIME
from feature_repo.training_tables import HistoryArrays, load_frame, load_tables
from tests.feature_repo.handmade import (
    DAY1,
    DAY2,
    DAY3,
    FACTS,
    ad,
    at,
    at_us,
    engagement,
    impression,
    new_lake,
    outcome,
    user,
    write,
)

SCHEMA = schema_for(FACTS)


def fill(home: Path) -> Lake:
    """Three days of a small world below `home`, built and put into Feast; the cut of day 2 is online."""
    lake = new_lake(home)
    rng = np.random.default_rng(0)
    for number, day in enumerate((DAY1, DAY2, DAY3)):
        shown, clicked, engaged = [], [], []
        for i in range(40):
            request = 1000 * number + i
            clock = f"0{number + 1} {rng.integers(0, 23):02d}:{rng.integers(0, 30):02d}"
            person, shown_ad = int(rng.integers(1, 6)), int(rng.integers(11, 16))
            shown.append(impression(request, shown_ad, person, clock))
            engaged.append(engagement(request, person, int(rng.integers(11, 16)), clock))
            if rng.random() < 0.4:
                clicked.append(outcome(request, shown_ad, clock[:-2] + "45"))
        extra: dict[str, Any] = {}
        if number == 0:
            extra = {
                "ads": [ad(i, advertiser=i % 3 + 1) for i in range(11, 16)],
                "users": [user(i) for i in range(1, 6)],
            }
        write(lake, day, impressions=shown, outcomes=clicked, engagements=engaged, **extra)
        build_day(lake, FACTS, day)
    store.apply(home, FACTS)
    store.materialize(home, lake, FACTS, DAY2)
    return lake


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    fill(folder)
    return folder


def test_feast_and_the_training_tables_agree_and_keep_our_order(home: Path) -> None:
    lake = Lake(home / "lake")
    frame = load_frame(lake, DAY3)
    tables = load_tables(lake, FACTS, DAY2, DAY3)
    order = np.random.default_rng(1).permutation(len(frame["row_id"]))
    times = pa.array(frame["timestamp_us"][order], pa.int64()).cast(TIME)
    user_code, ad_code = frame["user_code"][order], frame["ad_code"][order]
    entities = pa.table(
        {
            "user_id": tables.user_id_U[user_code],
            "ad_id": tables.ad_id_N[ad_code],
            "event_timestamp": times,
        }
    )
    joined = store.historical_features(home, entities)
    assert joined["user_id"].to_pylist() == tables.user_id_U[user_code].tolist()
    for role, code, categorical, dense in (
        ("user", user_code, tables.user_categorical_UC, tables.user_dense_UD),
        ("ad", ad_code, tables.ad_categorical_NA, tables.ad_dense_NF),
    ):
        for i, field in enumerate(SCHEMA.categorical_of(role)):
            assert joined[f"cat_{field.name}"].type == pa.int64()
            np.testing.assert_array_equal(joined[f"cat_{field.name}"].to_numpy(), categorical[code, i])
        for i, dense_field in enumerate(SCHEMA.dense_of(role)):
            np.testing.assert_array_equal(joined[f"dense_{dense_field.name}"].to_numpy(), dense[code, i])
    np.testing.assert_array_equal(np.stack(joined["embedding"].to_pylist()), tables.ad_embedding_NM[ad_code])
    assert set(joined["user_features__event_timestamp_us"].to_pylist()) == {at_us("03 00:00")}


def test_a_row_created_late_is_not_served_into_the_past(home: Path) -> None:
    path = store.offline_folder(home, "user_features") / "late.parquet"
    published = pq.read_table(store.offline_folder(home, "user_features") / f"{DAY2}.parquet")
    rows = published.slice(0, 1)
    place = rows.column_names.index("dense_tenure")
    rows = rows.set_column(place, "dense_tenure", pa.array([99.0], pa.float32()))
    rows = rows.set_column(rows.column_names.index("created_at"), "created_at", pa.array([at("04 12:00")], TIME))
    person = rows["user_id"][0].as_py()
    pq.write_table(rows, path)
    try:
        times = pa.array([at("03 09:00"), at("04 11:00"), at("04 13:00"), at("01 12:00")], TIME)
        entities = pa.table({"user_id": pa.array([person] * 4), "event_timestamp": times})
        joined = store.historical_features(home, entities, views=["user_features"])
        assert joined["dense_tenure"].to_pylist() == [0.5, 0.5, 99.0, None]
        assert joined["cat_age_band"].to_pylist() == [2, 2, 2, None]
    finally:
        path.unlink()


def test_offline_features_expire(home: Path) -> None:
    times = pa.array([at("09 23:59"), at("11 00:01")], TIME)
    entities = pa.table({"user_id": pa.array([1, 1]), "event_timestamp": times})
    joined = store.historical_features(home, entities, views=["user_features"])
    assert joined["dense_tenure"].to_pylist() == [0.5, None]


def test_an_older_cut_never_replaces_a_newer_one_online(home: Path) -> None:
    done = store.materialize(home, Lake(home / "lake"), FACTS, DAY1)
    assert not done.online
    state = store.online_state(home)
    assert state is not None
    assert (state.day, state.published_at_us, state.num_users) == (DAY2, at_us("03 00:00"), 5)
    assert state.schema_fingerprint == SCHEMA.fingerprint


def test_offline_files_are_links_into_the_lake(home: Path) -> None:
    exported = store.offline_folder(home, "ad_features") / f"{DAY1}.parquet"
    assert exported.samefile(Lake(home / "lake").path("ad_features", DAY1))
    assert sorted(p.name for p in store.offline_folder(home, "user_history").iterdir()) == [f"{DAY2}.parquet"]


def test_applying_again_changes_nothing(home: Path) -> None:
    store.apply(home, FACTS)
    services = {service.name: service for service in store.open_store(home).list_feature_services()}
    assert set(services) == {f"retrieval_{SCHEMA.fingerprint}", f"training_{SCHEMA.fingerprint}"}


@pytest.mark.slow
def test_the_feast_command_works_on_a_home(home: Path) -> None:
    feast = Path(sys.executable).with_name("feast")
    answer = subprocess.run(
        [str(feast), "-c", str(home / "feast"), "entities", "list"], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert "INT64" in answer.stdout.upper()
    assert {"user", "ad"} <= set(answer.stdout.split())


def test_a_home_without_a_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no feature_store\.yaml; run `feature_repo\.store\.apply` first"):
        store.open_store(tmp_path)


def test_packed_histories_hold_the_newest_events() -> None:
    history = HistoryArrays(
        offset_U1=np.array([0, 3, 3, 4]),
        item_E=np.array([7, 8, 9, 5], np.int32),
        time_E=np.array([10, 20, 30, 2**32 - 1]),
        kind_E=np.array([0, 1, 2, 255], np.uint8),
        surface_E=np.array([0, 0, 1, 3], np.uint8),
    )
    packed = pack_histories(history, 2)
    assert [len(value.as_py()) for value in packed] == [20, 0, 10]
    assert unpack_history(packed[0].as_py()).tolist() == [(8, 20, 1, 0), (9, 30, 2, 1)]
    assert unpack_history(packed[2].as_py()).tolist() == [(5, 2**32 - 1, 255, 3)]
