"""The lake: Parquet partitions that one manifest per partition makes visible.

`<root>/<table>/<partition>/<version>/<file>.parquet` holds data, `<root>/<table>/<partition>/manifest.json`
names the version that counts. A write fills a new version folder and replaces the manifest last, so readers
see the old partition or the new one, never half of either. Readers open only files that a manifest names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Partition:
    """One visible partition: where its files are, how many rows, and the hash of their content."""

    table: str
    key: str
    version: str
    files: dict[str, int]
    """File name -> number of rows."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Small numbers that the writer wants remembered (counts of dropped rows, time ranges)."""

    @property
    def num_rows(self) -> int:
        """Rows of all files together."""
        return sum(self.files.values())


class Lake:
    """Tables of Parquet partitions below one root folder (`<home>/lake`)."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def write(
        self, table: str, key: str, data: Mapping[str, pa.Table] | pa.Table, facts: dict[str, Any] | None = None
    ) -> Partition:
        """Write a partition from Arrow tables (one file each, or `data.parquet` for a single table)."""
        named = {"data": data} if isinstance(data, pa.Table) else data
        with self.replace(table, key, facts) as folder:
            for name, rows in named.items():
                pq.write_table(rows, folder / f"{name}.parquet", compression="zstd")
        return self.partition(table, key)

    @contextmanager
    def replace(self, table: str, key: str, facts: dict[str, Any] | None = None) -> Iterator[Path]:
        """Yield an empty folder to fill with `*.parquet`; on leaving the block it becomes the partition.

        `facts` is read after the block, so the block may fill it. When the block raises, nothing changes.
        """
        home = self.root / table / key
        home.mkdir(parents=True, exist_ok=True)
        temporary = home / f".tmp-{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            yield temporary
            paths = sorted(temporary.glob("*.parquet"))
            if not paths:
                raise ValueError(f"{table}/{key}: no *.parquet file was written")
            version = _content_hash(paths)
            partition = Partition(
                table, key, version, {p.name: pq.read_metadata(p).num_rows for p in paths}, dict(facts or {})
            )
            final = home / version
            if not final.exists():
                os.replace(temporary, final)
            self._publish(home, partition)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _publish(self, home: Path, partition: Partition) -> None:
        pointer = home / f".{MANIFEST}.{uuid.uuid4().hex}"
        with pointer.open("w") as f:
            json.dump(asdict(partition), f, indent=1, sort_keys=True)
            f.flush()
            os.fsync(f.fileno())
        os.replace(pointer, home / MANIFEST)
        for stale in home.iterdir():
            if stale.is_dir() and stale.name != partition.version and not stale.name.startswith(".tmp-"):
                shutil.rmtree(stale, ignore_errors=True)

    def has(self, table: str, key: str) -> bool:
        """Whether the partition is visible."""
        return (self.root / table / key / MANIFEST).exists()

    def partition(self, table: str, key: str) -> Partition:
        """Facts about a partition; raises ValueError when it does not exist."""
        path = self.root / table / key / MANIFEST
        if not path.exists():
            known = ", ".join(self.keys(table)) or "none"
            raise ValueError(f"lake: {table}/{key} does not exist; partitions: {known}")
        return Partition(**json.loads(path.read_text()))

    def keys(self, table: str) -> list[str]:
        """Visible partition keys of a table, sorted."""
        folder = self.root / table
        if not folder.exists():
            return []
        return sorted(p.name for p in folder.iterdir() if (p / MANIFEST).exists())

    def path(self, table: str, key: str, name: str = "data") -> Path:
        """Path of one Parquet file of a partition."""
        partition = self.partition(table, key)
        file = f"{name}.parquet"
        if file not in partition.files:
            raise ValueError(f"lake: {table}/{key} has no {file}; it has {sorted(partition.files)}")
        return self.root / table / key / partition.version / file

    def paths(self, table: str, keys: Sequence[str], name: str = "data") -> list[str]:
        """Paths as strings, for DuckDB's `read_parquet(?)`."""
        return [str(self.path(table, key, name)) for key in keys]

    def read(
        self, table: str, keys: Sequence[str] | str, name: str = "data", columns: list[str] | None = None
    ) -> pa.Table:
        """Read partitions into one Arrow table, in the order of `keys`."""
        wanted = [keys] if isinstance(keys, str) else list(keys)
        return pa.concat_tables([pq.read_table(p, columns=columns) for p in self.paths(table, wanted, name)])


def _content_hash(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
