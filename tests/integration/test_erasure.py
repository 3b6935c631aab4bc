"""`make erase` on the home of a finished loop: no file holds the user, the release serves, the next run goes on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bentos.retrieval.runtime import Engine, Request
from dagster_project.lib.instance import open_instance
from dagster_project.lib.partitions import FACTS
from feature_repo.lake import Lake
from feature_repo.online import OnlineReader
from models.artifact import ArtifactStore
from models.release import read_pointer
from tests.conftest import ROOT, Loop, run_loop
from tests.integration.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CUT_US = int(FACTS.bounds(FACTS.days[-2])[1].timestamp()) * 1_000_000


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MIRACH_HOME": str(home), "COLUMNS": "160"}
    line = [sys.executable, "-m", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def home(tiny_loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished home; runs refused with example rows of the user are part of its history."""
    return Path(shutil.copytree(tiny_loop.home, tmp_path_factory.mktemp("erasure") / "home"))


@pytest.fixture(scope="module")
def user_id(home: Path) -> int:
    """A user of the request log, known since the first days."""
    logged = Lake(home / "lake").read("request_log", FACTS.days[-1])["user_id"].to_pylist()
    known = set(Lake(home / "lake").read("impressions", FACTS.days[0])["user_id"].to_pylist())
    return int(next(user for user in logged if user in known))


def test_everything_about_a_user_goes_and_comes_anew(home: Path, user_id: int) -> None:
    before = traces(home, user_id)
    for part in ("lake/impressions", "lake/user_features", "feast/online.db", "logs/requests", "lake/request_log"):
        assert any(part in place for place in before), part
    release = read_pointer(home / "releases")
    assert release is not None

    done = command(home, "dagster_project.erase", "--user", str(user_id))
    assert done.returncode == 0, done.stderr
    assert "logged requests" in done.stdout
    assert traces(home, user_id) == []

    assert answers(home, release.version), "the release does not serve any more"
    again = command(home, "dagster_project.erase", "--user", str(user_id))
    assert again.returncode == 0
    assert read_pointer(home / "releases") == release

    ran = run_loop(home)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((home / "reports" / "run.json").read_text())
    made = {node.partition("[")[0] for step in report["steps"] for node in step["made"]}
    assert {"features/catalogue", "features/training_frame", "gem/foundation_model", "tuning/tuned_release"} <= made
    assert not any(name.startswith("ingest/") for name in made), "the erased rows must not be read again"
    assert traces(home, user_id) == []
    new = read_pointer(home / "releases")
    assert new is not None
    assert (new.version != release.version, new.previous) == (True, release.version)
    assert answers(home, release.version), "the old release does not serve beside the new one"


def answers(home: Path, release: str) -> list[int]:
    """What a release answers a user of the online store."""
    engine = Engine.load(ArtifactStore(home / "artifacts"), release)
    users = Lake(home / "lake").read("users", FACTS.days[0])["user_id"].to_pylist()
    (user,) = OnlineReader(home, engine.schema).read([users[1]], CUT_US)
    assert user.known
    (answer,) = engine.retrieve([Request(user, FACTS.surfaces[0], 5, CUT_US)])
    return list(answer.ad_ids)


def test_an_unknown_user_changes_nothing(home: Path) -> None:
    with open_instance(home):
        pass
    pointer = (home / "releases" / "current.json").read_text()
    done = command(home, "dagster_project.erase", "--user", "999999999999")
    assert done.returncode == 0, done.stderr
    assert "rows                 0" in done.stdout
    assert (home / "releases" / "current.json").read_text() == pointer


def test_a_home_without_a_run_says_so(tmp_path: Path) -> None:
    done = command(tmp_path / "nothing", "dagster_project.erase", "--user", "1")
    assert done.returncode == 2
    assert "nothing was made here yet" in done.stderr
