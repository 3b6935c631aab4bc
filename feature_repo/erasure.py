"""Erase a user from the lake and the online store, and keep the user out of what is ingested later.

The contract's tables lose the user's rows (an outcome belongs to the user whose request it answers). Derived tables
are removed from the first day on that held the user: rows are codes there, and codes of others depend on it. The next
run makes them again. The lake remembers a salted hash of the id, not the id, and ingest drops rows that match.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from feature_repo.files import open_folder
from feature_repo.lake import Lake, Partition
from feature_repo.store import PROJECT, feast_folder
from feature_repo.tables import CONTRACT

ERASED_FILE = "erased.json"
CONTRACT_TABLES = (*CONTRACT, "oracle")
BY_USER = ("impressions", "engagements", "users")
BY_REQUEST = ("outcomes", "oracle")


@dataclass(frozen=True)
class Erasure:
    """What was changed in the lake."""

    rewritten: dict[tuple[str, str], Partition] = field(default_factory=dict)
    """(table, day) of the contract's partitions that held the user -> what they are now."""
    removed: list[tuple[str, str]] = field(default_factory=list)
    """Derived partitions that are gone until the next run."""
    num_rows: int = 0
    """Rows of the contract's tables that were dropped."""

    @property
    def first_day(self) -> str | None:
        """The first day that held the user."""
        return min((day for _, day in self.rewritten), default=None)


class Erased:
    """Users that were erased from a lake, as salted hashes."""

    def __init__(self, lake: Lake) -> None:
        self._files = open_folder(lake.root)
        stored = self._files.read(ERASED_FILE)
        values: dict[str, Any] = json.loads(stored) if stored else {"salt": secrets.token_hex(16), "users": []}
        self._salt: str = values["salt"]
        self._users: set[str] = set(values["users"])
        self._requests: list[NDArray[np.int64]] = []

    def add(self, user_id: int) -> None:
        """Remember a user."""
        self._users.add(self._hash(user_id))
        content = json.dumps({"salt": self._salt, "users": sorted(self._users)}).encode()
        self._files.write(ERASED_FILE, content, self._files.tag(ERASED_FILE))

    def among(self, user_ids: pa.ChunkedArray) -> NDArray[np.int64]:
        """Ids of a column that belong to erased users."""
        if not self._users:
            return np.array([], np.int64)
        distinct = pa.compute.unique(user_ids).drop_null().to_pylist()
        return np.array([user for user in distinct if self._hash(user) in self._users], np.int64)

    def drop(self, rows: pa.Table) -> pa.Table:
        """Rows of a contract's table without those of erased users, and without answers to requests dropped so far."""
        if "user_id" in rows.column_names and pa.types.is_integer(rows.schema.field("user_id").type):
            gone = self.among(rows["user_id"])
            if len(gone) and "request_id" in rows.column_names:
                theirs = rows.filter(pa.compute.is_in(rows["user_id"], pa.array(gone)))
                self._requests.append(theirs["request_id"].to_numpy())
            return without(rows, "user_id", gone)
        if "request_id" in rows.column_names and self._requests:
            return without(rows, "request_id", np.concatenate(self._requests))
        return rows

    def _hash(self, user_id: int) -> str:
        return hashlib.blake2b(str(user_id).encode(), key=bytes.fromhex(self._salt), digest_size=16).hexdigest()


def without(rows: pa.Table, column: str, values: NDArray[np.int64]) -> pa.Table:
    """Rows whose value of a column is none of `values`."""
    if not len(values):
        return rows
    return rows.filter(pa.compute.invert(pa.compute.is_in(rows[column], pa.array(values, pa.int64()))))


def erase_from_lake(lake: Lake, user_id: int) -> Erasure:
    """Remove a user from every partition; see the module. A user that no table knows is remembered all the same.

    What becomes visible last is the contract's tables: a killed erasure is finished by running it again.
    """
    Erased(lake).add(user_id)
    user = np.array([user_id], np.int64)
    held: dict[tuple[str, str], pa.Table] = {}
    requests: list[NDArray[np.int64]] = []
    for table in BY_USER:
        for day in lake.keys(table):
            rows = lake.read(table, day)
            kept = without(rows, "user_id", user)
            if kept.num_rows < rows.num_rows:
                held[table, day] = kept
                if table == "impressions":
                    requests.append(rows.filter(pa.compute.equal(rows["user_id"], user_id))["request_id"].to_numpy())
    asked = np.concatenate(requests) if requests else np.array([], np.int64)
    for table in BY_REQUEST:
        for day in lake.keys(table) if len(asked) else []:
            kept = without(lake.read(table, day), "request_id", asked)
            if kept.num_rows < lake.partition(table, day).num_rows:
                held[table, day] = kept
    first = min((day for _, day in held), default=None)
    removed = _remove_derived(lake, first) if first else []
    num_rows = sum(lake.partition(*key).num_rows - rows.num_rows for key, rows in held.items())
    with lake.together() as batch:
        written = {
            (table, day): batch.write(table, day, rows, lake.partition(table, day).facts)
            for (table, day), rows in held.items()
        }
    return Erasure(written, removed, num_rows)


def _remove_derived(lake: Lake, first_day: str) -> list[tuple[str, str]]:
    derived = [table for table in lake.tables() if table not in CONTRACT_TABLES]
    doomed = [(table, day) for table in derived for day in lake.keys(table) if day >= first_day]
    for table, day in doomed:
        lake.remove(table, day)
    return doomed


def erase_online(home: Path, user_id: int) -> int:
    """Remove a user from the online store and its offline files; the number of values that were removed.

    The file is rewritten, so that freed pages don't keep the bytes. Offline files are linked again by the next cut.
    """
    folder = feast_folder(home)
    for path in folder.glob("offline/user_*/*.parquet"):
        path.unlink()
    database = folder / "online.db"
    if not database.exists():
        return 0
    num_removed = 0
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE ?"
        for (table,) in connection.execute(query, [f"{PROJECT}_%"]).fetchall():
            done = connection.execute(f'DELETE FROM "{table}" WHERE entity_key = ?', [_entity_key(user_id)])
            num_removed += done.rowcount
        connection.commit()
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return num_removed


def _entity_key(user_id: int) -> bytes:
    from feast.infra.key_encoding_utils import serialize_entity_key
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value

    key = EntityKey(join_keys=["user_id"], entity_values=[Value(int64_val=user_id)])
    return bytes(serialize_entity_key(key, entity_key_serialization_version=3))
