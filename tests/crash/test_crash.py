"""`kill -9` at fifty points of `make run`: the last good state stays, and the end is that of an undisturbed run.

One home where the tiny loop runs through, and one where it is killed again and again and goes on; when it got to its
end before the last kill, the others hit a home of their own. At the end the same must be true of all: data versions
of every (asset, partition), SHA-256 of every file of the lake, versions, checksums, parents and configuration of every
artefact, what each partition stands for, the Bento's files, and the release pointer. Left out is what a live service
answered (`state.LIVE`). `MIRACH_CRASH_HOME` keeps the homes in a folder, `MIRACH_CRASH_SEED` draws other points,
`MIRACH_CRASH_EVERY=3` takes every third of them.
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
EVERY = int(os.environ.get("MIRACH_CRASH_EVERY", "1"))
KILLS = len(range(0, 50, EVERY))


def plans(seed: int) -> Iterator[dict[str, Any]]:
    """Fifty kills in the order of the loop: ingest, features, training, transfer, release with its Bento, reports."""
    draw = random.Random(seed)
    parts = [
        ("start", 2, 5), ("ingest", 5, 500), ("daily", 22, 110), ("transfer", 2, 6), ("verticals", 2, 15),
        ("release", 6, 12), ("build", 2, 0), ("serve", 2, 0), ("release", 2, 4), ("held_out", 1, 3),
        ("monitoring", 4, 15),
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
def killed(folder: Path) -> list[Path]:
    """Homes that were killed and went on, fifty times in all, and then finished."""
    log, seed = folder / "killed.log", int(os.environ.get("MIRACH_CRASH_SEED", "0"))
    homes, waiting, num_killed = [folder / "killed-0"], list(plans(seed))[::EVERY], 0
    while num_killed < KILLS:
        plan = waiting.pop(0)
        done = run(homes[-1], log, plan)
        where = f"kill {num_killed}, {plan}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert done.returncode in (0, -signal.SIGKILL), f"failed ({done.returncode}): {where}"
        if done.returncode == 0:  # it got past the point: the loop is done, the other kills hit a new one
            homes.append(folder / f"killed-{len(homes)}")
            waiting = list(plans(seed + len(homes)))[::EVERY]
            continue
        num_killed += 1
        check_good(homes[-1])
        assert not orphans(homes[-1]), where
    done = run(homes[-1], log)
    assert done.returncode == 0, f"the last run failed: {done.stderr[-3000:]}"
    return homes


def test_the_end_is_that_of_an_undisturbed_run(undisturbed: Path, killed: list[Path]) -> None:
    left = state(undisturbed)
    for home in killed:
        right = state(home)
        assert difference(left, right) == []
        assert {name: len(values) for name, values in left.items()} == {n: len(v) for n, v in right.items()}
    assert len(left["data versions"]) > 150
    assert len(left["artefacts"]) > 20


def test_kills_hit_every_phase_and_training_went_on_from_checkpoints(killed: list[Path], folder: Path) -> None:
    log = entries(folder / "killed.log")
    died = [entry for entry in log if entry["died"]]
    assert len(died) == KILLS
    if EVERY > 1:
        pytest.skip("a part of the points does not hit every phase")
    jobs = Counter(entry["plan"]["job"] for entry in died)
    assert set(jobs) >= {"start", "ingest", "daily", "release", "build", "serve"}
    assert sum(len(entry["resumed"]) for entry in log) >= 1, "no training was killed between two checkpoints"


def test_nothing_half_done_stays(killed: list[Path]) -> None:
    assert [leftovers(home) for home in killed] == [[] for _ in killed]
