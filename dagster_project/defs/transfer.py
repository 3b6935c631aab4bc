"""Knowledge transfer: teacher labels, the domain model, one student a vertical."""

from typing import Any

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import NIGHTLY
from dagster_project.lib.metadata import numbers, table
from dagster_project.lib.partitions import (
    DAYS_BY_VERTICAL,
    EARLIER_DAYS,
    FACTS,
    NO_RATES,
    PREVIOUS_DAY,
    SAME_AS_OF,
    previous_day,
)
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import digest

CODE = code_version(
    "models/batch.py", "models/data.py", "models/transfer", "models/training", "dagster_project/lib/recipes.py",
    "dagster_project/lib/transfer_stages.py",
)  # fmt: skip
LABELS = "transfer/teacher_labels"
FRAMES = [
    dg.AssetDep([*key], partition_mapping=EARLIER_DAYS)
    for key in (("features", "training_frame"), ("features", "statistics"), ("transfer", "teacher_labels"))
]


@stage_asset(
    "transfer", "teacher_labels",
    deps=[
        dg.AssetDep(["gem", "foundation_model"], partition_mapping=PREVIOUS_DAY),
        ["features", "training_frame"], ["features", "event_log"],
    ],
    kinds={"pytorch", "safetensors"}, code=CODE, job="daily", condition=NIGHTLY,
)  # fmt: skip
def teacher_labels(home: Home, day: str) -> Made:
    """Logits of the day's training sample by the GEM that had not seen the day yet, made once."""
    before = previous_day(day)
    if before is None:
        home.forget(LABELS, day)
        return Made(digest(["no teacher", day]), {"dagster/row_count": 0, "note": "no teacher before the first day"})
    from dagster_project.lib import transfer_stages

    return transfer_stages.label(home, day, before, CODE)


@stage_asset(
    "transfer", "domain_model",
    deps=[*FRAMES, ["features", "event_log"], ["features", "catalogue"]],
    kinds={"pytorch", "safetensors"}, code=CODE, job="transfer", condition=NIGHTLY,
)  # fmt: skip
def domain_model(home: Home, as_of: str) -> Made:
    """The student of all surfaces as of a day, taught by GEM through a head of its own (ExFM).

    Judged on the last day before it learns from it.
    """
    from dagster_project.lib import transfer_stages

    made, report = transfer_stages.train_domain(home, as_of, CODE)
    return Made(made, {**numbers(report)})


@stage_check("transfer", "domain_model", "calibration")
def domain_calibration(home: Home, as_of: str) -> Verdict:
    """Predicted clicks over clicks on the last day lie within 0.7..1.4 or within three standard errors of 1."""
    values: dict[str, Any] = home.artifact("transfer/domain_model", as_of).manifest.metrics
    ratio, error = values["calibration"], values["calibration_error"]
    if FACTS.positives_only:
        text = f"predicted / drawn positives {ratio:.3f}; {NO_RATES}"
        return Verdict(True, text, numbers({"ratio": ratio, "standard_error": error}))
    passed = 0.7 <= ratio <= 1.4 or abs(ratio - 1.0) <= 3.0 * error
    return Verdict(
        passed,
        f"predicted / observed clicks {ratio:.3f} (SE {error:.3f})",
        numbers({"ratio": ratio, "standard_error": error}),
    )


@stage_asset(
    "transfer", "vertical_model",
    deps=[
        dg.AssetDep(["transfer", "domain_model"], partition_mapping=SAME_AS_OF),
        dg.AssetDep(["transfer", "teacher_labels"], partition_mapping=SAME_AS_OF),
        dg.AssetDep(["features", "training_frame"], partition_mapping=SAME_AS_OF),
    ],
    kinds={"pytorch", "safetensors"}, code=CODE, job="verticals", partitions=DAYS_BY_VERTICAL,
)  # fmt: skip
def vertical_model(home: Home, partition: str) -> Made:
    """The student of one vertical: starts from the domain model, learns from its own surface's newest days.

    Compared with an untaught student of the same size on the last day: metrics, paired difference, its interval.
    """
    from dagster_project.lib import transfer_stages

    made, rows = transfer_stages.train_vertical(home, partition, CODE)
    taught = rows[-1]
    return Made(made, {**numbers(taught), "techniques": table(rows)})


@stage_check(
    "transfer", "vertical_model", "not_worse_than_untaught", warn=True, blocking=False, partitions=DAYS_BY_VERTICAL
)
def not_worse_than_untaught(home: Home, partition: str) -> Verdict:
    """The taught student's normalised entropy is not above the untaught one's, beyond the interval's width (warns)."""
    values: dict[str, Any] = home.artifact("transfer/vertical_model", partition).manifest.metrics
    low, high = values["ne_difference_low"], values["ne_difference_high"]
    text = f"NE difference {values['ne_difference']:+.4f} in {low:+.4f}..{high:+.4f}"
    return Verdict(low <= 0.0, text, numbers(values))
