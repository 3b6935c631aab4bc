"""How long does the whole loop take, and how much of it is orchestration?

Usage: `python -m benchmarks.loop [--profile smoke|full] [--source NAME] [--data DIR] [--home DIR] [--json FILE]`.
Runs the loop twice in child processes on one empty home, so that memory and start-up count as a user sees
them; the second run finds everything current. `smoke` is the tiny world (about a minute), `full` the laptop
world (about ten minutes). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import ROOT, make_result, publish

PRESETS = {"smoke": "tiny", "full": "laptop"}


def run_once(home: Path, source: str, preset: str, data: Path | None, seed: int) -> tuple[float, dict[str, Any]]:
    """Run the loop once on `home`; seconds of wall time of the whole process, and the run's own report.

    Raises:
        RuntimeError: the run failed; what it printed is in the message.
    """
    environment = {
        **os.environ, "MIRACH_HOME": str(home), "DAGSTER_HOME": str(home / "dagster"),
        "BENTOML_HOME": str(home / "bentoml"), "DATA": source, "PRESET": preset, "SEED": str(seed),
        "DATA_DIR": str(data) if data else "", "DAGSTER_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
        "BENTOML_DO_NOT_TRACK": "True",
    }  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dagster_project.run"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall_s = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"the loop ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads((home / "reports" / "run.json").read_text())
    return wall_s, report


def measure(home: Path, source: str, preset: str, data: Path | None, seed: int) -> dict[str, Any]:
    """Run twice and compare: everything is made in the first run and nothing in the second.

    Raises:
        RuntimeError: a run failed, or the second one made something again.
    """
    first_s, first = run_once(home, source, preset, data, seed)
    second_s, second = run_once(home, source, preset, data, seed)
    if second["made"]:
        raise RuntimeError(f"the second run made {second['made']} nodes again: {second['steps']}")
    return {
        "source": source,
        "preset": preset,
        "wall_s": round(first_s, 1),
        "second_run_s": round(second_s, 1),
        "orchestration_share": first["orchestration_share"],
        "peak_rss_mb": first["peak_rss_mb"],
        "made": first["made"],
        "stage_s": first["stage_s"],
        "results": dict(first["results"]),
    }


def headline(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of the README's table."""
    name = f"{values['source']}, {values['preset']}"
    return [
        (f"whole loop after installation ({name})", f"{values['wall_s'] / 60:.1f} min"),
        ("of it outside the stages' own work", f"{values['orchestration_share']:.1%}"),
        ("second run, nothing changed", f"{values['second_run_s']:.0f} s"),
        ("peak memory", f"{values['peak_rss_mb'] / 1000:.1f} GB"),
        *((what, f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v))
          for what, v in values["results"].items()),
    ]  # fmt: skip


def main() -> int:
    """Measure, print a table, then one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=sorted(PRESETS), default="full")
    parser.add_argument("--source", default="simulator")
    parser.add_argument("--data", type=Path, help="folder of the source's raw files")
    parser.add_argument("--home", type=Path, help="an empty folder to keep; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.home is not None and arguments.home.exists() and any(arguments.home.iterdir()):
        parser.error(f"--home: {arguments.home} is not empty")
    with tempfile.TemporaryDirectory() as folder:
        home = (arguments.home or Path(folder) / "home").absolute()
        data = arguments.data.absolute() if arguments.data else None
        values = measure(home, arguments.source, PRESETS[arguments.profile], data, arguments.seed)
    rows = headline(values)
    width = max(len(what) for what, _ in rows)
    for what, value in rows:
        sys.stdout.write(f"{what:<{width}}  {value}\n")
    question = "How long does the whole loop take, and how much of it is orchestration?"
    publish(make_result(question, values, seed=arguments.seed, headline=rows), arguments.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
