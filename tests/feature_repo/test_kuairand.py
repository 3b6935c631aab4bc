"""The KuaiRand adapter on the real files (skipped where they are absent)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.adapters.kuairand import FACTS, UNKNOWN_SURFACE, KuaiRandSource
from feature_repo.adapters.registry import open_source
from feature_repo.contract import check
from feature_repo.tables import CONTRACT

SHARED = Path(os.environ.get("MIRACH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
FOLDER = SHARED / "kuairand_pure_part"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "interactions.parquet").exists(),
    reason=f"KuaiRand files are not below {SHARED} (set MIRACH_SHARED_DATA)",
)


@pytest.fixture(scope="module")
def raw() -> pa.Table:
    return pq.read_table(FOLDER / "interactions.parquet")


@pytest.fixture(scope="module")
def days() -> list[dict[str, pa.Table]]:
    source = open_source("kuairand", data_dir=FOLDER)
    assert isinstance(source, KuaiRandSource)
    checked = []
    for day in FACTS.days:
        tables = {}
        for table, rows in source.tables(day):
            report = check(table, rows, FACTS, day)
            report.raise_if_broken()
            tables[table] = report.rows
            tables[f"{table}_dropped"] = report.num_dropped
        checked.append(tables)
    return checked


def test_every_distinct_impression_arrives_once(raw: pa.Table, days: list[dict[str, pa.Table]]) -> None:
    key = ["user_id", "timestamp_ms", "tab", "item_id"]
    distinct = raw.group_by(key).aggregate([])
    start_ms = FACTS.bounds(FACTS.first_day)[0].timestamp() * 1000
    inside = int((distinct["timestamp_ms"].to_numpy() >= start_ms).sum())
    rows = sum(d["impressions"].num_rows for d in days)
    dropped = sum(d["impressions_dropped"] for d in days)
    assert rows == inside
    assert 5_800 < dropped < 5_900
    before = int((raw["timestamp_ms"].to_numpy() < start_ms).sum())
    assert before == 141
    assert rows + dropped + before == raw.num_rows - 4, "four rows contradict an earlier row of their key"


def test_labels_keep_their_rates(raw: pa.Table, days: list[dict[str, pa.Table]]) -> None:
    impressions = sum(d["impressions"].num_rows for d in days)
    for label, column in (("click", "is_click"), ("long_view", "long_view"), ("like", "is_like")):
        positives = sum(int(pa.compute.sum(pa.compute.equal(d["outcomes"]["label"], label)).as_py()) for d in days)
        assert positives / impressions == pytest.approx(raw[column].to_numpy().mean(), rel=0.02)
    for tables in days:
        outcomes = tables["outcomes"]
        assert outcomes["event_time"].equals(outcomes["known_at"])
        assert set(outcomes["request_id"].to_pylist()) <= set(tables["impressions"]["request_id"].to_pylist())


def test_days_and_splits_are_the_official_ones(days: list[dict[str, pa.Table]]) -> None:
    split = {day: set(t["impressions"]["split"].to_pylist()) for day, t in zip(FACTS.days, days, strict=True)}
    assert split["2022-04-29"] == {"valid"}
    assert split["2022-05-01"] == {"test"}
    assert FACTS.days[0] == "2022-04-25"
    assert len(FACTS.days) == 14
    tabs = np.concatenate([t["impressions"]["surface"].to_numpy(zero_copy_only=False) for t in days])
    values, counts = np.unique(tabs.astype(str), return_counts=True)
    assert tuple(values[np.argsort(-counts)][:3]) == FACTS.verticals


def test_history_is_ordered_exposures_on_the_first_day(days: list[dict[str, pa.Table]]) -> None:
    events = days[0]["engagements"]
    history = pq.read_table(FOLDER / "history.parquet")
    ordered = events.filter(pa.compute.equal(events["time_quality"], "order"))
    assert ordered.num_rows == history.num_rows
    assert ordered["timestamp"].null_count == ordered["known_at"].null_count == ordered.num_rows
    assert set(ordered["surface"].to_pylist()) == {UNKNOWN_SURFACE}
    mine = ordered.filter(pa.compute.equal(ordered["user_id"], 712))
    expected = history.filter(pa.compute.equal(history["user_id"], 712)).sort_by("position")
    assert mine["item_id"].to_pylist() == expected["item_id"].to_pylist()
    assert mine["sequence_number"].to_pylist() == expected["position"].to_pylist()
    exact = events.filter(pa.compute.equal(events["time_quality"], "exact"))
    assert exact.num_rows == events.num_rows - ordered.num_rows > 100
    assert all(day["engagements"].num_rows == 0 for day in days[1:])


def test_siblings_share_a_request_and_have_positions(days: list[dict[str, pa.Table]]) -> None:
    shown = days[5]["impressions"]
    per_request = shown.group_by("request_id").aggregate([("ad_id", "count"), ("position", "max")])
    count = per_request["ad_id_count"].to_numpy()
    assert (count == per_request["position_max"].to_numpy() + 1).all()
    assert count.max() >= 2


def test_ads_and_users_are_complete_and_known_before_the_first_day(days: list[dict[str, pa.Table]]) -> None:
    ads, users = days[0]["ads"], days[0]["users"]
    assert ads.num_rows == FACTS.max_ads
    assert users.num_rows == FACTS.max_users
    start = FACTS.bounds(FACTS.first_day)[0]
    assert max(ads["created_at"].to_pylist()) < start
    assert max(users["valid_from"].to_pylist()) < start
    row = ads.to_pylist()[0]
    assert (row["ad_id"], row["advertiser_id"], row["campaign_id"]) == (0, 7_349_781, 9_155_697_141)
    assert row["category_path"] == [39]
    assert row["attributes"][0] == pytest.approx(np.log1p(87.433) / 2, rel=1e-5)
    assert row["attributes"][1] == 0.0
    assert row["attributes"][2] == pytest.approx(np.log(1280 / 720), rel=1e-5)
    assert row["attributes"][3] == pytest.approx(1.5)
    first = users.to_pylist()[0]
    assert first["dense"][0] == pytest.approx(np.log1p(514) / 3, rel=1e-5)
    names = dict(zip(FACTS.user_categorical, first["categorical"], strict=True))
    assert (names["is_video_author"], names["is_live_streamer"], names["onehot_feat3"]) == (2, 2, 950)
    assert users.to_pylist()[1]["categorical"][FACTS.user_categorical.index("is_live_streamer")] == 0
    assert all(day["ads"].num_rows == day["users"].num_rows == 0 for day in days[1:])
    assert ads.schema.equals(CONTRACT["ads"])


def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("interactions", "history", "users"):
        (tmp_path / f"{name}.parquet").touch()
    with pytest.raises(ValueError, match=r"lacks items\.parquet"):
        KuaiRandSource(tmp_path)
