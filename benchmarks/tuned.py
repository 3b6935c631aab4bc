"""Values of the training that won the trials of a data set (`benchmarks.index_trials`), as benchmarks apply them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.result import ROOT

WINNERS = ROOT / "benchmarks" / "results" / "index_trials.json"
FAMILIES = ("none", "two_tower", "mixture")
"""Scorers with trials of their own; `none` is the retrieval model's, with an index or without."""
TRIED = {
    "laptop": "laptop", "simulator": "laptop", "million": "laptop", "beauty": "beauty", "beauty_shuffled": "beauty",
    "sports": "beauty", "sports_shuffled": "beauty", "kuairand": "kuairand",
}  # fmt: skip
"""Data set -> the one whose trials choose its values; the tiny world keeps its preset."""


def tuned(family: str, data: str) -> dict[str, Any]:
    """Values that beat the preset's for a family on a data set; none where no trials are committed, or it won."""
    found = _read(WINNERS).get(TRIED.get(data, ""), {}).get(family)
    return dict(found["trials"][found["winner"]]["values"]) if found and found["winner"] else {}


def suffix(values: Mapping[str, Any]) -> str:
    """The part of a cell's name that tells its values apart."""
    return "".join(f"-{name}={value}" for name, value in sorted(values.items()))


@cache
def _read(path: Path) -> dict[str, Any]:
    """Data set -> family -> its trials."""
    return dict(json.loads(path.read_text())["values"]["per_data"]) if path.exists() else {}
