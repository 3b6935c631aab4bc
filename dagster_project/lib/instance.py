"""The Dagster instance of a home: `<home>/dagster` with a deliberate `dagster.yaml`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from dagster import DagsterInstance
from sqlalchemy import Engine, event

from models.staging import write_atomically

DAGSTER_YAML = """\
# Written by Mirach for a single machine. docs/operations.md shows the same with Postgres.
telemetry:
  enabled: false
nux:
  enabled: false
# One SQLite file for all runs: a file a run costs a third more for every event.
run_storage:
  module: dagster._core.storage.runs
  class: SqliteRunStorage
  config: {base_dir: {env: DAGSTER_STORAGE}}
event_log_storage:
  module: dagster._core.storage.event_log
  class: ConsolidatedSqliteEventLogStorage
  config: {base_dir: {env: DAGSTER_STORAGE}}
schedule_storage:
  module: dagster._core.storage.schedules
  class: SqliteScheduleStorage
  config: {base_dir: {env: DAGSTER_STORAGE}}
# Stages log through Python's logging; their lines stand in the run's log.
python_logs:
  managed_python_loggers: [models, feature_repo, monitoring, bentos]
  python_log_level: WARNING
compute_logs:
  module: dagster._core.storage.noop_compute_log_manager
  class: NoOpComputeLogManager
# Training fills a machine, and days are made in order: one run at a time, one holder a pool.
concurrency:
  runs:
    max_concurrent_runs: 1
  pools:
    granularity: op
    default_limit: 1
# A worker that dies is retried; an asset that fails is not, its error says what to do.
run_monitoring:
  enabled: true
  start_timeout_seconds: 180
  max_runtime_seconds: 14400
run_retries:
  enabled: true
  max_retries: 2
  retry_on_asset_or_op_failure: false
retention:
  schedule:
    purge_after_days: 90
  sensor:
    purge_after_days:
      skipped: 7
      failure: 30
      success: 90
freshness:
  enabled: true
"""


def prepare(home: Path) -> Path:
    """Make `<home>/dagster` with its `dagster.yaml` (an existing one is kept) and point DAGSTER_HOME at it."""
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "dagster.yaml").exists():
        write_atomically(folder / "dagster.yaml", DAGSTER_YAML.encode())
    os.environ["DAGSTER_HOME"] = str(folder)
    os.environ["DAGSTER_STORAGE"] = str(folder / "storage")
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    # Read when torch is first imported. Steps this small lose more to waiting for each other than a second thread
    # gives: a day took 13 s with two threads and 9 s with one. Set OMP_NUM_THREADS for larger models.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return folder


@contextmanager
def open_instance(home: Path) -> Iterator[DagsterInstance]:
    """The persistent instance of a home; `make ui` shows what was run on it.

    Dagster opens and closes a SQLite connection for every event. Two things make that cheap while this is open: no
    sync at a commit (write-ahead logs stay whole when the process dies; only a power cut may lose the last events,
    and those are made again), and one idle connection a file, without which every close would write the log back.
    """
    folder = prepare(home)
    event.listen(Engine, "connect", _without_sync)
    try:
        with DagsterInstance.from_config(str(folder)) as instance, ExitStack() as stack:
            for path in (folder / "storage").rglob("*.db"):
                connection = stack.enter_context(closing(sqlite3.connect(path)))
                connection.execute("select count(*) from sqlite_master").fetchone()
            yield instance
    finally:
        event.remove(Engine, "connect", _without_sync)


def _without_sync(connection: Any, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("pragma synchronous = normal")
