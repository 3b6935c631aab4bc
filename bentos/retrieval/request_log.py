"""The request log: Parquet files by hour, written by a bounded background thread.

`<home>/logs/requests/<YYYY-MM-DD>/<HH>/<unique>.parquet` (UTC hour of the request). A file appears complete or
not at all. When requests come faster than the disk takes them, rows are dropped and counted: an answer never
waits for the log. A clean stop writes everything that was taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("request_id", pa.int64()), ("timestamp_us", pa.int64()), ("user_id", pa.int64()), ("surface", pa.string()),
        ("k", pa.int32()), ("release", pa.string()), ("tier", pa.string()), ("cost", pa.float32()),
        ("latency_ms", pa.float32()), ("ad_ids", pa.list_(pa.int64())), ("scores", pa.list_(pa.float32())),
        ("feature_age_s", pa.float64()), ("cold", pa.bool_()), ("nodes_scored", pa.int32()),
        ("ads_scored", pa.int32()), ("categorical", pa.list_(pa.int64())), ("dense", pa.list_(pa.float32())),
        ("history", pa.binary()), ("rank_by", pa.string()), ("restricted", pa.bool_()),
    ]
)  # fmt: skip
"""`user_id` is null for inline users; `categorical`, `dense` and `history` are null except for the sampled share.
`scores` of rank_by `value` are log(click probability x bid). `restricted`: ads were blocked, not eligible or capped, in
ways that the log doesn't keep, so that nobody can ask again."""


def sampled(request_id: int, share: float) -> bool:
    """Whether this request's features are logged: a hash of its id, so that every replica decides alike."""
    digest = hashlib.blake2b(request_id.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass(frozen=True)
class LogSettings:
    """Bounds of the writer."""

    folder: Path
    max_rows: int = 10_000
    """Rows that may wait in memory; more are dropped."""
    flush_rows: int = 2_000
    flush_s: float = 5.0


class RequestLogWriter:
    """Takes rows from the event loop and writes them from a thread of its own."""

    def __init__(self, settings: LogSettings, on_drop: Callable[[], None] | None = None) -> None:
        self._settings = settings
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=settings.max_rows)
        self._on_drop = on_drop
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        self.num_dropped = 0
        self.num_written = 0

    def start(self) -> None:
        """Start the writing thread.

        The first conversion imports pandas, which takes seconds: better now than beside the first answers.
        """
        to_table([{"ad_ids": [0]}])
        self._thread.start()

    def put(self, row: dict[str, Any]) -> bool:
        """Take a row without waiting; False when it was dropped."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self._drop(1)
            return False
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what was taken and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _drop(self, count: int) -> None:
        self.num_dropped += count
        if self._on_drop is not None:
            for _ in range(count):
                self._on_drop()

    def _work(self) -> None:
        rows: list[dict[str, Any]] = []
        due = time.monotonic() + self._settings.flush_s
        while not (self._stop.is_set() and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                rows.append(self._queue.get(timeout=0.1))
            if len(rows) >= self._settings.flush_rows or time.monotonic() >= due:
                self._write(rows)
                rows = []
                due = time.monotonic() + self._settings.flush_s
        self._write(rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        hours: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            hour = datetime.fromtimestamp(row["timestamp_us"] / 1e6, UTC).strftime("%Y-%m-%d/%H")
            hours.setdefault(hour, []).append(row)
        for hour, part in hours.items():
            try:
                write_rows(self._settings.folder / hour, part)
                self.num_written += len(part)
            except OSError:
                logger.exception("request log: %d rows of hour %s could not be written", len(part), hour)
                self._drop(len(part))


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table of `SCHEMA`; what a row lacks is null."""
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as one new Parquet file of `folder`, which appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    name = uuid.uuid4().hex
    temporary = folder / f".{name}.tmp"
    pq.write_table(to_table(rows), temporary, compression="zstd")
    final = folder / f"{name}.parquet"
    os.replace(temporary, final)
    return final
