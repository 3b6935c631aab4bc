"""The retrieval model with its learned index, and the index published over the corpus."""

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import NIGHTLY
from dagster_project.lib.metadata import chart, numbers, table
from dagster_project.lib.partitions import EARLIER_DAYS
from dagster_project.lib.resources import Home

CODE = code_version(
    "models/batch.py", "models/data.py", "models/index", "models/metrics.py", "dagster_project/lib/recipes.py",
    "dagster_project/lib/index_stages.py", "dagster_project/lib/training.py",
)  # fmt: skip
EARLIER = [dg.AssetDep(["features", name], partition_mapping=EARLIER_DAYS) for name in ("training_frame", "statistics")]


@stage_asset(
    "index", "retrieval_model",
    deps=[*EARLIER, ["features", "event_log"], ["features", "catalogue"], ["gem", "foundation_model"]],
    kinds={"pytorch", "safetensors"}, code=CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def retrieval_model(home: Home, as_of: str) -> Made:
    """MoNN and the index under one loss: towers, per-level scorers and codebooks, on the newest days as of a day.

    GEM's logits on unlabelled pairs teach what impressions never show: ads that were not chosen.
    """
    from dagster_project.lib import index_stages

    version, report = index_stages.train(home, as_of, CODE)
    curve = chart("Published leaves at every snapshot", {"leaves": report.used_leaves}, ["first", "last"])
    metadata = numbers({"steps": report.num_steps, "rows": report.num_rows, "loss": report.losses})
    return Made(version, {**metadata, "dagster/row_count": report.num_rows, "leaves": curve})


@stage_asset(
    "index", "hierarchical_index",
    deps=[["index", "retrieval_model"], ["features", "statistics"], ["features", "catalogue"]],
    kinds={"pytorch", "safetensors"}, code=CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def hierarchical_index(home: Home, as_of: str) -> Made:
    """Every live ad's path through the learned levels, with the audit: exact, index against exact, cost, by tier."""
    from dagster_project.lib import index_stages

    version, audit = index_stages.publish_index(home, as_of, CODE)
    curve = index_stages.frontier(audit["sweep"])
    plain = {name: value for name, value in audit.items() if isinstance(value, (int, float))}
    metadata = {
        **numbers(plain),
        "dagster/row_count": audit["num_ads"],
        "levels": table([{"level": n, **level} for n, level in enumerate(audit["health"]["levels"], 1)]),
        "tiers": table([{"tier": name, "beams": "x".join(map(str, b))} for name, b in audit["tiers"].items()]),
        "recall by cost": table(curve),
        "recall curve": chart("Recall of the exact answer, cheap to dear", {"recall": [p["coverage"] for p in curve]}),
        "slices": table([{"slice": name, **row} for name, row in audit["report"]["slices"].items()]),
    }
    return Made(version, metadata)


@stage_check("index", "hierarchical_index", "health")
def health(home: Home, as_of: str) -> Verdict:
    """The index has not collapsed: its nodes are used about evenly, and soft assignments mean what hard ones do."""
    from dagster_project.lib import index_stages

    problems = index_stages.stored_audit(home, as_of)["problems"]
    return Verdict(not problems, "; ".join(problems) or "no collapse", {"problems": len(problems)})


@stage_check("index", "hierarchical_index", "recall_against_exact")
def recall_against_exact(home: Home, as_of: str) -> Verdict:
    """The default tier finds at least the floor of what the full scan finds, beyond two standard errors."""
    from dagster_project.lib import index_stages

    found = index_stages.stored_audit(home, as_of)
    recall, error, floor = found["recall_vs_exact"], found["recall_error"], found["floor"]
    text = f"recall against exact {recall:.3f} (SE {error:.3f}), floor {floor}"
    return Verdict(
        recall + 2 * error >= floor, text, numbers({"recall": recall, "standard_error": error, "floor": floor})
    )
