"""Test-time tuning: node data from recent traffic, and a release that keeps the tuned weights only if they earn it."""

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import NIGHTLY
from dagster_project.lib.metadata import numbers, table
from dagster_project.lib.resources import Home

CODE = code_version(
    "models/index", "models/tuning", "bentos/retrieval/release.py", "dagster_project/lib/recipes.py",
    "dagster_project/lib/tuning_stages.py",
)  # fmt: skip
INDEX = [["index", "retrieval_model"], ["index", "hierarchical_index"]]


@stage_asset(
    "tuning", "node_data",
    deps=[*INDEX, ["features", "training_frame"], ["features", "event_log"]],
    kinds={"pytorch", "parquet"}, code=CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def node_data(home: Home, as_of: str) -> Made:
    """Nodes on the best beam paths of the day's earlier requests: a small pseudo-labelled set of (user, node) pairs.

    Purity is the share of pairs whose node holds a click of the day's later part; coverage the share of those clicks.
    """
    from dagster_project.lib import tuning_stages

    version, num_pairs, quality = tuning_stages.collect(home, as_of, CODE)
    deepest = quality[-1] if quality else {}
    return Made(version, {"dagster/row_count": num_pairs, **numbers(deepest), "quality": table(quality)})


@stage_asset(
    "tuning", "tuned_release",
    deps=[["tuning", "node_data"], *INDEX, ["features", "training_frame"], ["features", "statistics"]],
    kinds={"pytorch", "safetensors"}, code=CODE, job="release", condition=NIGHTLY,
)  # fmt: skip
def tuned_release(home: Home, as_of: str) -> Made:
    """The candidate release: tuned node scorers where an untouched later slice says they are better, else untuned.

    Beside the tuned model stand its controls: the same steps on random pairs and on recent clicks.
    """
    from dagster_project.lib import tuning_stages

    version, report = tuning_stages.make_candidate(home, as_of, CODE)
    metadata = {"kept": int(report["kept"]), "reason": report["reason"], **numbers(report["gain"], "gain.")}
    return Made(version, {**metadata, "release": version, "controls": table(report["rows"])})


@stage_check("tuning", "tuned_release", "not_worse_than_untuned")
def not_worse_than_untuned(home: Home, as_of: str) -> Verdict:
    """The candidate carries tuned weights only if the later slice could see the effect and found no loss."""
    from dagster_project.lib import tuning_stages

    report = tuning_stages.tuning_report(home, as_of)
    passed = not report["kept"] or report["gain"]["low"] > -report["margin"]
    return Verdict(passed, report["reason"], numbers(report["gain"]))
