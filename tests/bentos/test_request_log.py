from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bentos.retrieval import request_log
from bentos.retrieval.request_log import LogSettings, RequestLogWriter, sampled

HOUR_US = 3_600 * 10**6
START_US = 1_767_225_600 * 10**6  # 2026-01-01 00:00 UTC


def row(i: int, hours: int = 0) -> dict[str, Any]:
    return {"request_id": i, "timestamp_us": START_US + hours * HOUR_US + i, "ad_ids": [i], "scores": [1.0]}


def test_rows_land_in_their_hour_on_a_clean_stop(tmp_path: Path) -> None:
    writer = RequestLogWriter(LogSettings(tmp_path, flush_s=60))
    writer.start()
    assert all(writer.put(row(i, hours=i // 10)) for i in range(25))
    writer.close()
    assert (writer.num_written, writer.num_dropped) == (25, 0)
    found = {str(p.parent.relative_to(tmp_path)): pq.read_table(p).num_rows for p in tmp_path.rglob("*.parquet")}
    assert found == {"2026-01-01/00": 10, "2026-01-01/01": 10, "2026-01-01/02": 5}
    assert not list(tmp_path.rglob("*.tmp"))


def test_full_memory_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, dropped = threading.Event(), list[int]()
    real = request_log.write_rows

    def slow_disk(folder: Path, rows: list[dict[str, Any]]) -> Path:
        assert disk.wait(5)
        return real(folder, rows)

    monkeypatch.setattr(request_log, "write_rows", slow_disk)
    writer = RequestLogWriter(LogSettings(tmp_path, max_rows=5, flush_rows=1), on_drop=lambda: dropped.append(1))
    writer.start()
    taken = sum(writer.put(row(i)) for i in range(20))
    assert 5 <= taken <= 6
    assert len(dropped) == writer.num_dropped == 20 - taken
    disk.set()
    writer.close()
    assert writer.num_written == taken


def test_an_unwritable_disk_costs_rows_not_the_service(tmp_path: Path) -> None:
    (tmp_path / "2026-01-01").write_text("in the way")
    writer = RequestLogWriter(LogSettings(tmp_path, flush_rows=1))
    writer.start()
    writer.put(row(1))
    writer.put(row(2, hours=24))
    writer.close()
    assert (writer.num_written, writer.num_dropped) == (1, 1)


def test_sampling_is_a_stable_share() -> None:
    chosen = [i for i in range(20_000) if sampled(i, 0.01)]
    assert 140 < len(chosen) < 260
    assert chosen == [i for i in range(20_000) if sampled(i, 0.01)]
    assert sampled(-5, 1.0)
    assert not any(sampled(i, 0.0) for i in range(100))
