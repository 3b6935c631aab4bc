"""Bodies of the monitoring assets: serve a day's requests, join outcomes, drift, recall. Evidently comes in inside."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from bentos.retrieval.runtime import Engine, Request
from bentos.served import ServedAnswer, send_all, serve
from dagster_project.lib.partitions import previous_day
from dagster_project.lib.recipes import recipe
from dagster_project.lib.resources import Home
from dagster_project.lib.serving_stages import SERVED_K, build
from dagster_project.lib.staleness import digest, rounded
from feature_repo.days import day_bounds_us
from feature_repo.positives import outcomes_of
from models.artifact import write_json_atomically
from models.release import Pointer, read_pointer
from monitoring.drift import DriftConfig, drift_report, infer_config
from monitoring.outcomes import join_outcomes
from monitoring.recall import AuditedRequest, audit_rows, recall_report
from monitoring.request_log import read_requests

CONCURRENCY = 4
AUDITED_K = 10
DRIFT_FIELDS = ("name", "scores", "drifted", "drifted_share", "num_current", "alarms", "html")


def pointer_of(home: Home) -> Pointer:
    """The promoted release; raises ValueError when nothing was promoted yet."""
    pointer = read_pointer(home.releases)
    if pointer is None:
        raise ValueError(f"{home.releases}: no release was promoted yet")
    return pointer


def serve_day(home: Home, day: str) -> tuple[str, int, dict[str, Any], list[float]]:
    """Send requests of a day to the service; version, logged requests, report, latency by percentile."""
    pointer = pointer_of(home)
    bodies = _bodies(home, day)
    with serve(home.path, build(home, pointer.as_of).tag) as served:
        send_all(served, bodies[:CONCURRENCY], 1)
        answers = send_all(served, bodies, CONCURRENCY)
    rows = _logged(home, day, pointer.version)
    wanted = {body["request_id"] for body in bodies}
    rows = rows.filter(pa.array([request in wanted for request in rows["request_id"].to_pylist()], pa.bool_()))
    partition = home.lake.write("request_log", day, rows, {"release": pointer.version})
    latencies = [a.latency_ms for a in answers]
    report = _served_report(answers, latencies, pointer, rows.num_rows)
    write_json_atomically(_path(home, "served", day), report)
    answered = sorted(zip(rows["request_id"].to_pylist(), rows["ad_ids"].to_pylist(), strict=True))
    version = digest([pointer.version, answered])
    return version, partition.num_rows, report, [float(v) for v in np.percentile(latencies, range(1, 100))]


def _served_report(
    answers: list[ServedAnswer], latencies: list[float], pointer: Pointer, logged: int
) -> dict[str, Any]:
    good = [a for a in answers if a.status == 200]
    p50, p95, p99 = (float(v) for v in np.percentile(latencies, [50, 95, 99]))
    sources = {a.body["release_source"] for a in good if a.body["release"] == pointer.version}
    return {
        "release": pointer.version, "as_of": pointer.as_of, "requests": len(answers),
        "errors": len(answers) - len(good), "logged": logged, "release_source": ",".join(sorted(sources)),
        "p50_ms": p50, "p95_ms": p95, "p99_ms": p99,
        "cost": float(np.mean([a.body["cost"] for a in good])) if good else math.nan,
        "cold_share": float(np.mean([a.body["cold"] for a in good])) if good else math.nan,
    }  # fmt: skip


def _bodies(home: Home, day: str) -> list[dict[str, Any]]:
    """Distinct requests of the day, a random sample in order of time, as clients would have sent them."""
    frame = home.lake.read("training_frame", day, columns=["request_id", "user_code", "surface", "timestamp_us"])
    request_id = frame["request_id"].to_numpy()
    _, first = np.unique(request_id, return_index=True)
    generator = np.random.default_rng(home.seed)
    chosen = np.sort(generator.permutation(first)[: recipe(home).served_requests])
    user_id = home.lake.read("catalogue", day, "users")["user_id"].to_numpy()
    surfaces = home.facts().surfaces
    columns = [frame[name].to_numpy()[chosen] for name in ("user_code", "surface", "timestamp_us")]
    # Events that an official protocol makes known later than they happened are asked for when they become known.
    start_us, end_us = day_bounds_us(home.facts(), day)
    columns[2] = np.clip(columns[2], start_us, end_us - 1)
    return [
        {
            "request_id": int(request), "user_id": int(user_id[user]), "surface": surfaces[surface], "k": SERVED_K,
            "timestamp_us": int(time),
        }
        for request, user, surface, time in zip(request_id[chosen], *columns, strict=True)
    ]  # fmt: skip


def _logged(home: Home, day: str, release: str) -> pa.Table:
    rows = read_requests(home.path / "logs" / "requests", *home.facts().bounds(day)).rows
    return rows.filter(pa.compute.equal(rows["release"], release))


def served(home: Home, day: str) -> dict[str, Any]:
    """What serving the day's requests looked like."""
    return _read(_path(home, "served", day))


def join(home: Home, day: str) -> tuple[str, list[dict[str, Any]], int]:
    """Join the request log with the outcomes known by the end of the day; version, slices, joined requests."""
    facts = home.facts()
    outcomes = outcomes_of(home.lake, facts, day) if facts.positives_only else home.lake.read("outcomes", day)
    report = join_outcomes(
        home.lake.read("request_log", day), outcomes, label=facts.main_label,
        known_before=facts.bounds(day)[1], ks=(10, SERVED_K),
    )  # fmt: skip
    rows = [asdict(one) for one in report.slices]
    write_json_atomically(
        _path(home, "outcomes", day),
        {"slices": rows, "requests": report.num_requests, "without_click": report.num_without_positive},
    )
    return digest(rounded(rows)), rows, report.num_requests - report.num_without_positive


def drift(home: Home, day: str) -> tuple[str, list[dict[str, Any]]]:
    """Drift of users and ads that the day's requests met, against the release's last day."""
    reference_day = pointer_of(home).as_of
    reports = []
    for role in ("user", "ad"):
        reference, current = _met(home, reference_day, role), _met(home, day, role)
        config = _comparable(infer_config(reference))
        report = drift_report(reference, current, name=f"{role}_features", day=day, config=config, home=home.path)
        values = asdict(report)
        values["html"] = str(report.html)
        reports.append(
            {
                name: values[name]
                for name in ("name", "scores", "drifted", "drifted_share", "num_current", "alarms", "html")
            }
        )
    write_json_atomically(_path(home, "drift_summary", day), {"reports": reports})
    return digest(rounded([{k: v for k, v in r.items() if k != "html"} for r in reports])), reports


def _comparable(config: DriftConfig) -> DriftConfig:
    """Ids are no categories: their drift says that new ones come, which the new-value share says better."""
    ids = {"cat_user_id", "cat_ad_id", "cat_advertiser_id", "cat_campaign_id"}
    return DriftConfig(config.numerical, tuple(c for c in config.categorical if c not in ids), config.embedding)


def _met(home: Home, day: str, role: str) -> pa.Table:
    """Published features, one row an impression, as the day's requests saw them (the cut of the day before)."""
    before = previous_day(day)
    assert before is not None, "a release exists, so there is a day before"
    code_R = home.lake.read("training_frame", day, columns=[f"{role}_code"])[f"{role}_code"].to_numpy()
    features = home.lake.read(f"{role}_features", before)
    return features.take(pa.array(code_R[code_R < features.num_rows]))


def drift_alarms(home: Home, day: str) -> list[str]:
    """Alarms of the day's drift reports."""
    return [alarm for report in _read(_path(home, "drift_summary", day))["reports"] for alarm in report["alarms"]]


@torch.no_grad()
def recall(home: Home, day: str) -> tuple[str, dict[str, Any]]:
    """Score a sample of the logged requests by the full scan and summarise what the service missed."""
    from feature_repo.online import OnlineReader

    pointer, values = pointer_of(home), recipe(home)
    engine = Engine.load(home.artifacts, pointer.version)
    reader = OnlineReader(home.path, engine.schema)
    rows = home.lake.read("request_log", day).slice(0, values.audit_requests).to_pylist()
    requests = [
        Request(reader.read([row["user_id"]], row["timestamp_us"])[0], row["surface"], AUDITED_K, row["timestamp_us"])
        for row in rows
    ]
    exact = [answer for first in range(0, len(requests), 64) for answer in engine.exact(requests[first : first + 64])]
    audited = [
        AuditedRequest(
            row["request_id"], row["user_id"], row["surface"], row["tier"], row["release"], row["ad_ids"], truth.ad_ids,
            row["cost"], row["latency_ms"],
        )
        for row, truth in zip(rows, exact, strict=True)
    ]  # fmt: skip
    found = recall_report(audit_rows(audited), day=day, floor=values.recall_floor, home=home.path)
    report: dict[str, Any] = {
        "slices": [asdict(one) for one in (found.overall, *found.slices)], "breaches": list(found.breaches),
        "floor": found.floor, "html": str(found.html),
    }  # fmt: skip
    write_json_atomically(_path(home, "recall_summary", day), report)
    return digest([pointer.version, [one["recall"] for one in report["slices"]]]), report


def recall_of(home: Home, day: str) -> dict[str, Any]:
    """The day's recall report."""
    return _read(_path(home, "recall_summary", day))


def _path(home: Home, kind: str, day: str) -> Path:
    return home.reports / kind / f"{day}.json"


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report
