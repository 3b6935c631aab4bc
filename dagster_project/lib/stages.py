"""What several stages share: results of other packages as `Made`."""

from __future__ import annotations

from typing import Any

from dagster_project.lib.assets import Made
from dagster_project.lib.metadata import numbers
from dagster_project.lib.staleness import digest
from feature_repo.lake import Partition


def from_lake(*partitions: Partition) -> Made:
    """One or more lake partitions, the first one being what the asset is about."""
    metadata: dict[str, Any] = {"dagster/row_count": partitions[0].num_rows}
    for partition in partitions:
        prefix = "" if len(partitions) == 1 else f"{partition.table}."
        metadata.update(numbers(partition.facts, prefix))
        if len(partition.files) > 1:
            metadata.update(
                numbers({n.removesuffix(".parquet"): r for n, r in partition.files.items()}, f"{prefix}rows.")
            )
    version = partitions[0].version if len(partitions) == 1 else digest([p.version for p in partitions])
    return Made(version, metadata)
