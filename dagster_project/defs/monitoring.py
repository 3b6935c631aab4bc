"""Monitoring: what the served release did on a day, what came of it, what drifted, and what it missed."""

from typing import Any

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import FOLLOW
from dagster_project.lib.metadata import chart, numbers, table
from dagster_project.lib.partitions import PREVIOUS_DAY
from dagster_project.lib.resources import Home

CODE = code_version(
    "monitoring", "models/metrics.py", "feature_repo/positives.py", "dagster_project/lib/monitoring_stages.py"
)
COMMON: dict[str, Any] = {"code": CODE, "job": "monitoring"}
SERVED = dg.AssetDep(["serving", "promoted_release"], partition_mapping=PREVIOUS_DAY)
CUT = dg.AssetDep(["features", "online_store"], partition_mapping=PREVIOUS_DAY)
LOG = ["monitoring", "request_log"]


@stage_asset(
    "monitoring", "request_log", deps=[SERVED, CUT, ["features", "training_frame"]], kinds={"bentoml"}, **COMMON
)
def request_log(home: Home, day: str) -> Made:
    """Requests of the day, answered by the promoted release through the real service, as its own log holds them.

    The service runs as a process of its own and follows the release pointer; the log is what it wrote to disk.
    """
    from dagster_project.lib import monitoring_stages

    version, num_requests, report, latencies = monitoring_stages.serve_day(home, day)
    curve = chart("Latency by percentile, ms", {"ms": latencies}, ["p1", "p99"])
    return Made(
        version, {"dagster/row_count": num_requests, **numbers(report), "release": report["release"], "latency": curve}
    )


@stage_check("monitoring", "request_log", "answered")
def answered(home: Home, day: str) -> Verdict:
    """Every request was answered and logged, and the promoted release answered it."""
    from dagster_project.lib import monitoring_stages

    report = monitoring_stages.served(home, day)
    passed = report["errors"] == 0 and report["logged"] == report["requests"] and report["release_source"] == "pointer"
    text = f"{report['requests']} requests, {report['errors']} errors, {report['logged']} logged"
    return Verdict(passed, text, numbers(report))


@stage_asset(
    "monitoring", "outcomes_join", deps=[LOG, ["ingest", "outcomes"]], kinds={"duckdb"}, condition=FOLLOW, **COMMON
)
def outcomes_join(home: Home, day: str) -> Made:
    """Requests joined with the clicks that became known later: recall of clicks by list length and surface."""
    from dagster_project.lib import monitoring_stages

    version, rows, joined = monitoring_stages.join(home, day)
    return Made(version, {"dagster/row_count": joined, "recall of clicks": table(rows)})


@stage_asset(
    "monitoring", "drift_report", deps=[["features", "statistics"], ["features", "training_frame"], SERVED],
    kinds={"evidently"}, condition=FOLLOW, **COMMON,
)  # fmt: skip
def drift_report(home: Home, day: str) -> Made:
    """Features that the day's requests met against those of the last day that the release had learned from."""
    from dagster_project.lib import monitoring_stages

    version, reports = monitoring_stages.drift(home, day)
    metadata: dict[str, Any] = {"drifted": sum(len(r["drifted"]) for r in reports)}
    for report in reports:
        name = report["name"]
        metadata |= numbers({"drifted_share": report["drifted_share"], "rows": report["num_current"]}, f"{name}.")
        metadata[f"{name} scores"] = table(
            [{"column": c, "psi": v} for c, v in sorted(report["scores"].items(), key=_falling)]
        )
        metadata[f"{name} report"] = dg.MetadataValue.path(report["html"])
    return Made(version, metadata)


def _falling(item: tuple[str, float]) -> float:
    return -item[1]


@stage_check("monitoring", "drift_report", "drift", warn=True, blocking=False)
def drift(home: Home, day: str) -> Verdict:
    """No alarm of the drift reports (warns): share of drifted columns, embedding shift, new missing values."""
    from dagster_project.lib import monitoring_stages

    alarms = monitoring_stages.drift_alarms(home, day)
    return Verdict(not alarms, "; ".join(alarms) or "no alarm", {"alarms": len(alarms)})


@stage_asset("monitoring", "recall_report", deps=[LOG, CUT, SERVED], kinds={"evidently"}, condition=FOLLOW, **COMMON)
def recall_report(home: Home, day: str) -> Made:
    """A sample of the logged requests scored again by the full scan: recall with its error, whole and by slice."""
    from dagster_project.lib import monitoring_stages

    version, report = monitoring_stages.recall(home, day)
    overall = report["slices"][0]
    metadata = {
        "dagster/row_count": overall["num_requests"],
        **numbers({"recall_vs_exact": overall["recall"], "standard_error": overall["standard_error"]}),
        "slices": table(report["slices"]),
        "report": dg.MetadataValue.path(report["html"]),
    }
    return Made(version, metadata)


@stage_check("monitoring", "recall_report", "recall_floor")
def recall_floor(home: Home, day: str) -> Verdict:
    """No slice of the audited requests is below the recall floor by more than two standard errors."""
    from dagster_project.lib import monitoring_stages

    report = monitoring_stages.recall_of(home, day)
    overall = report["slices"][0]
    text = f"recall {overall['recall']:.3f} (SE {overall['standard_error']:.3f}), floor {report['floor']}"
    below = ", ".join(report["breaches"])
    return Verdict(not below, f"{text}{'; below it: ' + below if below else ''}", numbers(overall))
