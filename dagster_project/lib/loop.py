"""The loop that `make run` runs, and the summary it leaves in `<home>/reports/run.json`."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dagster import AssetKey, MultiPartitionKey

from dagster_project.lib.assets import peak_rss_mb
from dagster_project.lib.runner import Runner, Step
from feature_repo.tables import SourceFacts


@dataclass(frozen=True)
class Row:
    """One line of the results table: which number of which asset, and what it says."""

    label: str
    key: str
    partition: str
    metadata: str


def run_loop(runner: Runner, facts: SourceFacts) -> None:
    """Ingest all days, learn day by day, release as of the day before the last, serve and watch the last day.

    The foundation model never learns from the last day: everything is judged on it.
    """
    days = facts.days
    release_day, last_day = days[-2], days[-1]
    runner.run_days("ingest", days, runner.keys("ingest"))
    for day in days:
        held_out = ["gem/foundation_model"] if day == last_day else []
        runner.run("daily", day, runner.keys("daily", without=held_out))
    if facts.evaluation_cut < release_day:
        runner.run("frozen", last_day, runner.keys("frozen"))
    runner.run("transfer", release_day, runner.keys("transfer"))
    for vertical in facts.verticals:
        key = str(MultiPartitionKey({"as_of": release_day, "vertical": vertical}))
        runner.run("verticals", key, runner.keys("verticals"))
    runner.run("release", release_day, runner.keys("release"))
    runner.run("held_out", last_day, runner.keys("held_out"))
    runner.run("monitoring", last_day, runner.keys("monitoring"))


def result_rows(facts: SourceFacts) -> list[Row]:
    """What the results table shows; numbers that an asset did not record are left out."""
    release_day, last_day = facts.days[-2], facts.days[-1]
    source = "engagements" if facts.positives_only else "impressions"
    rows = [
        (f"{source} of the last day", f"ingest/{source}", last_day, "dagster/row_count"),
        ("foundation model, normalised entropy", "gem/evaluation", last_day, "ne"),
        ("  logistic regression on the same rows", "gem/evaluation", last_day, "baseline_ne"),
        ("foundation model, AUC", "gem/evaluation", last_day, "auc"),
        ("domain model, normalised entropy", "transfer/domain_model", release_day, "ne"),
        ("index, recall against exact", "index/hierarchical_index", release_day, "recall_vs_exact"),
        ("index, share of the full scan's cost", "index/hierarchical_index", release_day, "cost_share"),
        ("shadow, recall of the candidate", "serving/shadow_report", release_day, "recall"),
        ("served requests", "monitoring/request_log", last_day, "dagster/row_count"),
        ("served latency, p50 ms", "monitoring/request_log", last_day, "p50_ms"),
        ("served latency, p99 ms", "monitoring/request_log", last_day, "p99_ms"),
        ("served recall against exact", "monitoring/recall_report", last_day, "recall_vs_exact"),
        ("drifted features", "monitoring/drift_report", last_day, "drifted"),
    ]
    if facts.positives_only:
        rows[1:5] = [(f"{row[0]} (drawn negatives)", *row[1:]) for row in rows[1:5]]
        rows += [
            ("positives of the last partition", "index/held_out_audit", last_day, "positives.requests"),
            ("  exact Recall@10", "index/held_out_audit", last_day, "positives.exact"),
            ("  Recall@10 of the index", "index/held_out_audit", last_day, "positives.index"),
            ("  exact, order of a day shuffled", "index/order_control", last_day, "exact"),
            ("  index, order of a day shuffled", "index/order_control", last_day, "index"),
        ]
    return [Row(*row) for row in rows]


def results(runner: Runner, facts: SourceFacts) -> dict[str, float | int | str]:
    """Label -> value, from the latest materialisations."""
    found: dict[str, float | int | str] = {}
    for row in result_rows(facts):
        value = latest_metadata(runner, row.key, row.partition).get(row.metadata)
        if value is not None:
            found[row.label] = value
    return found


def latest_metadata(runner: Runner, key: str, partition: str) -> dict[str, Any]:
    """Plain values of the metadata that the latest materialisation of a node recorded."""
    from dagster import AssetRecordsFilter

    wanted = AssetRecordsFilter(asset_key=AssetKey.from_user_string(key), asset_partitions=[partition])
    records = runner.instance.fetch_materializations(wanted, limit=1).records
    if not records or records[0].asset_materialization is None:
        return {}
    return {name: value.value for name, value in records[0].asset_materialization.metadata.items()}


def summary(runner: Runner, facts: SourceFacts, wall_s: float, started: float) -> dict[str, Any]:
    """What `reports/run.json` holds: times by stage, the share that is orchestration, memory, what was made and why."""
    stages: dict[str, float] = defaultdict(float)
    for step in runner.steps:
        for name, seconds in step.work_s.items():
            stages[name.partition(":")[0]] += seconds
    work = sum(stages.values())
    return {
        "source": facts.name,
        "preset": runner.home.preset,
        "seed": runner.home.seed,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "wall_s": round(wall_s, 2),
        "work_s": round(work, 2),
        "stage_s": {name: round(seconds, 2) for name, seconds in sorted(stages.items())},
        "orchestration_share": round(1 - work / wall_s, 4) if work else None,
        "peak_rss_mb": peak_rss_mb(),
        "made": sum(len(step.made) for step in runner.steps),
        "skipped": sum(step.skipped for step in runner.steps),
        "steps": [_step(step) for step in runner.steps if step.made],
        "results": results(runner, facts),
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "job": step.job,
        "partition": step.partition,
        "wall_s": step.wall_s,
        "work_s": round(sum(step.work_s.values()), 3),
        "made": step.made,
    }
