"""GEM: the foundation model, refreshed daily, and its judgement on the day that it had not seen."""

from typing import Any

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import NIGHTLY
from dagster_project.lib.metadata import chart, numbers, table
from dagster_project.lib.partitions import EARLIER_DAYS, FACTS, NO_RATES, PREVIOUS_DAY, previous_day
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import digest

CODE = code_version(
    "models/batch.py", "models/data.py", "models/gem", "models/training", "dagster_project/lib/recipes.py"
)
EVALUATION_CODE = code_version(
    "models/metrics.py",
    "models/training/loop.py",
    "dagster_project/defs/gem.py",
    "dagster_project/lib/frozen_stages.py",
)

LEARNED_EXAMPLES = 50_000
"""Examples of training before the foundation model must not be worse than logistic regression."""
FEATURES = [
    ["features", "training_frame"],
    ["features", "event_log"],
    ["features", "catalogue"],
    dg.AssetDep(["features", "statistics"], partition_mapping=PREVIOUS_DAY),
]


@stage_asset(
    "gem", "foundation_model",
    deps=[*FEATURES, dg.AssetDep(["gem", "foundation_model"], partition_mapping=PREVIOUS_DAY)],
    kinds={"pytorch", "safetensors"}, code=CODE, job="daily", condition=NIGHTLY,
)  # fmt: skip
def foundation_model(home: Home, day: str) -> Made:
    """GEM after learning from the day: Wukong over features, InterFormer over pyramid sequences, heads per surface.

    Warm start from the day before, one pass over the day's sample; a killed training goes on from its checkpoint.
    Logistic regression is trained beside it on the same rows: the floor that the evaluation compares with.
    """
    from dagster_project.lib import gem_stages

    return gem_stages.train(home, day, previous_day(day), CODE)


@stage_asset(
    "gem", "evaluation",
    deps=[
        dg.AssetDep(["gem", "foundation_model"], partition_mapping=PREVIOUS_DAY), *FEATURES,
        *([["ingest", "oracle"]] if FACTS.has_oracle else []),
    ],
    kinds={"pytorch"}, code=EVALUATION_CODE, job="daily", condition=NIGHTLY,
)  # fmt: skip
def evaluation(home: Home, day: str) -> Made:
    """Yesterday's GEM on today's impressions, before it learns from them: normalised entropy, AUC, calibration.

    By surface, against logistic regression, and on the simulator against the oracle's expected clicks. Positives-only
    sources are judged against ads drawn uniformly (`num_negatives` for each positive): their NE is of that sample.
    """
    from dagster_project.lib import gem_stages

    before = previous_day(day)
    report = gem_stages.judge(home, day, before) if before else {"note": "the first day has no model to judge"}
    gem_stages.write_report(home, day, report)
    metadata: dict[str, Any] = {**numbers({k: v for k, v in report.items() if k != "by_surface"})}
    if "by_surface" in report:
        metadata["by surface"] = table(report["by_surface"])  # type: ignore[arg-type]
        history = gem_stages.read_reports(home, FACTS.days, day)
        series = {name: [float(r[name]) for r in history] for name in ("ne", "baseline_ne")}
        metadata["normalised entropy"] = chart("Normalised entropy by day", series, [r["day"] for r in history])
    return Made(digest(report), metadata)


@stage_asset(
    "gem", "frozen_evaluation",
    deps=[
        dg.AssetDep(["gem", "foundation_model"], partition_mapping=EARLIER_DAYS),
        dg.AssetDep(["features", "training_frame"], partition_mapping=EARLIER_DAYS),
        dg.AssetDep(["features", "statistics"], partition_mapping=EARLIER_DAYS),
    ],
    kinds={"pytorch"}, code=EVALUATION_CODE, job="frozen",
)  # fmt: skip
def frozen_evaluation(home: Home, day: str) -> Made:
    """GEM as of the source's evaluation cut on all test days up to the last one: the protocol of an official split.

    Weights learn from training days only; statistics as published daily, and frozen at the cut. By surface.
    """
    from dagster_project.lib import frozen_stages

    report = frozen_stages.judge_frozen(home)
    rows = report.pop("rows")
    by_surface = numbers({row["slice"]: row for row in rows if row["slice"] != "all"})
    return Made(digest(rows), {**numbers(report), **by_surface, "by surface": table(rows)})


@stage_check("gem", "evaluation", "not_worse_than_logistic_regression")
def not_worse_than_logistic_regression(home: Home, day: str) -> Verdict:
    """Once GEM has seen 50,000 examples, its normalised entropy is not above logistic regression's, given the error."""
    from dagster_project.lib import gem_stages

    report = gem_stages.read_report(home, day)
    if "difference" not in report:
        return Verdict(True, "nothing to compare: the first day, or one without rows")
    difference = report["difference"]
    learning = report["examples"] < LEARNED_EXAMPLES
    text = f"NE difference {difference['estimate']:+.4f} (SE {difference['standard_error']:.4f})"
    if learning:
        text += f", not enforced before {LEARNED_EXAMPLES:,} examples, {report['examples']:,} seen"
    return Verdict(difference["low"] <= 0.0 or learning, text, numbers({**difference, "learning": float(learning)}))


@stage_check("gem", "evaluation", "calibration")
def calibration(home: Home, day: str) -> Verdict:
    """Predicted clicks over clicks lie within 0.8..1.25, or within three standard errors of 1."""
    from dagster_project.lib import gem_stages

    report = gem_stages.read_report(home, day)
    if "calibration" not in report:
        return Verdict(True, "nothing to compare: the first day, or one without rows")
    ratio, error = report["calibration"], report["calibration_error"]
    if FACTS.positives_only:
        text = f"predicted / drawn positives {ratio:.3f}; {NO_RATES}"
        return Verdict(True, text, numbers({"ratio": ratio, "standard_error": error}))
    learning = report["examples"] < LEARNED_EXAMPLES
    passed = 0.8 <= ratio <= 1.25 or abs(ratio - 1.0) <= 3.0 * error or learning
    return Verdict(
        passed,
        f"predicted / observed clicks {ratio:.3f} (SE {error:.3f})",
        numbers({"ratio": ratio, "standard_error": error}),
    )
