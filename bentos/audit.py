"""Audit of served requests: what the full scan of the same release would have answered.

Requests come from the request log. Where the log kept a request's features (a hashed share of them), the audit
uses exactly those; otherwise it reads the user again as of the request's time. Requests that restricted the ads are
left out: the log doesn't keep their lists.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bentos.retrieval.features import Reader
from bentos.retrieval.runtime import EVENT, Engine, InlineUser, Request, UserFeatures
from models.artifact import ArtifactStore

logger = logging.getLogger(__name__)

BATCH = 32


@dataclass(frozen=True)
class AuditedAnswer:
    """One served answer beside the exact one, best ad first; fields as in `monitoring.recall.AuditedRequest`."""

    request_id: int
    user_id: int | None
    surface: str
    tier: str
    release: str
    answered: tuple[int, ...]
    exact: tuple[int, ...]
    cost: float
    latency_ms: float


def audit_log(
    home: Path, log: pa.Table, *, max_requests: int = 500, seed: int = 0, reader: Reader | None = None
) -> list[AuditedAnswer]:
    """Scan exactly for a sample of logged requests, each by the release that answered it.

    Args:
        home: holds the releases, and the online store unless `reader` is given.
        log: rows of the request log.
        max_requests: size of the sample.
        seed: of the sample.
        reader: of user features, the home's online store by default.

    Raises:
        ValueError: a logged release does not exist here or is damaged.
    """
    rows = np.flatnonzero(~log["restricted"].to_numpy().astype(bool))
    if len(rows) > max_requests:
        rows = np.sort(np.random.default_rng(seed).choice(rows, max_requests, replace=False))
    by_release: dict[str, list[dict[str, Any]]] = {}
    for row in log.take(pa.array(rows)).to_pylist():
        by_release.setdefault(row["release"], []).append(row)
    audited: list[AuditedAnswer] = []
    for version, logged in by_release.items():
        engine = Engine.load(ArtifactStore(Path(home) / "artifacts"), version)
        source = open_reader(home, engine) if reader is None else reader
        audited += _audit(engine, source, logged)
    return audited


def open_reader(home: Path, engine: Engine) -> Reader | None:
    """The online reader of a home for an engine's features; None where there is no online store."""
    if not (Path(home) / "feast").exists():
        return None
    from feature_repo.online import OnlineReader

    return OnlineReader(Path(home), engine.schema)


def _audit(engine: Engine, reader: Reader | None, logged: list[dict[str, Any]]) -> list[AuditedAnswer]:
    known = [(row, user) for row in logged if (user := _user(engine, reader, row)) is not None]
    if len(known) < len(logged):
        logger.warning("%d requests brought features that the log did not keep: not audited", len(logged) - len(known))
    audited: list[AuditedAnswer] = []
    for first in range(0, len(known), BATCH):
        part = known[first : first + BATCH]
        requests = [
            Request(user, row["surface"], row["k"], row["timestamp_us"], rank_by=row["rank_by"]) for row, user in part
        ]
        audited += [_answer(row, exact.ad_ids) for (row, _), exact in zip(part, engine.exact(requests), strict=True)]
    return audited


def _answer(row: Mapping[str, Any], exact: list[int]) -> AuditedAnswer:
    copied = ("request_id", "user_id", "surface", "tier", "release", "cost", "latency_ms")
    return AuditedAnswer(**{name: row[name] for name in copied}, answered=tuple(row["ad_ids"]), exact=tuple(exact))


def _user(engine: Engine, reader: Reader | None, row: Mapping[str, Any]) -> UserFeatures | None:
    if row["history"] is not None:
        return InlineUser(
            categorical=np.asarray(row["categorical"], np.int64),
            dense=np.asarray(row["dense"], np.float32),
            history=np.frombuffer(row["history"], EVENT),
            known=not row["cold"],
        )
    if row["user_id"] is None:
        return None
    return engine.cold_user() if reader is None else reader.read([row["user_id"]], row["timestamp_us"])[0]
