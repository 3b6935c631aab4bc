"""From what a client sent to what the engine reads: stored users, inline users, and pushed events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bentos.retrieval.runtime import EVENT, Engine, InlineUser, Request, UserFeatures
from bentos.retrieval.schemas import AttributesIn, EventIn, MaxPerIn, RetrieveRequest
from models.index.terms import Cap

PUSHED_EVENT = np.dtype([("event_id", "<i8"), ("time_us", "<i8"), ("item", "<i4"), ("kind", "u1"), ("surface", "u1")])
"""An event on its way into a user's tail; the layout of `feature_repo.online`."""


class FieldError(ValueError):
    """A value that is well formed but wrong for the release that serves; names the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Reader(Protocol):
    """The online feature reader; `feature_repo.online.OnlineReader` has this shape."""

    @property
    def published_at_us(self) -> int:
        """The cut that is online, microseconds since the epoch."""

    def read(self, user_ids: Sequence[int], now_us: int) -> Sequence[UserFeatures]:
        """Features of users as of now, in order; unknown users come back as cold ones."""

    def push_events(self, user_id: int, events: NDArray[Any]) -> int:
        """Merge events (dtype `PUSHED_EVENT`) into the user's tail; returns its length."""


@dataclass(frozen=True)
class Job:
    """A query that waits in the batcher."""

    query: RetrieveRequest
    arrived_us: int

    @property
    def timestamp_us(self) -> int:
        """When the request happens."""
        return self.arrived_us if self.query.timestamp_us is None else self.query.timestamp_us


def check(engine: Engine, query: RetrieveRequest) -> None:
    """Refuse at the door what this release can't answer. Raises FieldError."""
    _code("surface", query.surface, engine.schema.surfaces)
    for event in query.history or ():
        _code("history.surface", event.surface, engine.schema.surfaces)
        _code("history.kind", event.kind, engine.schema.kinds)
    if query.tier is not None and query.tier not in engine.config.tiers:
        raise FieldError("tier", f"{query.tier!r} is unknown; known: {', '.join(engine.config.tier_names)}")
    if len(query.history or ()) > engine.schema.history_length:
        raise FieldError("history", f"more than {engine.schema.history_length} events")
    if query.attributes is not None:
        _attributes(engine, query.attributes)
    if query.rank_by == "value" and not engine.has_bids:
        raise FieldError("rank_by", f"no live ad of release {engine.release} has a positive bid")
    _cap(engine, query.max_per)


def check_explainable(engine: Engine, query: RetrieveRequest) -> None:
    """Refuse to explain a tier that has no path through the index. Raises FieldError."""
    tier = query.tier or engine.config.default_tier
    if engine.config.tier(tier).exact:
        raise FieldError("tier", f"{tier!r} scans every ad, there is no path to explain")


def to_requests(engine: Engine, reader: Reader | None, jobs: Sequence[Job], tier: str) -> list[Request]:
    """Read and assemble the features of jobs; users of one point in time are read together."""
    users: dict[int, UserFeatures] = {}
    stored: dict[int, list[int]] = {}
    newest_us = max((j.arrived_us for j in jobs), default=0)
    for row, job in enumerate(jobs):
        if job.query.user_id is None:
            users[row] = inline_user(engine, job.query.history or (), job.query.attributes)
        elif reader is None:
            users[row] = engine.cold_user()
        else:
            stored.setdefault(job.query.timestamp_us or newest_us, []).append(row)
    for now_us, rows in stored.items():
        assert reader is not None
        ids = [jobs[row].query.user_id for row in rows]
        users.update(zip(rows, reader.read([i for i in ids if i is not None], now_us), strict=True))
    return [
        Request(
            user=users[row],
            surface=job.query.surface,
            k=job.query.k,
            timestamp_us=job.timestamp_us,
            tier=tier,
            blocked=frozenset(job.query.blocked_ad_ids),
            eligible=job.query.eligible_ad_ids,
            rank_by=job.query.rank_by,
            cap=_cap(engine, job.query.max_per),
        )
        for row, job in enumerate(jobs)
    ]


def inline_user(engine: Engine, history: Sequence[EventIn], attributes: AttributesIn | None) -> InlineUser:
    """A user from the features that came with the request; events of unknown ads are left out."""
    categorical, dense = _attributes(engine, attributes or AttributesIn())
    rows = np.empty(len(history), dtype=EVENT)
    rows["item"] = engine.code_of([e.ad_id for e in history])
    rows["time"] = [e.timestamp_us // 1_000_000 for e in history]
    rows["kind"] = [_code("history.kind", e.kind, engine.schema.kinds) for e in history]
    rows["surface"] = [_code("history.surface", e.surface, engine.schema.surfaces) for e in history]
    events = rows[rows["item"] >= 0]
    events = events[np.argsort(events["time"], kind="stable")]
    return InlineUser(categorical, dense, events, known=bool(len(events)) or attributes is not None)


def pushed_events(engine: Engine, user_id: int, events: Sequence[EventIn]) -> NDArray[Any]:
    """Events as the tail takes them, without those of ads that the release does not know.

    An event without an id gets the hash of its content, so that a repeated call adds nothing.
    """
    rows = np.empty(len(events), dtype=PUSHED_EVENT)
    rows["event_id"] = [_event_id(user_id, e) if e.event_id is None else e.event_id for e in events]
    rows["time_us"] = [e.timestamp_us for e in events]
    rows["item"] = engine.code_of([e.ad_id for e in events])
    rows["kind"] = [_code("events.kind", e.kind, engine.schema.kinds) for e in events]
    rows["surface"] = [_code("events.surface", e.surface, engine.schema.surfaces) for e in events]
    return rows[rows["item"] >= 0]


def _event_id(user_id: int, event: EventIn) -> int:
    content = f"{user_id} {event.ad_id} {event.kind} {event.surface} {event.timestamp_us}"
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little", signed=True)


def _attributes(engine: Engine, given: AttributesIn) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    names = [f.name for f in engine.schema.categorical_of("user")]
    dense_names = [f.name for f in engine.schema.dense_of("user")]
    for kind, values, known in (("categorical", given.categorical, names), ("dense", given.dense, dense_names)):
        for name in values:
            if name not in known:
                raise FieldError(f"attributes.{kind}.{name}", f"unknown feature; known: {', '.join(known)}")
    categorical = np.array([given.categorical.get(n, 0) for n in names], dtype=np.int64)
    wide = np.array([given.dense.get(n, 0.0) for n in dense_names], dtype=np.float64)
    if (np.abs(wide) > np.finfo(np.float32).max).any():
        raise FieldError("attributes.dense", "a value is too large for float32")
    return categorical, wide.astype(np.float32)


def _cap(engine: Engine, max_per: MaxPerIn | None) -> Cap | None:
    if max_per is None:
        return None
    groups = [group.name for group in engine.schema.groups]
    return Cap(_code("max_per.group", max_per.group, groups), max_per.limit)


def _code(field: str, value: str, known: Sequence[str]) -> int:
    if value not in known:
        raise FieldError(field, f"{value!r} is unknown; known: {', '.join(known)}")
    return known.index(value)
