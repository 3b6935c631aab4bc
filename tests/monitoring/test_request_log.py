from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bentos.retrieval import request_log as written
from monitoring.request_log import COLUMNS, answer_features, erase_requests, read_requests

START = datetime(2026, 1, 5, 10, 30, tzinfo=UTC)
END = START + timedelta(hours=2)
START_US = int(START.timestamp()) * 1_000_000


def row(request_id: int, offset_s: int = 0, **change: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "request_id": request_id, "timestamp_us": START_US + offset_s * 1_000_000, "user_id": 7, "surface": "feed",
        "k": 3, "release": "r1", "tier": "standard", "cost": 0.1, "latency_ms": 4.0, "ad_ids": [1, 2, 3],
        "scores": [3.0, 2.0, 1.0], "feature_age_s": 60.0, "cold": False, "nodes_scored": 10, "ads_scored": 20,
        "rank_by": "score", "restricted": False,
    }  # fmt: skip
    return values | change


def write(logs: Path, rows: list[dict[str, Any]]) -> None:
    for entry in rows:
        hour = datetime.fromtimestamp(entry["timestamp_us"] / 1e6, UTC).strftime("%Y-%m-%d/%H")
        written.write_rows(logs / hour, [entry])


def test_schema_is_the_service_s() -> None:
    assert pa.schema(list(COLUMNS.items())) == written.SCHEMA


def test_range_order_and_repeats(tmp_path: Path) -> None:
    write(tmp_path, [row(3, 7000), row(1, 10), row(1, 20), row(4, -1), row(5, 7200), row(2, 10)])
    log = read_requests(tmp_path, START, END)
    assert log.rows.column("request_id").to_pylist() == [1, 2, 3]
    assert log.rows.column("timestamp_us").to_pylist()[0] == START_US + 10_000_000
    assert log.num_repeats == 1
    assert log.num_broken == 0
    assert log.rows.schema.field("user_id").type == pa.int64()


def test_broken_rows_are_counted_by_rule(tmp_path: Path) -> None:
    write(tmp_path, [
        row(1), row(2, scores=[1.0]), row(3, ad_ids=[1, 1, 2]), row(4, ad_ids=[1, 2, 3, 4], scores=[1.0] * 4),
        row(5, scores=[1.0, float("nan"), 0.0]), row(6, cost=-1.0), row(7, k=0, ad_ids=[], scores=[]),
    ])  # fmt: skip
    log = read_requests(tmp_path, START, END)
    assert log.rows.column("request_id").to_pylist() == [1]
    assert log.broken == {
        "k is below 1": 1, "more ads than asked for": 1, "ads and scores differ in number": 1,
        "a score is not finite": 1, "an ad is repeated": 1, "cost is negative or not finite": 1,
    }  # fmt: skip


def test_bad_files_are_named_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, [row(1)])
    folder = tmp_path / "2026-01-05" / "10"
    (folder / "torn.parquet").write_bytes(b"PAR1 half")
    pq.write_table(pa.table({"request_id": [9]}), folder / "old.parquet")
    log = read_requests(tmp_path, START, END)
    assert log.num_files == 1
    assert log.rows.num_rows == 1
    reasons = {Path(name).name: reason for name, reason in log.bad_files.items()}
    assert reasons["torn.parquet"].startswith("not readable")
    assert "timestamp_us" in reasons["old.parquet"]


def test_no_log_is_an_empty_table(tmp_path: Path) -> None:
    log = read_requests(tmp_path / "none", START, END)
    assert log.rows.num_rows == 0
    assert log.rows.column_names == list(COLUMNS)
    with pytest.raises(ValueError, match="zoned"):
        read_requests(tmp_path, START.replace(tzinfo=None), END)


def test_answer_features_by_hand(tmp_path: Path) -> None:
    write(tmp_path, [row(1), row(2, ad_ids=[], scores=[], cold=True, feature_age_s=None), row(3, rank_by="value")])
    first, second, third = answer_features(read_requests(tmp_path, START, END).rows).to_pylist()
    assert first["dense_top_score"] == 3.0
    assert first["dense_mean_score"] == 2.0
    assert (first["dense_filled"], second["dense_filled"]) == (1.0, 0.0)
    assert second["dense_top_score"] is None
    assert (third["dense_top_score"], third["dense_mean_score"], third["dense_filled"]) == (None, None, 1.0)
    assert (second["cat_cold"], second["cat_surface"]) == ("true", "feed")


def test_a_user_s_requests_are_erased_and_unreadable_files_go(tmp_path: Path) -> None:
    written.write_rows(tmp_path / "2026-01-05" / "10", [row(1), row(2, user_id=8), row(3, user_id=None)])
    alone = written.write_rows(tmp_path / "2026-01-05" / "11", [row(4, 1800)])
    other = written.write_rows(tmp_path / "2026-01-05" / "12", [row(5, 5400, user_id=9)])
    before = other.read_bytes()
    broken = tmp_path / "2026-01-05" / "11" / "broken.parquet"
    broken.write_bytes(b"half a file")
    assert erase_requests(tmp_path, 7) == 2
    assert not alone.exists()
    assert not broken.exists()
    assert other.read_bytes() == before
    rows = read_requests(tmp_path, START, END).rows
    assert rows["request_id"].to_pylist() == [2, 3, 5]
    assert list(tmp_path.rglob(".*")) == []
