"""Build a Bento that carries a release: the code, the pinned requirements, and the release's artefacts.

The Bento serves from any folder and any machine: without a readable release pointer it answers from its own
copy. Its version is `<release>-<hash of the code>`, so that the same content is the same Bento and an exact tag
always means the same thing. Works offline (nothing is resolved against an index).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

from bentos.child import command
from bentos.retrieval.release import ReleaseConfig, copy_release
from models.artifact import ArtifactStore
from models.release import read_pointer
from models.staging import staging, write_atomically

logger = logging.getLogger(__name__)

NAME = "retrieval"
SERVICE = "bentos.retrieval.service:Retrieval"
PACKAGES = ("bentos", "models", "feature_repo")
REQUIREMENTS = ("bentoml", "torch", "safetensors", "numpy", "pyarrow", "duckdb", "feast", "pandas", "fsspec")
CODE_SUFFIXES = (".py", ".sql", ".yaml")


@dataclass(frozen=True)
class BuiltBento:
    """A Bento in the store below `<home>/bentoml`."""

    tag: str
    path: Path
    release: str
    num_bytes: int
    build_s: float
    """0.0 when the same Bento existed already."""


def bentoml_environment(home: Path) -> dict[str, str]:
    """Environment of BentoML's commands: the home's own store, no telemetry."""
    return {
        **os.environ,
        "BENTOML_HOME": str(Path(home).resolve() / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
        "DO_NOT_TRACK": "1",
    }


def build_bento(home: Path, release: str) -> BuiltBento:
    """Build (or find) the Bento of a release of this home.

    Raises:
        ValueError: the release does not exist or is damaged.
        RuntimeError: `bentoml build` failed; carries the end of what it said.
    """
    started = time.perf_counter()
    store = ArtifactStore(Path(home) / "artifacts")
    manifest = store.open("release", release).manifest
    config = ReleaseConfig.from_manifest(manifest.config)
    with tempfile.TemporaryDirectory(prefix="mirach-bento-") as folder:
        context = Path(folder)
        copy_code(context)
        version = f"{release}-{_tree_hash(context)}"
        path = Path(home).resolve() / "bentoml" / "bentos" / NAME / version
        tag = f"{NAME}:{version}"
        if (path / "bento.yaml").exists():
            return BuiltBento(tag, path, release, _num_bytes(path), 0.0)
        copied = context / "release"
        copy_release(store, release, copied)
        (copied / "release.json").write_text(json.dumps({"version": release}))
        labels = {"release": release, "as_of": config.as_of, "schema": config.schema_fingerprint}
        (context / "bentofile.yaml").write_text(_bentofile(labels))
        _run_build(home, context, version)
    logger.info("built %s", tag)
    return BuiltBento(tag, path, release, _num_bytes(path), time.perf_counter() - started)


def copy_code(target: Path) -> None:
    """Copy the packages that serve, and their requirements, into a build context."""
    root = Path(__file__).resolve().parents[1]
    for package in PACKAGES:
        for source in sorted((root / package).rglob("*")):
            if source.suffix in CODE_SUFFIXES and "__pycache__" not in source.parts:
                copied = target / source.relative_to(root)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copied)
    pins = [f"{name}=={installed_version(name).partition('+')[0]}" for name in REQUIREMENTS]
    (target / "requirements.txt").write_text("\n".join(pins) + "\n")


def _bentofile(labels: dict[str, str]) -> str:
    """JSON is YAML."""
    return json.dumps(
        {
            "service": SERVICE,
            "name": NAME,
            "labels": labels,
            "include": ["**/*"],
            "python": {"requirements_txt": "requirements.txt", "lock_packages": False},
        },
        indent=1,
    )


def _run_build(home: Path, context: Path, version: str) -> None:
    """Build in a store of its own and move the finished Bento: BentoML copies into a store file by file, and a Bento
    of which a killed build left half would be taken for a whole one.
    """
    store = Path(home).resolve() / "bentoml"
    arguments = command("bentoml", "build", "-f", "bentofile.yaml", "--version", version, ".")
    alive, ours = os.pipe()
    with staging(store) as own, os.fdopen(alive), os.fdopen(ours, "w"):
        done = subprocess.run(
            arguments, cwd=context, env={**bentoml_environment(home), "BENTOML_HOME": str(own)}, stdin=alive,
            capture_output=True, text=True, timeout=300, check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"bentoml build failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
        final = store / "bentos" / NAME / version
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(own / "bentos" / NAME / version, final)
    write_atomically(final.parent / "latest", version.encode())


def _tree_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def _num_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def main() -> None:
    """Command line: `python -m bentos.build --home data/simulator [--release VERSION]`."""
    parser = argparse.ArgumentParser(description="Build the Bento of a release.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--release", help="version; the promoted one by default")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pointer = read_pointer(arguments.home / "releases")
    release = arguments.release or (pointer.version if pointer else None)
    if release is None:
        parser.error(f"{arguments.home}: no release is promoted; name one with --release")
    built = build_bento(arguments.home, release)
    logger.info("%s", json.dumps({**asdict(built), "path": str(built.path)}, indent=1))


if __name__ == "__main__":
    main()
