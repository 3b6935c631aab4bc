"""Releases: one model, one index, the ads they were published over, and how a service shall search them.

A release is an artefact of kind `release`. It names its model and index by version, embeds the feature schema
(`schema.json`) and the table of ads (`ads.safetensors`), so that the three together answer requests without
anything else. `models.release` moves the pointer between releases.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import torch
from safetensors.torch import load_file, save_file

from models.artifact import Artifact, ArtifactStore
from models.batch import AdTable
from models.schema import FeatureSchema

EXACT = "exact"
"""The tier that every release has: the full scan of the serving score."""
TIER_ORDER = ("lite", "standard", "full", EXACT)
"""Cheapest first; under load the service steps down this order."""


@dataclass(frozen=True)
class Tier:
    """How much work a request gets: beam width per level, or the full scan."""

    beams: tuple[int, ...]
    exact: bool = False


@dataclass(frozen=True)
class ReleaseConfig:
    """What a release says about itself (the manifest's `config`)."""

    model: str
    """`kind/version` of the retrieval model."""
    index: str
    """`kind/version` of the index."""
    tuned: bool
    schema_fingerprint: str
    feature_service: str
    as_of: str
    watermark: int
    """Number of ads the release knows; newer ads have larger codes."""
    timezone: str
    """Zone of the hour-of-day feature."""
    default_tier: str
    tiers: Mapping[str, Tier]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def tier(self, name: str) -> Tier:
        """A tier by name; raises ValueError that lists the known ones."""
        if name not in self.tiers:
            raise ValueError(f"tier: {name!r} is unknown; known tiers: {', '.join(self.tier_names)}")
        return self.tiers[name]

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers, cheapest first."""
        return tuple(sorted(self.tiers, key=lambda n: TIER_ORDER.index(n) if n in TIER_ORDER else len(TIER_ORDER)))

    @classmethod
    def from_manifest(cls, config: Mapping[str, Any]) -> ReleaseConfig:
        """Parse a manifest's config; raises ValueError that names what is missing or wrong."""
        required = {f.name for f in fields(cls)} - {"notes"}
        missing = sorted(required - config.keys())
        if missing:
            raise ValueError(f"release config: {', '.join(missing)} missing")
        values = {name: config[name] for name in required} | {"notes": config.get("notes", {})}
        values["tiers"] = {n: Tier(tuple(t["beams"]), bool(t["exact"])) for n, t in config["tiers"].items()}
        parsed = cls(**values)
        ZoneInfo(parsed.timezone)
        parsed.tier(parsed.default_tier)
        return parsed


def make_release(
    store: ArtifactStore,
    *,
    schema: FeatureSchema,
    model: Artifact,
    index: Artifact,
    ads: AdTable,
    as_of: str,
    timezone: str,
    tiers: Mapping[str, Sequence[int]],
    default_tier: str = "standard",
    tuned: bool = False,
    parents: Mapping[str, str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    code_version: str = "1",
) -> Artifact:
    """Write a release; `tiers` maps names to beam widths, the tier `exact` is added.

    Raises:
        ValueError: model or index were made for another feature schema, or the default tier does not exist.
    """
    for part in (model, index):
        if part.manifest.schema_fingerprint != schema.fingerprint:
            raise ValueError(
                f"{part.manifest.kind}/{part.version}: schema fingerprint {part.manifest.schema_fingerprint} "
                f"is not the release's {schema.fingerprint}"
            )
    all_tiers = {name: Tier(tuple(int(b) for b in beams)) for name, beams in tiers.items()}
    config = ReleaseConfig(
        model=f"{model.manifest.kind}/{model.version}",
        index=f"{index.manifest.kind}/{index.version}",
        tuned=tuned,
        schema_fingerprint=schema.fingerprint,
        feature_service=f"retrieval_{schema.fingerprint}",
        as_of=as_of,
        watermark=int(ads.ad_id_N.shape[0]),
        timezone=timezone,
        default_tier=default_tier,
        tiers={**all_tiers, EXACT: Tier((), exact=True)},
        notes=dict(notes or {}),
    )
    config.tier(default_tier)
    with store.create("release", schema=schema, code_version=code_version) as draft:
        (draft.path / "schema.json").write_text(schema.to_json())
        write_ads(draft.path / "ads.safetensors", ads)
        draft.config = asdict(config)
        draft.parents = {"model": config.model, "index": config.index, **(parents or {})}
        draft.metrics, draft.audit = dict(metrics or {}), dict(audit or {})
    assert draft.result is not None
    return draft.result


def write_ads(path: Path, ads: AdTable) -> None:
    """Store an ad table as safetensors."""
    save_file({f.name: getattr(ads, f.name).contiguous() for f in fields(ads)}, path)


def read_ads(path: Path) -> AdTable:
    """Inverse of `write_ads`."""
    tensors: dict[str, torch.Tensor] = load_file(path)
    return AdTable(**tensors)


def part_of(store: ArtifactStore, reference: str, schema: FeatureSchema | None = None) -> Artifact:
    """Open and verify the artefact that `kind/version` names."""
    kind, _, version = reference.partition("/")
    return store.open(kind, version, schema=schema)


def copy_release(store: ArtifactStore, version: str, target: Path) -> None:
    """Copy a release, its model and its index into another artefact root, verified before the copy."""
    release = store.open("release", version)
    config = ReleaseConfig.from_manifest(release.manifest.config)
    for artifact in (release, part_of(store, config.model), part_of(store, config.index)):
        folder = target / artifact.manifest.kind / artifact.version
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(artifact.path, folder)
