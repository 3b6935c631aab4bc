"""The change of docs/adding_a_feature.md, made in a copy of the code and run on the home of a finished loop."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bentos.retrieval.runtime import Engine, Request
from dagster_project.lib.partitions import FACTS
from feature_repo.feature_schema import schema_for
from feature_repo.lake import Lake
from feature_repo.online import OnlineReader
from models.artifact import ArtifactStore
from models.release import read_pointer
from tests.conftest import ROOT, Loop
from tests.test_architecture import PACKAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHANGES = {
    "feature_repo/feature_schema.py": (
        '        f"{role}_{facts.main_label}_all",\n', '        f"{role}_{facts.main_label}_7d",\n',
    ),
    "feature_repo/statistics.py": (
        "            log_count(total_RK[:, FIRST_LABEL]),\n", "            log_count(week_RK[:, FIRST_LABEL]),\n",
    ),
}  # fmt: skip
CUT_US = int(FACTS.bounds(FACTS.days[-2])[1].timestamp()) * 1_000_000


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the change, and with nothing else changed."""
    copy = tmp_path_factory.mktemp("changed")
    page = (ROOT / "docs" / "adding_a_feature.md").read_text()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name, (place, added) in CHANGES.items():
        assert f" {place}+{added}" in page, "the page shows another change than the test makes"
        text = (copy / name).read_text()
        assert text.count(place) == 1
        (copy / name).write_text(text.replace(place, place + added))
    return copy


@pytest.fixture(scope="module")
def home(tiny_loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_loop.home, tmp_path_factory.mktemp("feature") / "home"))


def answer(home: Path, release: str) -> list[int]:
    """What this code, without the change, answers by a release to a user of the online store."""
    engine = Engine.load(ArtifactStore(home / "artifacts"), release)
    assert engine.schema == schema_for(FACTS)
    known = Lake(home / "lake").read("users", FACTS.days[0])["user_id"].to_pylist()
    (user,) = OnlineReader(home, engine.schema).read(known[:1], CUT_US)
    assert user.known
    return list(engine.retrieve([Request(user, FACTS.surfaces[0], 5, CUT_US)])[0].ad_ids)


def test_a_new_feature_is_backfilled_and_the_old_release_goes_on(home: Path, code: Path) -> None:
    old = read_pointer(home / "releases")
    assert old is not None
    before = answer(home, old.version)
    environment = {**os.environ, "MIRACH_HOME": str(home), "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dagster_project.run"], cwd=code, env=environment, capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    report = json.loads((home / "reports" / "run.json").read_text())
    made = {node: why for step in report["steps"] for node, why in step["made"].items()}
    assert not any(node.startswith("ingest/") for node in made), "the log was read again"
    for day in FACTS.days:
        assert made[f"features/statistics[{day}]"] == "code changed"
    assert f"gem/foundation_model[{FACTS.days[0]}]" in made

    new = read_pointer(home / "releases")
    assert new is not None
    assert (new.version != old.version, new.previous) == (True, old.version)
    schemas = [Engine.load(ArtifactStore(home / "artifacts"), v).schema for v in (old.version, new.version)]
    assert schemas[0].fingerprint != schemas[1].fingerprint
    added = {field.name for field in schemas[1].dense} - {field.name for field in schemas[0].dense}
    assert added == {"user_click_7d", "ad_click_7d"}
    features = Lake(home / "lake").read("user_features", FACTS.days[-1])
    assert any(value > 0 for value in features["dense_user_click_7d"].to_pylist()), "the column is empty"
    assert answer(home, old.version) == before, "the old release answers otherwise than before"
