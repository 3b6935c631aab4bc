"""Features: the catalogue, the event log, published statistics, the training frame, the online store."""

from dataclasses import asdict

import dagster as dg

from dagster_project.lib.assets import Made, Verdict, stage_asset, stage_check
from dagster_project.lib.code import code_version
from dagster_project.lib.conditions import FOLLOW
from dagster_project.lib.metadata import numbers
from dagster_project.lib.partitions import ATTRIBUTION_DAYS, PREVIOUS_DAY
from dagster_project.lib.resources import Home
from dagster_project.lib.stages import from_lake
from dagster_project.lib.staleness import digest
from feature_repo.audit import audit_leaks

CODE = code_version("feature_repo/transforms", *(f"feature_repo/{name}.py" for name in (
    "catalogue", "columns", "days", "event_log", "feature_schema", "features", "frame", "lake", "positives", "sql",
    "statistics", "tables",
)))  # fmt: skip
STORE_CODE = code_version(*(f"feature_repo/{name}.py" for name in ("definitions", "history_bytes", "online", "store")))
SHOWN = dg.AssetDep(["ingest", "impressions"], partition_mapping=ATTRIBUTION_DAYS)
"""Outcomes of a day belong to impressions of the same or of earlier days."""


def _yesterday(name: str) -> dg.AssetDep:
    return dg.AssetDep(["features", name], partition_mapping=PREVIOUS_DAY)


def _ingested(*tables: str) -> list[list[str]]:
    return [["ingest", table] for table in tables]


@stage_asset(
    "features", "catalogue",
    deps=[*_ingested("ads", "users", "impressions", "engagements"), _yesterday("catalogue")],
    kinds={"duckdb", "parquet"}, code=CODE, job="daily", condition=FOLLOW,
)  # fmt: skip
def catalogue(home: Home, day: str) -> Made:
    """All ads and users known by the end of the day. Codes are append-only: a code means the same thing every day."""
    from feature_repo.features import build_catalogue

    return from_lake(build_catalogue(home.lake, home.facts(), day))


@stage_asset(
    "features", "event_log",
    deps=[["features", "catalogue"], SHOWN, *_ingested("engagements", "outcomes"), _yesterday("event_log")],
    kinds={"duckdb", "parquet"}, code=CODE, job="daily", condition=FOLLOW,
)  # fmt: skip
def event_log(home: Home, day: str) -> Made:
    """The day's events, each stored once, by user and availability: the first n are what was known at some time."""
    from feature_repo.features import build_event_log

    return from_lake(build_event_log(home.lake, home.facts(), day))


@stage_asset(
    "features", "statistics",
    deps=[["features", "catalogue"], SHOWN, *_ingested("outcomes", "engagements"), _yesterday("statistics")],
    kinds={"duckdb", "parquet"}, code=CODE, job="daily", condition=FOLLOW,
)  # fmt: skip
def statistics(home: Home, day: str) -> Made:
    """Features of users and ads as published at the end of the day; requests of the next day read this cut."""
    from feature_repo.features import build_statistics

    counts, users, ads = build_statistics(home.lake, home.facts(), day)
    return from_lake(users, ads, counts)


@stage_asset(
    "features", "training_frame",
    deps=[["features", "catalogue"], ["features", "event_log"], *_ingested("impressions", "outcomes")],
    kinds={"duckdb", "parquet"}, code=CODE, job="daily", condition=FOLLOW,
)  # fmt: skip
def training_frame(home: Home, day: str) -> Made:
    """One row an impression: codes, history offset, labels known by the end of the day, maturity, training sample."""
    from feature_repo.features import build_frame

    return from_lake(build_frame(home.lake, home.facts(), day))


@stage_check("features", "training_frame", "no_leak")
def no_leak(home: Home, day: str) -> Verdict:
    """Every history holds exactly the events available strictly before its request; one row for each impression."""
    report = audit_leaks(home.lake, home.facts(), day)
    return Verdict(report.passed, f"{report.leaked} of {report.rows} rows see the future", asdict(report))


@stage_asset(
    "features", "online_store",
    deps=[["features", name] for name in ("statistics", "event_log", "catalogue")],
    kinds={"feast", "sqlite"}, code=STORE_CODE, job="release",
)  # fmt: skip
def online_store(home: Home, day: str) -> Made:
    """The published cut and every user's history in Feast's online store, as serving reads them."""
    from feature_repo import store

    facts, lake = home.facts(), home.lake
    store.apply(home.path, facts)
    done = store.materialize(home.path, lake, facts, day)
    parts = [lake.partition(table, day).version for table in ("user_features", "ad_features", "event_log")]
    service = store.feature_service_name(home.feature_schema())
    metadata = {"dagster/row_count": done.num_users, **numbers(asdict(done)), "feature service": service}
    return Made(digest([service, parts]), metadata)


@stage_check("features", "online_store", "parity")
def parity(home: Home, day: str) -> Verdict:
    """What the online reader says of a sample of users equals the offline cut, value for value and event for event."""
    from feature_repo.parity import check_parity

    report = check_parity(home.path, home.lake, home.facts(), day, seed=home.seed)
    if report.superseded_by:
        return Verdict(True, f"the store holds the newer cut of {report.superseded_by}: nothing to compare")
    return Verdict(report.passed, report.first_difference, numbers(asdict(report)))
