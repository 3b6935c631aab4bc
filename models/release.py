"""The release pointer: which release serves, which one served before, and how to go back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from models.artifact import write_json_atomically


@dataclass(frozen=True)
class Pointer:
    """Content of `releases/current.json`. `version` is an artefact of kind `release`."""

    version: str
    previous: str | None
    as_of: str


def read_pointer(releases: Path) -> Pointer | None:
    """The pointer below `<home>/releases`, or None when nothing was promoted yet.

    Raises:
        ValueError: the file exists and can't be understood.
    """
    path = releases / "current.json"
    if not path.exists():
        return None
    try:
        return Pointer(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: not a release pointer ({error})") from error


def promote(releases: Path, version: str, as_of: str) -> Pointer:
    """Move the pointer to `version` atomically; promoting the current version changes nothing."""
    current = read_pointer(releases)
    if current is not None and current.version == version:
        return current
    pointer = Pointer(version=version, previous=current.version if current else None, as_of=as_of)
    write_json_atomically(releases / "current.json", pointer.__dict__)
    return pointer


def roll_back(releases: Path) -> Pointer:
    """Point at the previous release again.

    Raises:
        ValueError: there is no previous release.
    """
    current = read_pointer(releases)
    if current is None or current.previous is None:
        raise ValueError(f"{releases}: there is no previous release to roll back to")
    pointer = Pointer(version=current.previous, previous=current.version, as_of=current.as_of)
    write_json_atomically(releases / "current.json", pointer.__dict__)
    return pointer
