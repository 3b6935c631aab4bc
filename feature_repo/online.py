"""The online reader: what is known of a user now, read through Feast, and the path by which events get in.

A user's history online is two values: the packed batch history up to the published cut, and the tail of events that
were pushed since. A read merges them; a push is a read-merge-write of the tail under a lock file, so concurrent
writers of one user, threads or processes of one host, lose nothing. Materialising a new cut never touches the tail:
events that the batch history then holds too are recognised and counted once.

Times: events enter by microsecond, histories carry seconds, as the event log does. Feast neither applies a ttl
online nor keeps sub-second event times, so both are done here by the feature `event_timestamp_us`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feature_repo.days import DAY_SECONDS, MICROSECONDS
from feature_repo.history_bytes import HISTORY_EVENT, unpack_history
from feature_repo.store import TTL_DAYS, feast_folder, feature_service_name, online_state, open_store, vector_view
from feature_repo.tail import PUSHED_EVENT, TAIL_KEY, join_history, merge_tail
from models.schema import FeatureSchema

if TYPE_CHECKING:
    from feast import FeatureStore

__all__ = ["HISTORY_EVENT", "PUSHED_EVENT", "OnlineReader", "OnlineUser"]

logger = logging.getLogger(__name__)

NUM_LOCKS = 64
LOCKED_SECONDS = 30.0
"""How long a write waits for another writer of the SQLite file (a materialisation) before it fails."""


@dataclass(frozen=True)
class OnlineUser:
    """What is known of a user at some time. Arrays are in schema order and must not be written to."""

    user_id: int
    known: bool
    """False: no published features that are young enough; the features are those of a brand-new user."""
    categorical: NDArray[np.int64]
    dense: NDArray[np.float32]
    history: NDArray[Any]
    """Structured array of item, time (seconds), kind, surface; oldest first, at most `history_length`."""
    feature_age_s: float
    """Seconds since the published cut; NaN where `known` is False."""
    published_at_us: int
    """The published cut; 0 where `known` is False."""


@dataclass(frozen=True)
class _Values:
    """Features of one view and user with the time that they are of; None where there are none."""

    values: dict[str, Any]
    at_us: int


class OnlineReader:
    """Reads users from the online store of a home, and pushes their events.

    One reader serves many threads. It opens the registry once: a new schema needs a new reader, and the reader of the
    old one goes on.

    Args:
        home: with an applied Feast store.
        schema: of the release that will be served.

    Raises:
        ValueError: the store has no feature service, or no features, for this schema.
    """

    def __init__(self, home: Path, schema: FeatureSchema) -> None:
        self.home = Path(home)
        self.schema = schema
        self._store = open_store(self.home)
        name = feature_service_name(schema)
        services = {service.name: service for service in self._store.list_feature_services()}
        if name not in services:
            raise ValueError(
                f"schema: {feast_folder(self.home)} has no feature service {name}; it has {sorted(services) or 'none'}"
            )
        newest = online_state(self.home)
        if newest is not None and online_state(self.home, schema.fingerprint) is None:
            raise ValueError(
                f"schema: the online store holds features of {newest.schema_fingerprint}, not of {schema.fingerprint}"
            )
        self._views = {vector_view(schema): "user_vector", "user_history": "user_history", "user_tail": "user_tail"}
        self._service = services[name]
        # Writes have a connection of their own: a writer that waits for SQLite would hold up reads on a shared one.
        self._writer = open_store(self.home)
        self._locks = feast_folder(self.home) / "locks"
        self._locks.mkdir(exist_ok=True)
        self._write = threading.Lock()
        self._num_categorical = len(schema.categorical_of("user"))
        self._num_dense = len(schema.dense_of("user"))
        self._fetch(self._store, [0])

    @property
    def published_at_us(self) -> int:
        """The published cut that is online now, 0 before the first materialisation. Reads a small file."""
        state = online_state(self.home, self.schema.fingerprint)
        return state.published_at_us if state else 0

    def read(self, user_ids: Sequence[int], now_us: int) -> list[OnlineUser]:
        """What is known of each user at `now_us`, in the order of `user_ids`; unknown users are flagged, not errors.

        Values older than the ttl of their view, and values and events from after `now_us`, are left out: a replay of a
        past day passes the time of that day, not that of the clock.

        Raises:
            ValueError: the store was materialised with another schema since this reader was opened.
        """
        if not len(user_ids):
            return []
        return [
            self._user(user_id, views, now_us)
            for user_id, views in zip(user_ids, self._fetch(self._store, user_ids), strict=True)
        ]

    def push_events(self, user_id: int, events: NDArray[Any]) -> int:
        """Merge events into a user's tail by (time, event_id) and return the length of the tail.

        Late events find their place, event ids that the tail holds are dropped, the newest `history_length` stay.

        Args:
            user_id: known or not.
            events: structured array of `PUSHED_EVENT`, in any order.

        Raises:
            ValueError: a kind or surface code that the schema lacks, a negative item or a time out of range.
            TimeoutError: another process kept the store locked for longer than half a minute.
        """
        self._check(events)
        with self._user_lock(user_id):
            tail, keys, at_us = self._tail(self._fetch(self._writer, [user_id], ["user_tail"])[0])
            tail, keys = merge_tail(tail, keys, events, self.schema.history_length)
            newest_us = max(at_us, int(keys["time_us"].max(initial=0)))
            self._write_tail(user_id, tail, keys, newest_us)
        return len(tail)

    def _check(self, events: NDArray[Any]) -> None:
        if events.dtype != PUSHED_EVENT:
            raise ValueError(f"events: dtype {events.dtype} is not {PUSHED_EVENT}")
        limits = {
            "kind": (0, len(self.schema.kinds) - 1),
            "surface": (0, len(self.schema.surfaces) - 1),
            "item": (0, 2**31 - 1),
            "time_us": (0, (2**32 - 1) * MICROSECONDS),
        }
        for name, (low, high) in limits.items():
            wrong = events[name][(events[name] < low) | (events[name] > high)]
            if len(wrong):
                raise ValueError(f"events.{name}: {wrong[0]} is outside {low}..{high}")

    def _user(self, user_id: int, views: dict[str, _Values], now_us: int) -> OnlineUser:
        fresh = {view: values for view, values in views.items() if _usable(view, values.at_us, now_us)}
        history = unpack_history(fresh["user_history"].values["history"]) if "user_history" in fresh else _NO_HISTORY
        tail = unpack_history(fresh["user_tail"].values["tail"]) if "user_tail" in fresh else _NO_HISTORY
        joined = join_history(history, tail, self.schema.history_length, now_us // MICROSECONDS)
        vector = fresh.get("user_vector")
        if vector is None:
            categorical = np.zeros(self._num_categorical, np.int64)
            categorical[0] = user_id
            dense = np.zeros(self._num_dense, np.float32)
            return OnlineUser(user_id, False, categorical, dense, joined, float("nan"), 0)
        if len(vector.values["categorical"]) != self._num_categorical or len(vector.values["dense"]) != self._num_dense:
            raise ValueError(f"user {user_id}: the online features do not fit schema {self.schema.fingerprint}")
        return OnlineUser(
            user_id=user_id,
            known=True,
            categorical=vector.values["categorical"],
            dense=vector.values["dense"],
            history=joined,
            feature_age_s=(now_us - vector.at_us) / MICROSECONDS,
            published_at_us=vector.at_us,
        )

    def _fetch(
        self, store: FeatureStore, user_ids: Sequence[int], only: Sequence[str] = ()
    ) -> list[dict[str, _Values]]:
        features: Any = self._service
        if only:
            features = [f"{view}:{name}" for view in only for name in (*_FEATURES[view], _AT)]
        answer = store.get_online_features(
            features=features, entity_rows=[{"user_id": int(u)} for u in user_ids], full_feature_names=True
        ).proto
        names = answer.metadata.feature_names.val
        column = {name: answer.results[i].values for i, name in enumerate(names)}
        views = {stored: view for stored, view in self._views.items() if not only or view in only}
        return [
            {view: v for stored, view in views.items() if (v := _values(column, stored, view, row))}
            for row in range(len(user_ids))
        ]

    def _tail(self, views: dict[str, _Values]) -> tuple[NDArray[Any], NDArray[Any], int]:
        stored = views.get("user_tail")
        if stored is None:
            return _NO_HISTORY, np.empty(0, TAIL_KEY), 0
        keys = np.frombuffer(stored.values["tail_keys"], TAIL_KEY)
        return unpack_history(stored.values["tail"]), keys, stored.at_us

    def _write_tail(self, user_id: int, tail: NDArray[Any], keys: NDArray[Any], at_us: int) -> None:
        import pandas as pd

        at = pd.Timestamp(at_us, unit="us", tz="UTC")
        row = {
            "user_id": [user_id], "tail": [tail.tobytes()], "tail_keys": [keys.tobytes()],
            "event_timestamp_us": [at_us], "published_at": [at], "created_at": [at],
        }  # fmt: skip
        deadline = time.monotonic() + LOCKED_SECONDS
        while True:
            try:
                with self._write:
                    self._writer.write_to_online_store("user_tail", pd.DataFrame(row))
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"user {user_id}: the online store stayed locked: {error}") from error
                logger.info("the online store is locked by another writer; trying again")
                time.sleep(0.05)

    @contextlib.contextmanager
    def _user_lock(self, user_id: int) -> Iterator[None]:
        with (self._locks / f"{user_id % NUM_LOCKS}.lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


_AT = "event_timestamp_us"
_FEATURES = {"user_vector": ("categorical", "dense"), "user_history": ("history",), "user_tail": ("tail", "tail_keys")}
_NO_HISTORY = np.empty(0, HISTORY_EVENT)


def _usable(view: str, at_us: int, now_us: int) -> bool:
    age_us = now_us - at_us
    if view == "user_tail":  # the tail's time is its newest event's; single events from after now are dropped later
        return age_us <= TTL_DAYS[view] * DAY_SECONDS * MICROSECONDS
    return 0 <= age_us <= TTL_DAYS[view] * DAY_SECONDS * MICROSECONDS


def _values(column: dict[str, Any], stored: str, view: str, row: int) -> _Values | None:
    """Values of a view, which is stored under a name of its own."""
    at = column[f"{stored}__{_AT}"][row]
    if at.WhichOneof("val") != "int64_val":
        return None
    values: dict[str, Any] = {}
    for name in _FEATURES[view]:
        value = column[f"{stored}__{name}"][row]
        match value.WhichOneof("val"):
            case "int64_list_val":
                values[name] = np.asarray(value.int64_list_val.val, np.int64)
            case "float_list_val":
                values[name] = np.asarray(value.float_list_val.val, np.float32)
            case "bytes_val":
                values[name] = value.bytes_val
            case kind:
                raise ValueError(f"online store: {view}.{name} holds {kind or 'nothing'} for row {row}")
    return _Values(values, at.int64_val)
