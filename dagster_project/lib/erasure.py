"""Erase a user from a whole home, and leave it so that the next run makes again what depended on the user's rows."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from dagster import DagsterInstance

from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import (
    CODE_TAG,
    DATA_VERSION_METADATA,
    DATA_VERSION_TAG,
    PARENTS_TAG,
    SETTINGS_TAG,
    Graph,
    Ledger,
    Node,
)
from feature_repo.erasure import CONTRACT_TABLES, erase_from_lake, erase_online
from monitoring.request_log import erase_requests

USER_ROWS = ("transfer/teacher_labels", "tuning/node_data")
"""Assets whose artefacts hold a row for each of a user's impressions; models hold none."""
HISTORY_TABLES = (("event_logs", "event"), ("asset_check_executions", "evaluation_event"))


@dataclass(frozen=True)
class ErasureReport:
    """What was removed where."""

    rows: int
    """Of the contract's tables in the lake."""
    first_day: str | None
    derived_partitions: int
    artefacts: int
    online_values: int
    logged_requests: int
    history_events: int
    """Of the run history: refusals whose example rows named the user."""
    changed_partitions: int
    """Ingested partitions whose new content was recorded, so that everything after them is stale."""


def erase_user(home: Home, instance: DagsterInstance, graph: Graph, user_id: int) -> ErasureReport:
    """Erase a user. Safe to repeat; a killed erasure is finished by running it again."""
    erasure = erase_from_lake(home.lake, user_id)
    artefacts = _drop_artifacts(home, erasure.first_day) if erasure.first_day else 0
    online = erase_online(home.path, user_id)
    logged = erase_requests(home.path / "logs" / "requests", user_id)
    changed = record_ingested(home, instance, graph)
    history = _scrub_history(home.path / "dagster", user_id)
    return ErasureReport(
        rows=erasure.num_rows, first_day=erasure.first_day, derived_partitions=len(erasure.removed),
        artefacts=artefacts, online_values=online, logged_requests=logged, history_events=history,
        changed_partitions=changed,
    )  # fmt: skip


def _drop_artifacts(home: Home, first_day: str) -> int:
    """Remove the artefacts with rows of users from the day on; the assets are made again before anything reads them."""
    num_dropped = 0
    for name in USER_ROWS:
        for path in sorted((home.path / "artifacts" / "by_partition" / name).glob("*.json")):
            if path.stem < first_day:
                continue
            reference = json.loads(path.read_text())
            shutil.rmtree(home.artifacts.root / reference["kind"] / reference["version"], ignore_errors=True)
            path.unlink()
            num_dropped += 1
    return num_dropped


def record_ingested(home: Home, instance: DagsterInstance, graph: Graph) -> int:
    """Record the content of ingested partitions that is not what their asset's latest materialisation says.

    Only the data version changes: code and settings stay those of the ingest, so a changed source is still noticed.
    """
    ledger = Ledger(instance, graph)
    num_changed = 0
    for table in CONTRACT_TABLES:
        key = dg.AssetKey(["ingest", table])
        for day in home.lake.keys(table):
            record, partition = ledger.record(Node(key, day)), home.lake.partition(table, day)
            if record is None or record.data_version == partition.version:
                continue
            event = dg.AssetMaterialization(
                key, partition=day, description="a user was erased",
                metadata={DATA_VERSION_METADATA: partition.version, "dagster/row_count": partition.num_rows},
                tags={
                    DATA_VERSION_TAG: partition.version, CODE_TAG: record.code, SETTINGS_TAG: record.settings,
                    PARENTS_TAG: record.parents,
                },
            )  # fmt: skip
            instance.report_runless_asset_event(event)
            num_changed += 1
    return num_changed


def _scrub_history(folder: Path, user_id: int) -> int:
    """Delete events of the run history whose example rows name the user; the files are rewritten."""
    num_deleted = 0
    for path in sorted(folder.rglob("*.db")):
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            known = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            before = num_deleted
            for table, column in HISTORY_TABLES:
                if table in known:
                    for end in (",", "}"):
                        query = f"DELETE FROM {table} WHERE instr({column}, ?) > 0"
                        num_deleted += connection.execute(query, [f"'user_id': {user_id}{end}"]).rowcount
            connection.commit()
            if num_deleted > before:
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return num_deleted
