"""What a home keeps, and what retention removes: decided first, listed, and only then removed.

Kept: the release that serves, the one before and the newest ones, with the model and index they name; what the newest
days stand for; what later days are made from (teacher labels of every day, the foundation model of the evaluation
cut); the whole lake (histories are offsets into all of it). Everything else that is older goes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from dagster_project.lib.resources import PRUNED, Home
from models.release import read_pointer

KEPT_RELEASES = 3
EVERY_DAY = ("transfer/teacher_labels",)
"""Students learn from the labels of all days."""
OF_THE_CUT = ("gem/foundation_model", "gem/baseline")
"""The frozen evaluation reads the foundation model of the source's evaluation cut."""


@dataclass(frozen=True)
class Item:
    """Something that retention removes."""

    kind: str
    path: Path
    num_bytes: int
    reason: str


def plan(home: Home, num_days: int) -> list[Item]:
    """Everything that is neither kept by a rule nor of the newest `num_days` days, largest kind first.

    Raises:
        ValueError: `num_days` is not positive.
    """
    if num_days < 1:
        raise ValueError(f"DAYS: {num_days} is not a positive number of days")
    last = date.fromisoformat(home.facts().last_day)
    first_kept = (last - timedelta(days=num_days - 1)).isoformat()
    items = [
        *_artifacts(home, first_kept), *_bentos(home), *_request_logs(home, first_kept), *_reports(home, first_kept),
    ]  # fmt: skip
    return sorted(items, key=lambda item: (item.kind, str(item.path)))


def apply(home: Home, items: list[Item]) -> int:
    """Remove what was planned; the number of bytes freed. References of removed artefacts are marked as pruned."""
    gone = {item.path for item in items}
    for path, reference in _references(home):
        if home.artifacts.root / reference["kind"] / reference["version"] in gone:
            home.mark_pruned(path)
    for item in items:
        if item.path.is_dir():
            shutil.rmtree(item.path)
        else:
            item.path.unlink(missing_ok=True)
    return sum(item.num_bytes for item in items)


def _references(home: Home) -> Iterator[tuple[Path, dict[str, str]]]:
    """What the partitions of assets stand for, without what was pruned before."""
    for path in sorted((home.artifacts.root / "by_partition").rglob("*.json")):
        reference = json.loads(path.read_text())
        if PRUNED not in reference:
            yield path, reference


def _kept_artifacts(home: Home, first_kept: str) -> set[tuple[str, str]]:
    root, cut = home.artifacts.root / "by_partition", home.facts().evaluation_cut
    kept = set()
    for path, reference in _references(home):
        name, day = path.parent.relative_to(root).as_posix(), path.stem.partition("@")[0]
        if day >= first_kept or name in EVERY_DAY or (name in OF_THE_CUT and day == cut):
            kept.add((reference["kind"], reference["version"]))
    for version in kept_releases(home):
        manifest = home.artifacts.open("release", version).manifest
        kept |= {("release", version), *(_split(manifest.config[part]) for part in ("model", "index"))}
    return kept


def kept_releases(home: Home) -> list[str]:
    """The release that serves, the one before it, and the newest ones."""
    pointer = read_pointer(home.releases)
    named = [pointer.version, pointer.previous] if pointer else []
    newest = home.artifacts.versions("release")[-KEPT_RELEASES:]
    return list(dict.fromkeys(version for version in (*named, *newest) if version))


def _split(reference: str) -> tuple[str, str]:
    kind, _, version = reference.partition("/")
    return kind, version


def _artifacts(home: Home, first_kept: str) -> Iterator[Item]:
    kept = _kept_artifacts(home, first_kept)
    referenced = {(reference["kind"], reference["version"]) for _, reference in _references(home)}
    for manifest in sorted(home.artifacts.root.glob("*/*/manifest.json")):
        folder = manifest.parent
        name = (folder.parent.name, folder.name)
        if name not in kept:
            reason = f"of a day before {first_kept}" if name in referenced else "replaced by a newer version"
            yield Item("artefact", folder, _size(folder), reason)


def _bentos(home: Home) -> Iterator[Item]:
    kept = set(kept_releases(home))
    for folder in sorted((home.path / "bentoml" / "bentos").glob("*/*-*")):
        if folder.name.partition("-")[0] not in kept:
            yield Item("bento", folder, _size(folder), "its release is not kept")


def _request_logs(home: Home, first_kept: str) -> Iterator[Item]:
    for folder in sorted((home.path / "logs" / "requests").glob("????-??-??")):
        if folder.name < first_kept:
            yield Item("request log", folder, _size(folder), f"before {first_kept}")
    for path in sorted((home.path / "logs" / "service").glob("*.log")):
        yield Item("service log", path, path.stat().st_size, "of a server that has ended")


def _reports(home: Home, first_kept: str) -> Iterator[Item]:
    """HTML reports, the bulk, and the workspace's snapshots; the small JSON files of a day stay."""
    for path in sorted(home.reports.rglob("*.html")):
        if (day := _day_of(path.stem)) is not None and day < first_kept:
            yield Item("report", path, path.stat().st_size, f"before {first_kept}")
    for path in sorted((home.reports / "workspace").glob("*/snapshots/*.json")):
        day = str(json.loads(path.read_text()).get("timestamp", ""))[:10]
        if day and day < first_kept:
            yield Item("snapshot", path, path.stat().st_size, f"before {first_kept}")


def _day_of(name: str) -> str | None:
    for part in (name[:10], name[-10:]):
        try:
            return date.fromisoformat(part).isoformat()
        except ValueError:
            continue
    return None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
