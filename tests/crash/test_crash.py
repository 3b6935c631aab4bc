"""`kill -9` at fifty points of `make run`: the last good state stays, and the end is that of an undisturbed run.

Two homes: one where the tiny loop runs through, one where it is killed fifty times in a row and continued. At the end
the same must be true of both: data versions of every (asset, partition), SHA-256 of every file of the lake, versions,
checksums, parents and configuration of every artefact, what each partition stands for, the Bento's files, and the
release pointer. `MIRACH_CRASH_HOME` keeps the homes in a folder, `MIRACH_CRASH_SEED` draws other points.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.crash.state import check_good, difference, leftovers, orphans, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = 50


def plans(seed: int) -> Iterator[dict[str, Any]]:
    """Fifty kills in the order of the loop: ingest, features, training, transfer, release with its Bento, reports."""
    draw = random.Random(seed)
    parts = [
        ("start", 2, 5), ("ingest", 5, 500), ("daily", 22, 110), ("transfer", 2, 6), ("verticals", 2, 15),
        ("release", 4, 20), ("build", 2, 0), ("serve", 2, 0), ("release", 5, 20), ("held_out", 1, 3),
        ("monitoring", 3, 20),
    ]  # fmt: skip
    for job, number, most in parts:
        for _ in range(number):
            if most:
                yield {"job": job, "step": draw.randint(1, most), "after": draw.random() < 0.5}
            else:
                yield {"job": job, "seconds": round(draw.uniform(0.2, 2.5), 2)}


def run(home: Path, log: Path, plan: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "MIRACH_HOME": str(home), "CRASH_LOG": str(log), "CRASH_PLAN": json.dumps(plan or {}),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.crash.killer"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("MIRACH_CRASH_HOME")
    return Path(kept) if kept else tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    home = folder / "undisturbed"
    if not (home / "reports" / "run.json").exists():
        done = run(home, folder / "undisturbed.log")
        assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """A home after fifty kills in a row and one last run."""
    home, log = folder / "killed", folder / "killed.log"
    for number, plan in enumerate(plans(int(os.environ.get("MIRACH_CRASH_SEED", "0")))):
        done = run(home, log, plan)
        where = f"kill {number}, {plan}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert done.returncode == -signal.SIGKILL, f"was not killed ({done.returncode}): {where}"
        check_good(home)
        assert not orphans(home), where
    done = run(home, log)
    assert done.returncode == 0, f"the last run failed: {done.stderr[-3000:]}"
    return home


def test_the_end_is_that_of_an_undisturbed_run(undisturbed: Path, killed: Path) -> None:
    left, right = state(undisturbed), state(killed)
    assert {name: len(values) for name, values in left.items()} == {n: len(v) for n, v in right.items()}
    assert difference(left, right) == []
    assert len(left["data versions"]) > 150
    assert len(left["artefacts"]) > 20


def test_kills_hit_every_phase_and_training_went_on_from_checkpoints(killed: Path, folder: Path) -> None:
    log = entries(folder / "killed.log")
    died = [entry for entry in log if entry["died"]]
    assert len(died) == KILLS
    jobs = Counter(entry["plan"]["job"] for entry in died)
    assert set(jobs) >= {"start", "ingest", "daily", "release", "build", "serve", "monitoring"}
    assert sum(len(entry["resumed"]) for entry in log) >= 1, "no training was killed between two checkpoints"


def test_nothing_half_done_stays(killed: Path) -> None:
    assert leftovers(killed) == []
