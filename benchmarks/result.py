"""What every benchmark writes: values with the machine, commit, versions and seed they come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "dagster", "feast", "bentoml", "evidently", "duckdb", "pyarrow")


def describe_machine() -> str:
    """Processor count, memory and architecture, without names that identify a machine."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {gigabytes:.0f} GiB, {platform.machine()}, Python {platform.python_version()}"


def make_result(
    question: str, values: Mapping[str, Any], *, seed: int, headline: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Wrap measured values; `headline` rows (what, value) go into the README's table."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "question": question,
        "machine": describe_machine(),
        "commit": commit.stdout.strip() or "unknown",
        "versions": {name: version(name) for name in PACKAGES},
        "seed": seed,
        "headline": [list(row) for row in headline],
        "values": dict(values),
    }


def publish(result: Mapping[str, Any], json_path: Path | None) -> None:
    """Write the JSON file where one is asked for, and the result as the last line of standard output."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result["values"]) + "\n")
