"""The lake: Parquet partitions that one manifest per partition makes visible, on a disk or in an object store.

`<root>/<table>/<partition>/<version>/<file>.parquet` holds data, `<root>/<table>/<partition>/manifest.json`
names the version that counts. A write fills a new version folder and replaces the manifest last, so readers
see the old partition or the new one, never half of either. Readers open only files that a manifest names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from feature_repo.files import Folder, open_folder

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
    """Tables of Parquet partitions below one root: a folder (`<home>/lake`), or a URL such as `s3://bucket/lake`."""

    def __init__(self, root: Path | str) -> None:
        self.root = root
        self.files: Folder = open_folder(root)

    def write(
        self, table: str, key: str, data: Mapping[str, pa.Table] | pa.Table, facts: dict[str, Any] | None = None
    ) -> Partition:
        """Write a partition from Arrow tables (one file each, or `data.parquet` for a single table)."""
        with self.together() as batch:
            return batch.write(table, key, data, facts)

    @contextmanager
    def replace(self, table: str, key: str, facts: dict[str, Any] | None = None) -> Iterator[Path]:
        """Yield an empty folder to fill with `*.parquet`; on leaving the block it becomes the partition.

        `facts` is read after the block, so the block may fill it. When the block raises, nothing changes.
        """
        with self.together() as batch, batch.fill(table, key, facts) as folder:
            yield folder

    @contextmanager
    def together(self) -> Iterator[Batch]:
        """Partitions that become visible at the end of the block, all of them, or none when the block raises."""
        with self.files.staging() as folder:
            batch = Batch(self, folder)
            yield batch
            batch.publish()

    def has(self, table: str, key: str) -> bool:
        """Whether the partition is visible."""
        return self.files.read(f"{table}/{key}/{MANIFEST}") is not None

    def partition(self, table: str, key: str) -> Partition:
        """Facts about a partition; raises ValueError when it does not exist."""
        content = self.files.read(f"{table}/{key}/{MANIFEST}")
        if content is None:
            known = ", ".join(self.keys(table)) or "none"
            raise ValueError(f"lake: {table}/{key} does not exist; partitions: {known}")
        return Partition(**json.loads(content))

    def tables(self) -> list[str]:
        """Names of the tables that have been written, sorted."""
        return self.files.folders("")

    def keys(self, table: str) -> list[str]:
        """Visible partition keys of a table, sorted."""
        return [key for key in self.files.folders(table) if self.has(table, key)]

    def remove(self, table: str, key: str) -> None:
        """Remove a partition."""
        self.files.remove(f"{table}/{key}")

    def path(self, table: str, key: str, name: str = "data") -> str:
        """Path or URL of one Parquet file of a partition."""
        return self.files.location(self._name(table, key, name))

    def _name(self, table: str, key: str, name: str) -> str:
        partition = self.partition(table, key)
        file = f"{name}.parquet"
        if file not in partition.files:
            raise ValueError(f"lake: {table}/{key} has no {file}; it has {sorted(partition.files)}")
        return f"{table}/{key}/{partition.version}/{file}"

    def fetch(self, table: str, key: str, target: Path, name: str = "data") -> None:
        """Make `target` the same file as one of a partition: a hard link where that is possible, else a copy."""
        self.files.fetch(self._name(table, key, name), target)

    def paths(self, table: str, keys: Sequence[str], name: str = "data") -> list[str]:
        """Paths or URLs, for `feature_repo.sql`, which opens both."""
        return [self.path(table, key, name) for key in keys]

    def read(
        self, table: str, keys: Sequence[str] | str, name: str = "data", columns: list[str] | None = None
    ) -> pa.Table:
        """Read partitions into one Arrow table, in the order of `keys`."""
        wanted = [keys] if isinstance(keys, str) else list(keys)
        return pa.concat_tables([self._read(path, columns) for path in self.paths(table, wanted, name)])

    def _read(self, path: str, columns: list[str] | None) -> pa.Table:
        plain = path if self.files.filesystem is None else self.files.filesystem._strip_protocol(path)
        return pq.read_table(plain, columns=columns, filesystem=self.files.filesystem)


class Batch:
    """Partitions that are written but not visible yet; see `Lake.together`."""

    def __init__(self, lake: Lake, folder: Path) -> None:
        self.lake = lake
        self._folder = folder
        self._staged: dict[tuple[str, str], tuple[Partition, Path, str | None]] = {}

    def write(
        self, table: str, key: str, data: Mapping[str, pa.Table] | pa.Table, facts: dict[str, Any] | None = None
    ) -> Partition:
        """Stage a partition from Arrow tables (one file each, or `data.parquet` for a single table)."""
        named = {"data": data} if isinstance(data, pa.Table) else data
        with self.fill(table, key, facts) as folder:
            for name, rows in named.items():
                pq.write_table(rows, folder / f"{name}.parquet", compression="zstd")
        return self._staged[table, key][0]

    @contextmanager
    def fill(self, table: str, key: str, facts: dict[str, Any] | None = None) -> Iterator[Path]:
        """Yield an empty folder to fill with `*.parquet`; `facts` is read after the block."""
        replaces = self.lake.files.tag(f"{table}/{key}/{MANIFEST}")
        folder = self._folder / str(len(self._staged))
        folder.mkdir()
        yield folder
        paths = sorted(folder.glob("*.parquet"))
        if not paths:
            raise ValueError(f"{table}/{key}: no *.parquet file was written")
        rows = {p.name: pq.read_metadata(p).num_rows for p in paths}
        partition = Partition(table, key, content_hash(paths), rows, dict(facts or {}))
        self._staged[table, key] = (partition, folder, replaces)

    def has(self, table: str, key: str) -> bool:
        """Whether the partition is staged or visible."""
        return (table, key) in self._staged or self.lake.has(table, key)

    def partition(self, table: str, key: str) -> Partition:
        """The staged partition, or the visible one."""
        return self._staged[table, key][0] if (table, key) in self._staged else self.lake.partition(table, key)

    def path(self, table: str, key: str, name: str = "data") -> str:
        """Path or URL of one Parquet file of the staged partition, or of the visible one."""
        if (table, key) in self._staged:
            return str(self._staged[table, key][1] / f"{name}.parquet")
        return self.lake.path(table, key, name)

    def publish(self) -> None:
        """Make every staged partition visible, each in one step, in the order in which they were written."""
        files = self.lake.files
        for (table, key), (partition, folder, replaces) in self._staged.items():
            home = f"{table}/{key}"
            files.hand_over(folder, f"{home}/{partition.version}")
            content = json.dumps(asdict(partition), indent=1, sort_keys=True)
            files.write(f"{home}/{MANIFEST}", content.encode(), replaces)
            for stale in files.folders(home):
                if stale != partition.version:
                    files.remove(f"{home}/{stale}")


def content_hash(paths: Sequence[Path]) -> str:
    """Version of a partition: the first 16 hex digits of the SHA-256 of its files' names and bytes."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
