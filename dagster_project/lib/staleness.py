"""Skip what is current: which (asset, partition) pairs must be made again, and why.

A materialisation records hashes of the code that made it, of the settings, and of its parents' data versions.
A pair is current when all three are what they would be now, no blocking check of it failed or is missing, and no
parent of it is itself about to be made again. `materialize` alone never skips; the runner asks here first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster import AssetKey, DagsterInstance
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

CODE_TAG = "mirach/code"
SETTINGS_TAG = "mirach/settings"
PARENTS_TAG = "mirach/parents"
DATA_VERSION_TAG = "dagster/data_version"
DATA_VERSION_METADATA = "data_version"

Graph = BaseAssetGraph[Any]


@dataclass(frozen=True, order=True)
class Node:
    """One partition of one asset."""

    key: AssetKey
    partition: str

    def __str__(self) -> str:
        return f"{self.key.to_user_string()}[{self.partition}]"


@dataclass(frozen=True)
class Record:
    """What the latest materialisation of a node recorded about itself."""

    data_version: str
    code: str
    settings: str
    parents: str


def digest(value: object) -> str:
    """First 16 hex digits of the SHA-256 of canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def rounded(value: Any, digits: int = 9) -> Any:
    """Floats cut to significant digits, through lists and mappings: sums of threads differ in their last bits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: rounded(one, digits) for name, one in value.items()}
    return [rounded(one, digits) for one in value] if isinstance(value, (list, tuple)) else value


def parent_nodes(graph: Graph, node: Node) -> list[Node]:
    """Partitions that a node reads, through the asset graph and its partition mappings, sorted."""
    result = graph.get_parents_partitions(node.key, node.partition)
    return sorted(Node(p.asset_key, str(p.partition_key)) for p in result.parent_partitions)


def parents_digest(graph: Graph, node: Node, version_of: Callable[[Node], str | None]) -> str:
    """Hash of the data versions of everything a node reads; a parent that does not exist counts as null."""
    return digest({str(parent): version_of(parent) for parent in parent_nodes(graph, node)})


@dataclass
class Ledger:
    """Latest records by node, read from the instance once an asset and cached until `forget`."""

    instance: DagsterInstance
    graph: Graph
    _records: dict[AssetKey, dict[str, Record]] = field(default_factory=dict)
    _failed: dict[AssetKey, dict[str, str]] = field(default_factory=dict)

    def record(self, node: Node) -> Record | None:
        """The latest materialisation of a node, or None."""
        if node.key not in self._records:
            self._records[node.key] = self._read(node.key)
        return self._records[node.key].get(node.partition)

    def data_version(self, node: Node) -> str | None:
        """Data version of the latest materialisation of a node, or None."""
        record = self.record(node)
        return record.data_version if record else None

    def failed_check(self, node: Node) -> str | None:
        """Name of a blocking check of this node whose latest execution did not succeed, or None."""
        if node.key not in self._failed:
            self._failed[node.key] = self._read_checks(node.key)
        return self._failed[node.key].get(node.partition)

    def forget(self, keys: Iterable[AssetKey]) -> None:
        """Drop what was cached about assets that have just been materialised."""
        for key in keys:
            self._records.pop(key, None)
            self._failed.pop(key, None)

    def _read(self, key: AssetKey) -> dict[str, Record]:
        found: dict[str, Record] = {}
        cursor: str | None = None
        while True:
            page = self.instance.fetch_materializations(key, limit=500, cursor=cursor)
            for entry in page.records:
                if entry.partition_key is not None:
                    found.setdefault(entry.partition_key, _to_record(entry.asset_materialization))
            if not page.has_more:
                return found
            cursor = page.cursor

    def _read_checks(self, key: AssetKey) -> dict[str, str]:
        blocking = [k for k in self.graph.get_check_keys_for_assets({key}) if _blocks_partitions(self.graph, k)]
        if not blocking:
            return {}
        infos = self.instance.event_log_storage.get_asset_check_partition_info(blocking)
        return {
            info.partition_key: info.check_key.name
            for info in infos
            if info.partition_key and info.latest_execution_status != AssetCheckExecutionRecordStatus.SUCCEEDED
        }


def _blocks_partitions(graph: Graph, key: dg.AssetCheckKey) -> bool:
    check = graph.get(key)
    return bool(check.blocking) and check.partitions_def is not None


def _to_record(event: dg.AssetMaterialization | None) -> Record:
    assert event is not None
    tags: Mapping[str, str] = event.tags or {}
    own = event.metadata.get(DATA_VERSION_METADATA)
    version = str(own.value) if own is not None else tags.get(DATA_VERSION_TAG, "")
    return Record(version, tags.get(CODE_TAG, ""), tags.get(SETTINGS_TAG, ""), tags.get(PARENTS_TAG, ""))


def stale(
    ledger: Ledger, wanted: Sequence[Node], settings_of: Callable[[AssetKey], str], assume: Iterable[Node] = ()
) -> dict[Node, str]:
    """The nodes among `wanted` that must be made again, each with the reason, in dependency order.

    Args:
        ledger: what was recorded.
        wanted: nodes that the caller is willing to run together; others are taken as they stand.
        settings_of: hash of the settings that an asset depends on.
        assume: nodes outside `wanted` that will be made again before these.
    """
    graph = ledger.graph
    order = {key: i for i, key in enumerate(graph.toposorted_asset_keys)}
    again: dict[Node, str] = {node: "" for node in assume}
    reasons: dict[Node, str] = {}
    for node in sorted(wanted, key=lambda n: (n.partition, order[n.key])):
        reason = _reason(ledger, node, settings_of(node.key), again)
        if reason is not None:
            again[node] = reasons[node] = reason
    return reasons


def _reason(ledger: Ledger, node: Node, settings: str, again: Mapping[Node, str]) -> str | None:
    record = ledger.record(node)
    if record is None:
        return "never made"
    if record.code != (ledger.graph.get(node.key).code_version or ""):
        return "code changed"
    if record.settings != settings:
        return "settings changed"
    for parent in parent_nodes(ledger.graph, node):
        if parent in again:
            return f"{parent} is made again"
    if record.parents != parents_digest(ledger.graph, node, ledger.data_version):
        return "a parent's data changed"
    check = ledger.failed_check(node)
    return f"check {check} has not passed" if check else None
