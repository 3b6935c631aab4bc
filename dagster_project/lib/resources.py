"""The one resource of the project: the home folder, opened. Everything heavy is imported when it is asked for."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from dagster_project.lib.settings import Settings
from dagster_project.lib.staleness import digest
from feature_repo.files import RemoteFolder
from feature_repo.lake import Lake
from feature_repo.tables import SourceFacts
from models.artifact import Artifact, ArtifactStore, write_json_atomically
from models.schema import FeatureSchema

if TYPE_CHECKING:
    from feature_repo.adapters.base import Source


PRUNED = "pruned"
"""Key in a reference whose artefact retention removed."""


class Home(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Lake, feature store, artefacts, releases, logs and reports below one folder, and the settings of its world."""

    root: str
    source: str
    preset: str
    seed: int
    data_dir: str = ""
    lake_url: str = ""
    artifacts_url: str = ""

    @classmethod
    def of(cls, settings: Settings) -> Home:
        """The resource of these settings."""
        return cls(
            root=str(settings.home),
            source=settings.source,
            preset=settings.preset,
            seed=settings.seed,
            data_dir=str(settings.data_dir or ""),
            lake_url=settings.lake_url or "",
            artifacts_url=settings.artifacts_url or "",
        )

    @property
    def path(self) -> Path:
        """The home folder."""
        return Path(self.root)

    @property
    def lake(self) -> Lake:
        """Parquet partitions below `<home>/lake`, or where the settings say."""
        return Lake(self.lake_url or self.path / "lake")

    @property
    def artifacts(self) -> ArtifactStore:
        """Artefacts below `<home>/artifacts`, with a copy in an object store where the settings name one."""
        remote = RemoteFolder(self.artifacts_url) if self.artifacts_url else None
        return ArtifactStore(self.path / "artifacts", remote)

    @property
    def releases(self) -> Path:
        """Folder of the release pointer."""
        return self.path / "releases"

    @property
    def reports(self) -> Path:
        """Folder of the reports."""
        return self.path / "reports"

    def open_source(self) -> Source:
        """The source that this home ingests."""
        from feature_repo.adapters.registry import open_source

        folder = Path(self.data_dir) if self.data_dir else None
        return open_source(self.source, preset=self.preset, data_dir=folder, seed=self.seed)

    def facts(self) -> SourceFacts:
        """Facts of the source, as the first ingest stored them."""
        from feature_repo.tables import read_facts

        return read_facts(self.lake.root)

    def feature_schema(self) -> FeatureSchema:
        """The feature schema of this home."""
        from feature_repo.features import schema_for

        return schema_for(self.facts())

    def settings_digest(self, group: str) -> str:
        """Hash of the settings that assets of a group depend on; only ingest reads the raw files and their folder."""
        values = {"source": self.source, "preset": self.preset, "seed": self.seed}
        if group != "ingest":
            return digest(values)
        return digest({**values, "data_dir": self.data_dir, "files": _stamps(self.data_dir)})

    def remember(self, name: str, partition: str, artifact: Artifact) -> None:
        """Note which artefact the partition of an asset stands for; replaces what was noted before."""
        value = {"kind": artifact.manifest.kind, "version": artifact.version}
        write_json_atomically(self._reference(name, partition), value)

    def remembers(self, name: str, partition: str) -> bool:
        """Whether the partition of an asset stands for an artefact."""
        return self._reference(name, partition).exists()

    def mark_pruned(self, path: Path) -> None:
        """Note in a reference that retention removed its artefact."""
        write_json_atomically(path, {**json.loads(path.read_text()), PRUNED: True})

    def forget(self, name: str, partition: str) -> None:
        """The partition of an asset stands for no artefact: it had nothing to make one from."""
        self._reference(name, partition).unlink(missing_ok=True)

    def artifact(self, name: str, partition: str) -> Artifact:
        """The artefact that the partition of an asset stands for, verified.

        Raises:
            ValueError: it was not made yet, or its files are not what its manifest says.
        """
        path = self._reference(name, partition)
        if not path.exists():
            raise ValueError(f"{name}[{partition}] was not made yet: {path} does not exist")
        value = json.loads(path.read_text())
        if PRUNED in value:
            raise ValueError(
                f"{name}[{partition}]: its artefact {value['kind']}/{value['version']} was removed by retention; "
                "materialise that partition again (`make ui`), or keep more days"
            )
        return self.artifacts.open(value["kind"], value["version"], schema=self.feature_schema())

    def _reference(self, name: str, partition: str) -> Path:
        return self.path / "artifacts" / "by_partition" / name / f"{partition.replace('|', '@')}.json"


@lru_cache(maxsize=1)
def _stamps(folder: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every raw file, as this process first saw them."""
    if not folder:
        return []
    found = [(path, path.stat()) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path, stat in found]
