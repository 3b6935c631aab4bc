from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bentos.build import build_bento
from bentos.probe import probe, same_answer
from bentos.retrieval.runtime import Answer
from bentos.served import bento_path, serve
from models.release import promote
from monitoring.request_log import read_requests
from tests.bentos.world import NOW_US, add_release
from tests.models.worlds import World


def answer(ad_ids: list[int], scores: list[float]) -> Answer:
    return Answer(ad_ids, scores, "r", "full", 0.1, 1, 1, False, None)


def test_same_answer_allows_ties_to_swap_and_nothing_else() -> None:
    expected = answer([1, 2, 3], [3.0, 1.0, 1.0])
    assert same_answer([1, 2, 3], [3.0, 1.0, 1.0 + 1e-6], expected)
    assert same_answer([1, 3, 2], [3.0, 1.0, 1.0], expected)
    assert same_answer([1, 2, 9], [3.0, 1.0, 1.0], expected)  # a tie across the end of the list
    assert not same_answer([2, 1, 3], [3.0, 1.0, 1.0], expected)
    assert not same_answer([1, 2, 3], [3.0, 1.0, 1.1], expected)
    assert not same_answer([1, 2], [3.0, 1.0], expected)


def test_a_bento_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="retrieval:none: there is no Bento"):
        bento_path(tmp_path, "retrieval:none")
    with pytest.raises(ValueError, match="requests"):
        probe(tmp_path, "retrieval:none", [])


def inline_requests(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    terms: list[dict[str, Any]] = [
        {}, {"rank_by": "value"}, {"max_per": {"group": "topic", "limit": 2}},
        {"eligible_ad_ids": list(range(50_000, 50_030))},
    ]  # fmt: skip
    for number in range(count):
        events = [
            {"ad_id": int(ad), "kind": "like", "surface": "feed", "timestamp_us": NOW_US - int(age)}
            for ad, age in zip(rng.integers(50_000, 50_090, 20), rng.integers(10**6, 10**12, 20), strict=True)
        ]
        found.append({"history": events, "surface": "stories", "k": 10, "timestamp_us": NOW_US})
        found[-1] |= terms[number % len(terms)]
    return found


@pytest.mark.slow
def test_a_served_bento_answers_like_the_engine(tmp_path: Path, world: World) -> None:
    release = add_release(tmp_path, world)
    other = add_release(tmp_path, world, seed=1)
    promote(tmp_path / "releases", other.version, "2026-01-04")
    built = build_bento(tmp_path, release.version)
    assert built.path.is_dir()
    assert build_bento(tmp_path, release.version).build_s == 0.0  # the same content is the same Bento

    report = probe(tmp_path, built.tag, inline_requests(60))
    assert (report.errors, report.mismatches, report.first_problem) == (0, 0, None)
    assert (report.release, report.release_source) == (release.version, "bento")  # not the promoted one
    assert 0 < report.coverage_at_k <= 1
    assert report.exit_code == 0
    now = datetime.fromtimestamp(NOW_US / 1e6, UTC)
    assert read_requests(tmp_path / "logs" / "requests", now, now + timedelta(hours=1)).rows.num_rows == 60

    with serve(tmp_path, built.path) as served:
        group = os.getpgid(served.process.pid)
        with contextlib.closing(served.connect()) as connection:
            status = served.call(connection, "GET", "/readyz").body
            metrics = served.call(connection, "GET", "/metrics").body["text"]
    assert (status["release"], status["release_source"]) == (other.version, "pointer")
    assert "mirach_release_loaded_timestamp_seconds" in metrics
    assert not [p for p in psutil.process_iter() if _group(p.pid) == group and p.status() != psutil.STATUS_ZOMBIE]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
