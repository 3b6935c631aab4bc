"""The retrieval model with its learned index, and the index published over the corpus."""

import json

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import NIGHTLY
from dagster_project.lib.metadata import chart, numbers, table
from dagster_project.lib.partitions import EARLIER_DAYS, FACTS, PREVIOUS_DAY, previous_day
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import digest
from models.artifact import write_json_atomically

CODE = code_version(
    "models/batch.py", "models/data.py", "models/index", "models/metrics.py", "dagster_project/lib/recipes.py",
    "dagster_project/lib/index_stages.py", "dagster_project/lib/training.py",
)  # fmt: skip
HELD_OUT_CODE = code_version("dagster_project/lib/control_stages.py", "models/index/audit.py")
EXPLAIN_CODE = code_version("dagster_project/lib/explain_stages.py", "models/index/explain.py")
ORDER_CODE = code_version(
    "dagster_project/lib/order_stages.py", "feature_repo/adapters", "feature_repo/transforms", "models/index"
)
EARLIER = [dg.AssetDep(["features", name], partition_mapping=EARLIER_DAYS) for name in ("training_frame", "statistics")]


@stage_asset(
    "index", "retrieval_model",
    deps=[*EARLIER, ["features", "event_log"], ["features", "catalogue"], ["gem", "foundation_model"]],
    kinds={"pytorch", "safetensors"}, code=CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def retrieval_model(home: Home, as_of: str) -> Made:
    """MoNN and the index under one loss: towers, per-level scorers and codebooks, on the newest days as of a day.

    GEM's logits on unlabelled pairs teach what impressions never show: ads that were not chosen. Positives-only sources
    learn that from ads drawn uniformly, and take nothing from GEM: its logits lost recall there.
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
    num_levels = len(audit["level_sizes"])
    curve = index_stages.frontier(audit["sweep"], num_levels)
    plain = {name: value for name, value in audit.items() if isinstance(value, (int, float))}
    metadata = {
        **numbers(plain),
        "dagster/row_count": audit["num_ads"],
        "levels": table([{"level": n, **level} for n, level in enumerate(audit["health"]["levels"], 1)]),
        "tiers": table(
            [{"tier": name, "beams": index_stages.in_words(b, num_levels)} for name, b in audit["tiers"].items()]
        ),
        "recall by cost": table(curve),
        "recall curve": chart("Recall of the exact answer, cheap to dear", {"recall": [p["coverage"] for p in curve]}),
        "slices": table([{"slice": name, **row} for name, row in audit["report"]["slices"].items()]),
    }
    return Made(version, metadata)


@stage_asset(
    "index", "explanation",
    deps=[["index", "hierarchical_index"], ["index", "retrieval_model"], ["features", "training_frame"]],
    kinds={"pytorch"}, code=EXPLAIN_CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def explanation(home: Home, as_of: str) -> Made:
    """What the tree means: purity of its nodes beside a random tree's, and the nodes that some requests visited."""
    from dagster_project.lib import explain_stages

    path, levels = explain_stages.explain(home, as_of)
    rows = table(explain_stages.purity_rows(levels))
    return Made(digest(levels), {"page": dg.MetadataValue.path(str(path)), "purity": rows})


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


@stage_asset(
    "index", "held_out_audit",
    deps=[
        dg.AssetDep(["index", "hierarchical_index"], partition_mapping=PREVIOUS_DAY),
        dg.AssetDep(["index", "retrieval_model"], partition_mapping=PREVIOUS_DAY),
        ["features", "training_frame"], ["features", "event_log"],
        dg.AssetDep(["features", "statistics"], partition_mapping=PREVIOUS_DAY),
        *([["ingest", "oracle"]] if FACTS.has_oracle else []),
    ],
    kinds={"pytorch"}, code=HELD_OUT_CODE, job="held_out",
)  # fmt: skip
def held_out_audit(home: Home, day: str) -> Made:
    """Yesterday's index on a day it has not seen, and its scorer against the same scorer trained without an index."""
    from dagster_project.lib import control_stages

    as_of = previous_day(day)
    assert as_of is not None, "the runner asks for the last day only"
    report = control_stages.judge(home, day, as_of)
    write_json_atomically(home.reports / "index" / f"{day}.json", report)
    found = {name: value for name, value in report.items() if name != "control_seconds"}
    return Made(digest(found), numbers(report))


if FACTS.shuffled_control:

    @stage_asset(
        "index", "order_control", deps=[dg.AssetDep(["index", "hierarchical_index"], partition_mapping=PREVIOUS_DAY)],
        kinds={"pytorch"}, code=ORDER_CODE, job="held_out",
    )  # fmt: skip
    def order_control(home: Home, day: str) -> Made:
        """The same model on the same log with the events of a day shuffled: what the stored order gave away.

        Sources whose times are whole days only. Features are built again in a lake of their own.
        """
        from dagster_project.lib import order_stages

        as_of = previous_day(day)
        assert as_of is not None, "the runner asks for the last day only"
        report = order_stages.judge_reordered(home, day, as_of)
        return Made(digest(report), numbers(report))


@stage_check("index", "held_out_audit", "scorer_keeps_its_worth", warn=True, blocking=False)
def scorer_keeps_its_worth(home: Home, day: str) -> Verdict:
    """The joint scorer's one-sided 95 % bound is within 2 % of the scorer without index loss; warns."""
    report = json.loads((home.reports / "index" / f"{day}.json").read_text())
    return Verdict(report["passed"], f"{report['measure']}: {report['reason']}", numbers({"ratio": report["ratio"]}))
