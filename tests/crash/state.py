"""What a finished home holds, and what must hold at any moment of a run."""

import json
import os
import time
from pathlib import Path
from typing import Any

from dagster_project.definitions import defs
from dagster_project.lib.instance import open_instance
from dagster_project.lib.staleness import Ledger, Node
from feature_repo.lake import Lake, content_hash
from models.artifact import ArtifactStore, read_manifest
from models.release import read_pointer
from tests.breaches.tree import tree

MEASURED = ("metrics", "audit", "code_version")
"""Parts of a manifest that hold seconds and speeds; the version does not cover them."""
LIVE = ("monitoring/request_log", "monitoring/outcomes_join", "monitoring/recall_report")
"""What a live service answered: latencies, and under load a cheaper tier; no two runs are alike."""


def state(home: Path) -> dict[str, dict[str, Any]]:
    """Everything that two runs on the same data must have in common, as flat mappings."""
    return {
        "data versions": {n: v for n, v in data_versions(home).items() if not n.startswith(LIVE)},
        "lake": {n: v for n, v in tree(home / "lake").items() if not n.startswith("request_log/")},
        "artefacts": manifests(home),
        "partitions": tree(home / "artifacts" / "by_partition"),
        "bentos": bentos(home),
        "pointer": {"current.json": (home / "releases" / "current.json").read_text()},
    }


def data_versions(home: Path) -> dict[str, str]:
    """(asset, partition) -> data version of its latest materialisation."""
    with open_instance(home) as instance:
        graph = defs().resolve_asset_graph()
        ledger = Ledger(instance, graph)
        found = {}
        for key in graph.materializable_asset_keys:
            for partition in instance.get_materialized_partitions(key):
                found[str(Node(key, partition))] = ledger.data_version(Node(key, partition)) or ""
    return found


def manifests(home: Path) -> dict[str, Any]:
    """kind/version -> files with checksums, parents, configuration."""
    root = home / "artifacts"
    found = {}
    for path in sorted(root.glob("*/*/manifest.json")):
        values = vars(read_manifest(path.parent))
        found[str(path.parent.relative_to(root))] = {k: v for k, v in values.items() if k not in MEASURED}
    return found


def bentos(home: Path) -> dict[str, str]:
    """Files of the built Bentos; `bento.yaml` holds the time of the build, BentoML's README repeats it."""
    found = tree(home / "bentoml" / "bentos")
    manifests_of_releases = {n for n in found if n.endswith("manifest.json")}  # hold measured seconds
    return {
        name: value for name, value in found.items()
        if name not in manifests_of_releases and Path(name).name not in ("bento.yaml", "README.md", "latest")
    }  # fmt: skip


def check_good(home: Path) -> None:
    """Whatever is visible is whole: partitions, artefacts, the pointer and what it names."""
    lake = Lake(home / "lake")
    for table in lake.tables():
        for key in lake.keys(table):
            partition = lake.partition(table, key)
            paths = sorted(Path(lake.path(table, key, name.removesuffix(".parquet"))) for name in partition.files)
            assert content_hash(paths) == partition.version, f"{table}/{key}"
    store = ArtifactStore(home / "artifacts")
    for path in sorted((home / "artifacts" / "by_partition").rglob("*.json")):
        reference = json.loads(path.read_text())
        store.open(reference["kind"], reference["version"])
    pointer = read_pointer(home / "releases")
    if pointer is not None:
        release = store.open("release", pointer.version)
        for part in ("model", "index"):
            store.open(*release.manifest.config[part].split("/"))


def leftovers(home: Path) -> list[str]:
    """Half-done files and folders."""
    names = [*home.rglob(".staging-*"), *home.rglob(".tmp-*"), *(home / "artifacts").rglob(".*")]
    names += list((home / "artifacts" / "checkpoints").glob("*"))
    return sorted({str(path.relative_to(home)) for path in names})


def orphans(home: Path, patience_s: float = 20.0) -> list[str]:
    """Processes that still work on a home, after some patience."""
    deadline = time.monotonic() + patience_s
    while (found := _processes(home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _processes(home: Path) -> list[str]:
    wanted = f"MIRACH_HOME={home}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if wanted in environment and int(folder.name) != os.getpid() and command:
            found.append(f"{folder.name}: {command}")
    return found


def difference(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> list[str]:
    """Names that differ or stand on one side only, with both values."""
    return [
        f"{part}: {name}: {left[part].get(name)} against {right[part].get(name)}"
        for part in left
        for name in sorted(left[part].keys() | right[part].keys())
        if left[part].get(name) != right[part].get(name)
    ]
