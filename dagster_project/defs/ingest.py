"""Ingest: the contract's tables, one partition a day. A broken day is refused whole, with examples."""

import time
from collections.abc import Iterator
from typing import Any

import dagster as dg

from dagster_project.lib.assets import JOB_TAG, OWNERS, PEAK_MB, WORK_SECONDS, ledger_of, peak_rss_mb, provenance
from dagster_project.lib.code import code_version
from dagster_project.lib.partitions import DAYS, FACTS
from dagster_project.lib.refusals import refused_checks
from dagster_project.lib.resources import Home
from dagster_project.lib.stages import from_lake
from dagster_project.lib.staleness import DATA_VERSION_METADATA, Node, digest

DESCRIPTIONS = {
    "impressions": "Ads that were shown, one row per (request, ad), without labels.",
    "outcomes": "Clicks, conversions and other labels by the day on which they became known; append-only.",
    "engagements": "Organic events of users (views, likes, purchases), the bulk of their histories.",
    "ads": "Change log of ads by the day on which a change became known; the first day also holds everything older.",
    "users": "Change log of users' attributes.",
    "oracle": "True probabilities of every impression. Simulator only: metrics read them, no feature and no training.",
}
TABLES = [name for name in DESCRIPTIONS if name != "oracle" or FACTS.has_oracle]
CODE = code_version(
    "feature_repo/adapters", "feature_repo/simulator", "feature_repo/contract.py", "feature_repo/contract_rules.py",
    "feature_repo/ingest.py", "feature_repo/tables.py", "feature_repo/lake.py", "feature_repo/refusal.py",
)  # fmt: skip


@dg.multi_asset(
    name="ingest_tables",
    specs=[
        dg.AssetSpec(
            key=["ingest", table],
            description=DESCRIPTIONS[table],
            group_name="ingest",
            kinds={"duckdb", "parquet"},
            owners=OWNERS,
            tags={JOB_TAG: "ingest"},
            code_version=CODE,
        )
        for table in TABLES
    ],
    check_specs=[
        dg.AssetCheckSpec(
            "contract",
            asset=["ingest", table],
            blocking=True,
            description="What the latest run ingested keeps the contract: schema, predicates, no conflicting key.",
        )
        for table in TABLES
    ],
    partitions_def=DAYS,
    backfill_policy=dg.BackfillPolicy.single_run(),
    can_subset=True,
)
def ingest_tables(context: dg.AssetExecutionContext, home: Home) -> Iterator[Any]:
    """Read the source day by day, check every table against the contract, write what passed; ranges are one run.

    Data that break the contract are refused: the lake stays as it was, and the table's check fails with file, column,
    count and reason.
    """
    from feature_repo.ingest import ingest_days
    from feature_repo.refusal import RefusedError

    ledger = ledger_of(context)
    tables = [table for table in TABLES if dg.AssetKey(["ingest", table]) in context.selected_asset_keys]
    versions: dict[str, list[str]] = {table: [] for table in tables}
    dropped = dict.fromkeys(tables, 0)
    start = time.perf_counter()
    try:
        written = ingest_days(home.lake, home.open_source(), context.partition_keys, tables)
    except RefusedError as error:
        yield from refused_checks(error, tables)
        raise
    for (table, day), partition in written.items():
        dropped[table] += partition.facts["num_dropped"]
        made = from_lake(partition)
        versions[table].append(made.version)
        metadata = {**made.metadata, DATA_VERSION_METADATA: made.version}
        context.add_asset_metadata(metadata, asset_key=["ingest", table], partition_key=day)
    # One pass reads all tables of all days: each partition of each table gets an equal share of the seconds.
    share = round((time.perf_counter() - start) / len(tables) / len(context.partition_keys), 4)
    for table in tables:
        key = dg.AssetKey(["ingest", table])
        yield dg.MaterializeResult(
            asset_key=key,
            metadata={WORK_SECONDS: share, PEAK_MB: peak_rss_mb()},
            data_version=dg.DataVersion(digest(versions[table])),
            tags=provenance(ledger, Node(key, context.partition_keys[0]), home),
            check_results=[
                dg.AssetCheckResult(
                    passed=True,
                    check_name="contract",
                    asset_key=key,
                    metadata={"days": len(context.partition_keys), "dropped repeats": dropped[table]},
                )
            ],
        )
