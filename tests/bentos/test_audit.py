from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bentos.audit import audit_log
from bentos.retrieval.request_log import to_table
from bentos.retrieval.runtime import Engine, Request
from tests.bentos.world import NOW_US, WorldReader
from tests.models.worlds import World


def served(engine: Engine, world: World, num: int) -> pa.Table:
    reader, rows = WorldReader(world), list[dict[str, Any]]()
    for i in range(num):
        user = reader.read([10_000 + i], NOW_US)[0]
        answer = engine.retrieve([Request(user, "feed", 5, NOW_US, "lite")])[0]
        row: dict[str, Any] = {
            "request_id": i, "timestamp_us": NOW_US, "user_id": 10_000 + i, "surface": "feed", "k": 5,
            "release": answer.release, "tier": answer.tier, "cost": answer.cost, "latency_ms": 2.0,
            "ad_ids": answer.ad_ids, "scores": answer.scores, "cold": answer.cold,
            "rank_by": "score", "restricted": False,
        }  # fmt: skip
        if i % 2:  # features came with the request, and the log kept them for all but one
            row["user_id"] = None
            if i != 1:
                row |= {"categorical": user.categorical, "dense": user.dense, "history": user.history.tobytes()}
        rows.append(row)
    return to_table(rows)


def test_logged_requests_are_scanned_with_their_own_features(shared_home: Path, engine: Engine, world: World) -> None:
    reader = WorldReader(world)
    audited = audit_log(shared_home, served(engine, world, 40), reader=reader)
    assert [a.request_id for a in audited] == [0, *range(2, 40)]
    for a in audited:
        user = reader.read([10_000 + a.request_id], NOW_US)[0]
        assert list(a.exact) == engine.exact([Request(user, "feed", 5, NOW_US)])[0].ad_ids
    assert 0 < np.mean([len(set(a.answered) & set(a.exact)) / len(a.exact) for a in audited]) < 1


def test_value_is_scanned_as_value_and_restricted_requests_are_left_out(
    shared_home: Path, engine: Engine, world: World
) -> None:
    reader, rows = WorldReader(world), served(engine, world, 6).to_pylist()
    rows = [row | {"rank_by": "value", "restricted": i == 2} for i, row in enumerate(rows) if row["user_id"]]
    audited = audit_log(shared_home, to_table(rows), reader=reader)
    assert [a.request_id for a in audited] == [0, 4]
    for a in audited:
        request = Request(reader.read([10_000 + a.request_id], NOW_US)[0], "feed", 5, NOW_US)
        by_value = engine.exact([replace(request, rank_by="value")])[0].ad_ids
        assert list(a.exact) == by_value != engine.exact([request])[0].ad_ids


def test_samples_are_bounded_and_repeatable(shared_home: Path, engine: Engine, world: World) -> None:
    log = served(engine, world, 20)
    first = audit_log(shared_home, log, max_requests=7, seed=3, reader=WorldReader(world))
    assert first == audit_log(shared_home, log, max_requests=7, seed=3, reader=WorldReader(world))
    assert len(first) <= 7
    with pytest.raises(ValueError, match="release/gone does not exist"):
        audit_log(shared_home, log.set_column(5, "release", pa.array(["gone"] * 20)), reader=WorldReader(world))
