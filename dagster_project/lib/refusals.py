"""Refused input as failed asset checks: what the terminal says, the UI shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from dagster_project.lib.metadata import table

if TYPE_CHECKING:
    from feature_repo.refusal import Breach, RefusedError

CONTRACT = "contract"


def refused_checks(error: RefusedError, tables: Sequence[str]) -> Iterator[dg.AssetCheckResult]:
    """A failed `contract` check for every table that was refused; a file of no table counts for the first one."""
    by_table: dict[str, list[Breach]] = defaultdict(list)
    for breach in error.breaches:
        name = breach.table.partition("/")[0]
        by_table[name if name in tables else tables[0]].append(breach)
    for name, breaches in by_table.items():
        first = breaches[0]
        yield dg.AssetCheckResult(
            passed=False,
            check_name=CONTRACT,
            asset_key=["ingest", name],
            severity=dg.AssetCheckSeverity.ERROR,
            description="\n".join(breach.text for breach in breaches),
            metadata={
                "file": first.file or first.table,
                "column": first.column,
                "count": first.count,
                "reason": first.reason,
                "breaches": table(
                    [{"rule": b.rule, "column": b.column, "count": b.count, "reason": b.reason} for b in breaches]
                ),
            },
        )
