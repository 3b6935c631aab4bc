"""The feature schema: names, kinds, sizes and order of everything a model reads, and its fingerprint.

One schema is shared by the training frame, Feast, the artefacts and the service. Two sides that disagree
about it have different fingerprints, and a release is refused where they do. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Role = Literal["user", "ad", "context"]

HISTORY_BYTES_PER_EVENT = 10
"""item_code int32, time_s uint32, kind uint8, surface uint8: the history columns of one event."""


@dataclass(frozen=True)
class Categorical:
    """A categorical field. Raw values are int64; `num_rows` is the size of its hashed embedding table.

    Fields with the same `table` share one embedding table (the ad id of an impression and of an event do).
    """

    name: str
    role: Role
    num_rows: int
    table: str


@dataclass(frozen=True)
class Dense:
    """A real-valued field, finite, roughly within [-5, 5] (logs and logits are taken in SQL)."""

    name: str
    role: Role


@dataclass(frozen=True)
class Group:
    """An attribute of ads by which history and candidate are compared (I2IF of HSNN, arXiv 2408.06653 section 3).

    Codes are contiguous, 0 means unknown and never matches.
    """

    name: str
    num_codes: int


@dataclass(frozen=True)
class Task:
    """A binary label of an impression. A row is mature once `window_s` seconds have passed since it was shown."""

    name: str
    window_s: int


@dataclass(frozen=True)
class FeatureSchema:
    """Everything a model needs to know about its inputs. Order is meaning: tensors follow it column by column."""

    source: str
    categorical: tuple[Categorical, ...]
    dense: tuple[Dense, ...]
    groups: tuple[Group, ...]
    embedding_dim: int
    history_length: int
    kinds: tuple[str, ...]
    surfaces: tuple[str, ...]
    tasks: tuple[Task, ...]
    item_rows: int
    """Rows of the hashed table that ad codes and history items share."""
    format_version: int = field(default=1)

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def categorical_of(self, role: Role) -> tuple[Categorical, ...]:
        """Categorical fields of one role, in order."""
        return tuple(f for f in self.categorical if f.role == role)

    def dense_of(self, role: Role) -> tuple[Dense, ...]:
        """Dense fields of one role, in order."""
        return tuple(f for f in self.dense if f.role == role)

    def surface_code(self, surface: str) -> int:
        """Code of a surface; raises ValueError that lists the known ones."""
        try:
            return self.surfaces.index(surface)
        except ValueError:
            known = ", ".join(self.surfaces)
            raise ValueError(f"surface: {surface!r} is unknown; known surfaces: {known}") from None

    def to_json(self) -> str:
        """Canonical JSON (sorted keys, no spaces)."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> FeatureSchema:
        """Inverse of `to_json`."""
        d: dict[str, Any] = json.loads(text)
        return cls(
            source=d["source"],
            categorical=tuple(Categorical(**f) for f in d["categorical"]),
            dense=tuple(Dense(**f) for f in d["dense"]),
            groups=tuple(Group(**g) for g in d["groups"]),
            embedding_dim=d["embedding_dim"],
            history_length=d["history_length"],
            kinds=tuple(d["kinds"]),
            surfaces=tuple(d["surfaces"]),
            tasks=tuple(Task(**t) for t in d["tasks"]),
            item_rows=d["item_rows"],
            format_version=d["format_version"],
        )


def first_difference(left: FeatureSchema, right: FeatureSchema) -> str | None:
    """Name the first part in which two schemas differ, with both values; None when they are equal."""
    a, b = asdict(left), asdict(right)
    for key in a:
        if a[key] == b[key]:
            continue
        if isinstance(a[key], (list, tuple)) and isinstance(b[key], (list, tuple)):
            for i, (x, y) in enumerate(zip(a[key], b[key], strict=False)):
                if x != y:
                    return f"{key}[{i}]: {x!r} against {y!r}"
            return f"{key}: {len(a[key])} entries against {len(b[key])}"
        return f"{key}: {a[key]!r} against {b[key]!r}"
    return None
