"""Shared set-up: nothing phones home, nothing touches a real home, and one tiny loop a session."""

import fcntl
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

os.environ.update(
    DAGSTER_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", BENTOML_DO_NOT_TRACK="True", RAY_USAGE_STATS_ENABLED="0"
)  # fmt: skip
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Definitions read these when they are imported: tests must not see a home that somebody uses.
os.environ["MIRACH_HOME"] = str(Path(tempfile.gettempdir()) / "mirach-tests-have-no-home")
os.environ.update(DATA="simulator", PRESET="tiny", SEED="0", DATA_DIR="")
os.environ.pop("DAGSTER_HOME", None)
os.environ.pop("BENTOML_HOME", None)


@dataclass(frozen=True)
class Loop:
    """A home in which the tiny loop ran once, and what the run said."""

    home: Path
    output: str

    def environment(self) -> dict[str, str]:
        """Environment of commands on this home."""
        return {**os.environ, "MIRACH_HOME": str(self.home), "COLUMNS": "160"}

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """`make run` once more, without make."""
        return run_loop(self.home, **variables)


def run_loop(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The loop in a process of its own on a home."""
    environment = {**os.environ, "MIRACH_HOME": str(home), "COLUMNS": "160", **variables}
    command = [sys.executable, "-m", "dagster_project.run"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="session")
def tiny_loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """The whole tiny loop through the Dagster jobs, once for all workers of a session."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    home, said = shared / "tiny-home", shared / "tiny-home.log"
    with _locked(shared / "tiny-home.lock"):
        if not said.exists():
            done = run_loop(home)
            if done.returncode != 0:
                pytest.fail(f"the tiny loop failed ({done.returncode}):\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
            said.write_text(done.stdout)
    return Loop(home, said.read_text())


@pytest.fixture(scope="session")
def tiny_home(tiny_loop: Loop) -> Path:
    """The home that the tiny loop left."""
    return tiny_loop.home


class _locked:  # noqa: N801
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        self.file = self.path.open("w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        self.file.close()
