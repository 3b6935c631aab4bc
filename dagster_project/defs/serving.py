"""Serving: a Bento of the candidate, a shadow comparison with what serves now, and promotion in an asset of its own."""

from datetime import timedelta

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.metadata import numbers, table
from dagster_project.lib.resources import Home

WARN_WINDOW, FAIL_WINDOW = timedelta(hours=30), timedelta(hours=54)
"""A release is expected every night; a missed night warns, a second one fails."""
BENTO_CODE = code_version("bentos", "bentos/retrieval", "models/index", "models/batch.py", "feature_repo/online.py")
CODE = code_version("bentos/retrieval", "dagster_project/lib/serving_stages.py", "models/release.py")


@stage_asset(
    "serving", "retrieval_bento",
    deps=[["tuning", "tuned_release"], ["features", "online_store"]],
    kinds={"bentoml"}, code=BENTO_CODE, job="release",
)  # fmt: skip
def retrieval_bento(home: Home, as_of: str) -> Made:
    """The candidate packed as a Bento: code, requirements, and the release itself as fallback."""
    from dagster_project.lib import serving_stages

    built = serving_stages.build(home, as_of)
    metadata = {"tag": built.tag, "release": built.release, "path": dg.MetadataValue.path(str(built.path))}
    return Made(built.tag, {**metadata, **numbers({"bytes": built.num_bytes, "build_s": built.build_s})})


@stage_check("serving", "retrieval_bento", "smoke")
def smoke(home: Home, as_of: str) -> Verdict:
    """The Bento is served by a process of its own and answers real requests exactly as the engine does."""
    from dagster_project.lib import serving_stages

    report = serving_stages.smoke(home, as_of)
    passed = report["errors"] == 0 and report["mismatches"] == 0 and report["exit_code"] in (0, -15)
    text = f"{report['num_requests']} requests, {report['errors']} errors, {report['mismatches']} mismatches"
    return Verdict(passed, f"{text}. {report['first_problem'] or ''}".strip(), numbers(report))


@stage_asset(
    "serving", "shadow_report",
    deps=[["serving", "retrieval_bento"], ["features", "training_frame"], ["features", "online_store"]],
    kinds={"pytorch"}, code=CODE, job="release",
)  # fmt: skip
def shadow_report(home: Home, as_of: str) -> Made:
    """Candidate and serving release answer the same requests; the candidate's answers go nowhere.

    Compared by the oracle's expected clicks or by recall of clicks, with a non-inferiority test clustered by user.
    """
    from dagster_project.lib import serving_stages

    version, report = serving_stages.shadow(home, as_of)
    return Made(version, {**numbers(report), "verdict": report["reason"], "releases": table(report["rows"])})


@stage_check("serving", "shadow_report", "not_worse_than_serving")
def not_worse_than_serving(home: Home, as_of: str) -> Verdict:
    """The candidate is not worse than the release that serves now by more than the margin, at the 95 % bound."""
    from dagster_project.lib import serving_stages

    report = serving_stages.shadow_of(home, as_of)
    return Verdict(report["passed"], report["reason"], numbers(report))


@stage_asset(
    "serving", "promoted_release",
    deps=[["serving", "shadow_report"], ["serving", "retrieval_bento"], ["tuning", "tuned_release"]],
    kinds={"json"}, code=CODE, job="release",
    freshness=dg.FreshnessPolicy.time_window(fail_window=FAIL_WINDOW, warn_window=WARN_WINDOW),
)  # fmt: skip
def promoted_release(home: Home, as_of: str) -> Made:
    """The release pointer, moved to the candidate after its audit was read again; a bad audit moves nothing."""
    from dagster_project.lib import serving_stages

    pointer, audit = serving_stages.promote_candidate(home, as_of)
    metadata = {"release": pointer.version, "previous": pointer.previous or "none", "audit": table(audit)}
    return Made(pointer.version, metadata)
