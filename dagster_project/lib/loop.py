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

INTERVAL, PAIR = "{:.4f} ({:.4f} .. {:.4f})", "{:.4f} / {:.4f}"


@dataclass(frozen=True)
class Row:
    """One line of the results table: which numbers of which node, and how they are written."""

    label: str
    key: str
    partition: str
    names: tuple[str, ...]
    form: str = ""
    """Format of the numbers together; a single number without a form stays a number."""


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
    gem, index, held_out = "gem/evaluation", "index/hierarchical_index", "index/held_out_audit"
    log, served = "monitoring/request_log", "monitoring/recall_report"
    ratio, bound = "ratio.estimate", "ratio.low"
    source = "engagements" if facts.positives_only else "impressions"
    drawn = ", drawn negatives" if facts.positives_only else ""
    return [
        Row(f"{source} of the last day", f"ingest/{source}", last_day, ("dagster/row_count",)),
        Row(f"foundation model, NE{drawn}", gem, last_day, ("ne",)),
        Row("  logistic regression on the same rows", gem, last_day, ("baseline_ne",)),
        Row("  by true click rates", gem, last_day, ("oracle_ne",)),
        Row("  of the true click rates themselves", gem, last_day, ("oracle_floor",)),
        Row("  minus logistic regression (95 %)", gem, last_day, names_of("difference"), INTERVAL),
        Row(f"foundation model, AUC{drawn}", gem, last_day, ("auc",)),
        *_official_split(facts),
        Row("domain model, AUC", "transfer/domain_model", release_day, ("auc",)),
        *(_vertical(name, release_day) for name in facts.verticals),
        Row("index, recall@10 against exact", index, release_day, ("recall_vs_exact",)),
        Row("  share of the full scan's cost", index, release_day, ("cost_share",)),
        Row("next day, recall@10 against exact", held_out, last_day, names_of("coverage"), INTERVAL),
        Row("  share of the full scan's cost, next day", held_out, last_day, ("cost",)),
        Row("  scorer over one without index (95 % bound)", held_out, last_day, (ratio, bound), "{:.4f} (> {:.4f})"),
        *_last_items(facts),
        Row("shadow, worth of the candidate", "serving/shadow_report", release_day, ("recall",)),
        Row("served requests", log, last_day, ("dagster/row_count",)),
        Row("  latency p50 / p99, ms", log, last_day, ("p50_ms", "p99_ms"), "{:.1f} / {:.1f}"),
        Row("  recall against exact", served, last_day, ("recall_vs_exact",)),
        Row("drifted features", "monitoring/drift_report", last_day, ("drifted",)),
    ]


def names_of(interval: str) -> tuple[str, str, str]:
    """Metadata names of an interval's estimate and bounds."""
    return (f"{interval}.estimate", f"{interval}.low", f"{interval}.high")


def _last_items(facts: SourceFacts) -> list[Row]:
    if not facts.positives_only:
        return []
    held_out, shuffled, day = "index/held_out_audit", "index/order_control", facts.days[-1]
    return [
        Row("last positives", held_out, day, ("positives.requests",)),
        Row("  exact Recall@10", held_out, day, ("positives.exact",)),
        Row("  Recall@10 of the index", held_out, day, ("positives.index",)),
        Row("  exact, order of a day shuffled", shuffled, day, ("exact",)),
        Row("  index, order of a day shuffled", shuffled, day, ("index",)),
    ]


def _vertical(name: str, as_of: str) -> Row:
    partition = str(MultiPartitionKey({"as_of": as_of, "vertical": name}))
    names = ("ne_difference", "ne_difference_low", "ne_difference_high")
    return Row(f"  vertical {name}, NE minus untaught (95 %)", "transfer/vertical_model", partition, names, INTERVAL)


def _official_split(facts: SourceFacts) -> list[Row]:
    if facts.evaluation_cut >= facts.days[-2]:
        return []
    key, day = "gem/frozen_evaluation", facts.days[-1]
    both = [Row("official test days, AUC with daily / frozen statistics", key, day, ("auc.daily", "auc.frozen"), PAIR)]
    for surface in facts.surfaces:
        names = (f"{surface}.auc.daily", f"{surface}.gauc.daily", f"{surface}.rows")
        both.append(Row(f"  {surface}, AUC / GAUC", key, day, names, PAIR + " of {:,.0f} rows"))
    return both


def results(runner: Runner, facts: SourceFacts) -> dict[str, float | int | str]:
    """Label -> value, from the latest materialisations."""
    found: dict[str, float | int | str] = {}
    for row in result_rows(facts):
        metadata = latest_metadata(runner, row.key, row.partition)
        if all(name in metadata for name in row.names):
            values = [metadata[name] for name in row.names]
            found[row.label] = row.form.format(*values) if row.form else values[0]
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
        "results": list(results(runner, facts).items()),
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "job": step.job,
        "partition": step.partition,
        "wall_s": step.wall_s,
        "work_s": round(sum(step.work_s.values()), 3),
        "made": step.made,
    }
