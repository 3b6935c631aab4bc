"""Open a source by name."""

from __future__ import annotations

import functools
from pathlib import Path

from feature_repo.adapters.base import Source

SOURCES = ("simulator", "kuairand", "amazon_beauty", "amazon_sports", "generic")
"""Names that `open_source` knows."""


@functools.lru_cache(maxsize=2)
def open_source(name: str, *, preset: str = "laptop", data_dir: Path | None = None, seed: int = 0) -> Source:
    """Open a source. Sources are read-only, so equal arguments give the same (cached) object.

    Args:
        name: one of `SOURCES`.
        preset: size of the simulated world (`tiny`, `laptop`); other sources ignore it.
        data_dir: folder of the source's files, required by sources that read files; `generic` also takes the mapping
            file itself.
        seed: of the simulated world; other sources ignore it.

    Raises:
        ValueError: the name or preset is unknown, or `data_dir` is missing or lacks a file.
    """
    if name == "simulator":
        from feature_repo.simulator.source import SimulatorSource

        return SimulatorSource.open(preset, seed)
    if name not in SOURCES:
        raise ValueError(f"source: {name!r} is unknown; known sources: {', '.join(SOURCES)}")
    if data_dir is None:
        raise ValueError(f"data_dir: the {name} source needs the folder that holds its files (DATA_DIR)")
    if name == "kuairand":
        from feature_repo.adapters.kuairand import KuaiRandSource

        return KuaiRandSource(data_dir)
    if name == "generic":
        from feature_repo.adapters.generic import GenericSource

        return GenericSource(data_dir)
    from feature_repo.adapters.amazon_reviews import AmazonReviews

    return AmazonReviews(name, data_dir)
