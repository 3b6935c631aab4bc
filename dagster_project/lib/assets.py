"""How every asset and check of the project is declared, and what each records about itself.

A body gets `(home, partition)` and returns `Made`: a content hash and plain metadata. Around it stand the things
that are the same everywhere: work seconds, peak memory, and the tags from which staleness is decided.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from dagster_project.lib import progress
from dagster_project.lib.conditions import Condition
from dagster_project.lib.partitions import DAYS
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import (
    CODE_TAG,
    PARENTS_TAG,
    SETTINGS_TAG,
    Ledger,
    Node,
    digest,
    parent_nodes,
    parents_digest,
)

OWNERS = ["team:mirach"]
JOB_TAG = "mirach/job"
WORK_SECONDS = "work_seconds"
PEAK_MB = "peak_rss_mb"


@dataclass(frozen=True)
class Made:
    """What an asset's body made: the hash of its content, and what to tell about it."""

    version: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a check found. A failed verdict that only warns never stops a run."""

    passed: bool
    description: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


Body = Callable[[Home, str], Made]
CheckBody = Callable[[Home, str], Verdict]


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def ledger_of(context: dg.AssetExecutionContext) -> Ledger:
    """A fresh ledger over the instance and the asset graph of a running step."""
    return Ledger(context.instance, context.job_def.asset_layer.asset_graph)


def provenance(ledger: Ledger, node: Node, home: Home) -> dict[str, str]:
    """Tags that say what a node is being made from: code, settings, parents' data versions."""
    return {
        CODE_TAG: ledger.graph.get(node.key).code_version or "",
        SETTINGS_TAG: home.settings_digest(node.key.path[0]),
        PARENTS_TAG: parents_digest(ledger.graph, node, ledger.data_version),
    }


def stage_asset(
    group: str,
    name: str,
    *,
    deps: Sequence[Any],
    kinds: set[str],
    code: str,
    job: str,
    partitions: dg.PartitionsDefinition[str] = DAYS,
    condition: Condition | None = None,
    freshness: dg.FreshnessPolicy | None = None,
) -> Callable[[Body], dg.AssetsDefinition]:
    """Declare asset `<group>/<name>`, made by `job`, from a body; the body's docstring is the description.

    An asset that reads its own previous partition gets a data version that covers the whole chain, so that a
    changed day reaches every later one.
    """

    def declare(body: Body) -> dg.AssetsDefinition:
        @dg.asset(
            key=[group, name],
            deps=list(deps),
            description=body.__doc__,
            partitions_def=partitions,
            group_name=group,
            kinds=kinds,
            owners=OWNERS,
            tags={JOB_TAG: job},
            code_version=code,
            automation_condition=condition,  # type: ignore[arg-type]
            freshness_policy=freshness,
        )
        def asset(context: dg.AssetExecutionContext, home: Home) -> dg.MaterializeResult[Any]:
            start = time.perf_counter()
            progress.report(f"{group}/{name} {context.partition_key}")
            with progress.listening(context.log.info, progress.LOG_EVERY_S):
                made = body(home, context.partition_key)
            seconds = round(time.perf_counter() - start, 3)
            ledger, node = ledger_of(context), Node(context.asset_key, context.partition_key)
            return dg.MaterializeResult(
                metadata={**made.metadata, WORK_SECONDS: seconds, PEAK_MB: peak_rss_mb()},
                data_version=dg.DataVersion(_chained(ledger, node, made.version)),
                tags=provenance(ledger, node, home),
            )

        return asset

    return declare


def _chained(ledger: Ledger, node: Node, version: str) -> str:
    if not ledger.graph.get(node.key).has_self_dependency:
        return version
    before = [ledger.data_version(p) for p in parent_nodes(ledger.graph, node) if p.key == node.key]
    return digest([version, before])


def stage_check(
    group: str,
    asset: str,
    name: str,
    *,
    blocking: bool = True,
    warn: bool = False,
    partitions: dg.PartitionsDefinition[str] = DAYS,
) -> Callable[[CheckBody], dg.AssetChecksDefinition]:
    """Declare check `name` of asset `<group>/<asset>`, per partition; the body's docstring is the description."""

    def declare(body: CheckBody) -> dg.AssetChecksDefinition:
        @dg.asset_check(
            asset=[group, asset],
            name=name,
            blocking=blocking,
            partitions_def=partitions,
            description=body.__doc__,
        )
        def check(context: dg.AssetCheckExecutionContext, home: Home) -> dg.AssetCheckResult:
            start = time.perf_counter()
            verdict = body(home, context.partition_key)
            return dg.AssetCheckResult(
                passed=verdict.passed,
                severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
                description=verdict.description,
                metadata={**verdict.metadata, WORK_SECONDS: round(time.perf_counter() - start, 3)},
            )

        return check

    return declare
