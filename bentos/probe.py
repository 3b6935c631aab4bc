"""Smoke test of a Bento: serve it for real, send real requests, compare every answer with the engine's own.

The service runs as a process of its own on a free loopback port, with a bounded wait for readiness, and is
ended whatever happens. Expected answers come from the same release through `Engine`, with features read by the
same online reader; coverage is against the full scan.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bentos.audit import open_reader
from bentos.retrieval.features import Job, Reader, to_requests
from bentos.retrieval.release import EXACT
from bentos.retrieval.runtime import Answer, Engine, coverage
from bentos.retrieval.schemas import RetrieveRequest
from bentos.served import ServedAnswer, send_all, serve
from models.artifact import ArtifactStore

PATIENCE_MS = 30_000
"""Deadline of requests that name none: a probe measures latency, a busy machine must not fail it."""
SCORE_TOLERANCE = 1e-4
"""Scores of one ad in batches of different sizes may differ by float32 rounding."""


@dataclass(frozen=True)
class ProbeReport:
    """What was seen; `errors` and `mismatches` must be 0 for a Bento that may be promoted."""

    num_requests: int
    errors: int
    mismatches: int
    release: str
    release_source: str
    coverage_at_k: float
    k: int
    latency_p50_ms: float
    latency_p95_ms: float
    latency_p99_ms: float
    requests_per_s: float
    cost: float
    cold_share: float
    ready_s: float
    stop_s: float
    exit_code: int
    first_problem: str | None


def probe(
    home: Path,
    target: str | Path,
    requests: Sequence[Mapping[str, Any]],
    *,
    concurrency: int = 8,
    reader: Reader | None = None,
    ready_timeout_s: float = 90.0,
    follow_pointer: bool = False,
) -> ProbeReport:
    """Serve `target`, send `requests` (bodies of `/retrieve`), and compare with the engine.

    The Bento serves its own copy of the release, as a candidate must before it is promoted, unless
    `follow_pointer`. Expected features come from `reader`, or else from the home's online store. Requests without
    a time all happen now.

    Raises:
        ValueError: no requests. RuntimeError: the service did not start.
    """
    if not requests:
        raise ValueError("requests: at least one is needed")
    now_us = time.time_ns() // 1000
    bodies = [{"timestamp_us": now_us, "deadline_ms": PATIENCE_MS, **r} for r in requests]
    queries = [RetrieveRequest.model_validate(body) for body in bodies]
    environment = {"MIRACH_POINTER": "follow" if follow_pointer else "ignore"}
    with serve(home, target, ready_timeout_s=ready_timeout_s, environment=environment) as served:
        with contextlib.closing(served.connect()) as connection:
            status = served.call(connection, "GET", "/readyz").body
        started = time.perf_counter()
        answers = send_all(served, bodies, concurrency)
        seconds = time.perf_counter() - started
    engine = Engine.load(ArtifactStore(Path(home) / "artifacts"), status["release"])
    expected, exact = expected_answers(engine, reader or open_reader(home, engine), queries)
    problems = [p for p in (_problem(a, e) for a, e in zip(answers, expected, strict=True)) if p is not None]
    good = [a for a in answers if a.status == 200]
    found = [
        coverage(_as_answer(a.body), x) for a, x in zip(answers, exact, strict=True) if a.status == 200
    ]  # fmt: skip
    latency = np.percentile([a.latency_ms for a in answers], [50, 95, 99])
    return ProbeReport(
        num_requests=len(answers),
        errors=len(answers) - len(good),
        mismatches=len(problems) - (len(answers) - len(good)),
        release=status["release"],
        release_source=status["release_source"],
        coverage_at_k=float(np.mean(found)) if found else 0.0,
        k=max(q.k for q in queries),
        latency_p50_ms=float(latency[0]),
        latency_p95_ms=float(latency[1]),
        latency_p99_ms=float(latency[2]),
        requests_per_s=len(answers) / seconds,
        cost=float(np.mean([a.body["cost"] for a in good])) if good else 0.0,
        cold_share=float(np.mean([a.body["cold"] for a in good])) if good else 0.0,
        ready_s=served.ready_s,
        stop_s=served.stop_s,
        exit_code=served.exit_code,
        first_problem=problems[0] if problems else None,
    )


def report_dict(report: ProbeReport) -> dict[str, Any]:
    """The report as JSON-ready values."""
    return asdict(report)


def expected_answers(
    engine: Engine, reader: Reader | None, queries: Sequence[RetrieveRequest]
) -> tuple[list[Answer], list[Answer]]:
    """The engine's own answers to queries, in their tier and by the full scan."""
    now_us = time.time_ns() // 1000
    own: list[Answer] = []
    exact: list[Answer] = []
    for query in queries:
        tier = query.tier or engine.config.default_tier
        request = to_requests(engine, reader, [Job(query, now_us)], tier)
        own += engine.retrieve(request)
        exact += engine.exact(request) if tier != EXACT else own[-1:]
    return own, exact


def same_answer(ad_ids: Sequence[int], scores: Sequence[float], expected: Answer) -> bool:
    """Whether ids and scores agree; ads whose scores are equal within rounding may change places."""
    if len(ad_ids) != len(expected.ad_ids):
        return False
    if not np.allclose(scores, expected.scores, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE):
        return False
    theirs = dict(zip(expected.ad_ids, expected.scores, strict=True))
    last = expected.scores[-1] if expected.scores else 0.0
    return all(
        abs(theirs.get(ad, last) - score) <= SCORE_TOLERANCE * max(1.0, abs(score))
        for ad, score in zip(ad_ids, scores, strict=True)
    )


def _problem(answer: ServedAnswer, expected: Answer) -> str | None:
    if answer.status != 200:
        return f"status {answer.status}: {str(answer.body)[:500]}"
    if same_answer(answer.body["ad_ids"], answer.body["scores"], expected):
        return None
    return f"served {answer.body['ad_ids'][:5]} but the engine says {expected.ad_ids[:5]}"


def _as_answer(body: Mapping[str, Any]) -> Answer:
    names = ("ad_ids", "scores", "release", "tier", "cost", "nodes_scored", "ads_scored", "cold", "feature_age_s")
    return Answer(**{name: body[name] for name in names})
