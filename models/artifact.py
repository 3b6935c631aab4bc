"""Artefacts and releases: folders of safetensors, Parquet and JSON files that a manifest makes valid.

An artefact is `artifacts/<kind>/<version>/` with `manifest.json` written last; the version is the hash of
the content, so the same content is the same version. A release is an artefact of kind `release`;
`releases/current.json` names the one that serves and is replaced atomically. Nothing here pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from models.schema import FeatureSchema, first_difference
from models.staging import staging, write_atomically

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What an artefact is, where it came from, and what was measured on it."""

    kind: str
    version: str
    files: dict[str, str]
    """File name -> SHA-256 of its content."""
    schema_fingerprint: str
    code_version: str
    parents: dict[str, str] = field(default_factory=dict)
    """Parent name (`gem/2026-01-17`, `lake/training_frame/2026-01-17`) -> its version."""
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """An opened artefact: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> str:
        """The content hash."""
        return self.manifest.version

    def file(self, name: str) -> Path:
        """Path of one of its files; raises ValueError when the manifest does not name it."""
        if name not in self.manifest.files:
            raise ValueError(f"{self.path}: no file {name!r}; it has {sorted(self.manifest.files)}")
        return self.path / name


@dataclass
class Draft:
    """An artefact being written. Fill `path` with files and set the fields; it becomes visible on leaving the block."""

    path: Path
    parents: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    result: Artifact | None = None


class Remote(Protocol):
    """A prefix of an object store (`feature_repo.files.RemoteFolder`)."""

    def read(self, name: str) -> bytes | None:
        """Content of an object, None when there is none."""
        ...

    def write(self, name: str, content: bytes, replaces: str | None) -> None:
        """A conditional put; `replaces` None: only if there is no such object, else ValueError."""
        ...

    def hand_over(self, filled: Path, name: str) -> None:
        """Upload the files of a local folder below a name."""
        ...

    def folders(self, name: str) -> list[str]:
        """Names of the folders below a name."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Download."""
        ...


class ArtifactStore:
    """Artefacts below one root folder (`<home>/artifacts`), with a copy of each in an object store where one is given.

    Files are always read from the folder; what it lacks is fetched, verified and kept there.
    """

    def __init__(self, root: Path, remote: Remote | None = None) -> None:
        self.root = Path(root)
        self.remote = remote

    @contextmanager
    def create(self, kind: str, *, schema: FeatureSchema, code_version: str) -> Iterator[Draft]:
        """Write a new artefact; `draft.result` is set when the block ends, and nothing is left when it raises.

        The content hash covers files, config and parents, not metrics: the same weights are the same version.
        """
        folder = self.root / kind
        folder.mkdir(parents=True, exist_ok=True)
        with staging(self.root) as temporary:
            draft = Draft(path=temporary)
            yield draft
            files = {p.name: _sha256(p) for p in sorted(temporary.iterdir()) if p.is_file()}
            identity = json.dumps([kind, files, schema.fingerprint, draft.config, draft.parents], sort_keys=True)
            version = hashlib.sha256(identity.encode()).hexdigest()[:16]
            manifest = Manifest(
                kind=kind, version=version, files=files, schema_fingerprint=schema.fingerprint,
                code_version=code_version, parents=draft.parents, config=draft.config,
                metrics=draft.metrics, audit=draft.audit,
            )  # fmt: skip
            write_json_atomically(temporary / MANIFEST, asdict(manifest))
            final = folder / version
            if not (final / MANIFEST).exists():
                shutil.rmtree(final, ignore_errors=True)
                os.replace(temporary, final)
            if self.remote is not None:
                self._push(self.remote, final, f"{kind}/{version}")
            draft.result = Artifact(final, read_manifest(final))

    def _push(self, remote: Remote, folder: Path, name: str) -> None:
        """Upload the files, then the manifest, which only the first of several writers creates: content is equal."""
        if remote.read(f"{name}/{MANIFEST}") is not None:
            return
        with staging(self.root) as content:
            for file in read_manifest(folder).files:
                os.link(folder / file, content / file)
            remote.hand_over(content, name)
        try:
            remote.write(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes(), None)
        except ValueError:
            if remote.read(f"{name}/{MANIFEST}") is None:
                raise

    def _pull(self, remote: Remote, kind: str, version: str) -> None:
        """Fetch an artefact into the folder; `open` verifies it. Nothing happens when the object store lacks it."""
        name = f"{kind}/{version}"
        content = remote.read(f"{name}/{MANIFEST}")
        if content is None:
            return
        with staging(self.root) as folder:
            for file in json.loads(content)["files"]:
                remote.fetch(f"{name}/{file}", folder / file)
            (folder / MANIFEST).write_bytes(content)
            (self.root / kind).mkdir(parents=True, exist_ok=True)
            os.replace(folder, self.root / kind / version)

    def open(self, kind: str, version: str, *, schema: FeatureSchema | None = None) -> Artifact:
        """Open and verify an artefact: manifest present, checksums right, schema equal where one is given.

        Raises:
            ValueError: says which artefact, which file and what is wrong.
        """
        path = self.root / kind / version
        if self.remote is not None and not (path / MANIFEST).exists():
            self._pull(self.remote, kind, version)
        if not (path / MANIFEST).exists():
            known = ", ".join(self.versions(kind)) or "none"
            raise ValueError(f"artefact {kind}/{version} does not exist below {self.root}; versions: {known}")
        manifest = read_manifest(path)
        for name, digest in manifest.files.items():
            if not (path / name).exists():
                raise ValueError(f"artefact {kind}/{version}: file {name} is missing")
            if _sha256(path / name) != digest:
                raise ValueError(f"artefact {kind}/{version}: file {name} does not match its checksum")
        if schema is not None and schema.fingerprint != manifest.schema_fingerprint:
            raise ValueError(_schema_mismatch(path, manifest, schema))
        return Artifact(path, manifest)

    def versions(self, kind: str) -> list[str]:
        """Versions of a kind that are complete, oldest first; those that only the object store has come before."""
        folder = self.root / kind
        done = [p for p in folder.iterdir() if (p / MANIFEST).exists()] if folder.exists() else []
        here = [p.name for p in sorted(done, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))]
        elsewhere = self.remote.folders(kind) if self.remote is not None else []
        return [version for version in elsewhere if version not in here] + here


def _schema_mismatch(path: Path, manifest: Manifest, schema: FeatureSchema) -> str:
    detail = ""
    if "schema.json" in manifest.files:
        other = FeatureSchema.from_json((path / "schema.json").read_text())
        detail = f"; first difference: {first_difference(other, schema)}"
    return (
        f"artefact {manifest.kind}/{manifest.version}: schema fingerprint {manifest.schema_fingerprint} "
        f"is not {schema.fingerprint}{detail}"
    )


def read_manifest(path: Path) -> Manifest:
    """Read `<path>/manifest.json`."""
    return Manifest(**json.loads((path / MANIFEST).read_text()))


def write_json_atomically(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON under a temporary name, sync it, and rename it over `path`."""
    write_atomically(path, json.dumps(value, indent=1, sort_keys=True).encode())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
