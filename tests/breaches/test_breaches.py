"""Bad input: every breach is refused with file, column, count and reason, exit code 2, and an unchanged lake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.breaches.cases import CASES, Case
from tests.breaches.kuairand_files import Files, write_files
from tests.breaches.tree import tree
from tests.conftest import ROOT, run_loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What happened in each case, by name."""
    found = {}
    for source in ("kuairand", "folder"):
        command = [sys.executable, "-m", "tests.breaches.driver", source, str(tmp_path_factory.mktemp(source))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found |= {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}
    return found


def test_there_are_at_least_twenty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_breach_is_refused(outcomes: dict[str, dict[str, Any]], case: Case) -> None:
    found = outcomes[case.name]
    assert found["code"] == 2, found["said"]
    said = " ".join(found["said"].split())
    for words in (case.file, case.column, str(case.count), case.reason):
        assert words in said
    assert found["unchanged"], "the lake was touched"
    check = found["check"]
    assert not check["passed"]
    assert check["severity"] == "ERROR"
    assert (check["file"], check["column"], check["count"]) == (case.file, case.column, case.count)
    assert case.reason in check["reason"]
    assert " ".join(check["description"].split()) in said, "the screen says something else than the terminal"


def test_the_first_run_of_a_home_is_refused_as_a_process(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "raw")
    Files(folder).change("items", "item_id", r0=-5)
    home = tmp_path / "home"
    done = run_loop(home, DATA="kuairand", DATA_DIR=str(folder), PRESET="tiny")
    assert done.returncode == 2, done.stderr
    assert "items.parquet: ads/2022-04-25: ad_id_non_negative: 1 row refused (column ad_id:" in done.stderr
    assert "make run" in done.stderr
    assert tree(home / "lake") == {}, "the days before the breach must not be visible either"
    code = (
        "import json, sys; from pathlib import Path; from tests.breaches.driver import failed_check;"
        "sys.stdout.write(json.dumps(failed_check(Path(sys.argv[1]), 'ads')))"
    )
    environment = {**os.environ, "MIRACH_HOME": str(home), "DATA": "kuairand", "DATA_DIR": str(folder)}
    shown = subprocess.run(
        [sys.executable, "-c", code, str(home)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    check = json.loads(shown.stdout)
    assert (check["passed"], check["severity"]) == (False, "ERROR")
    assert (check["file"], check["column"], check["count"]) == ("items.parquet", "ad_id", 1)


def test_a_missing_file_is_named_before_anything_runs(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "raw")
    (folder / "users.parquet").unlink()
    done = run_loop(tmp_path / "home", DATA="kuairand", DATA_DIR=str(folder), PRESET="tiny")
    assert done.returncode == 2
    assert "lacks users.parquet" in done.stderr
    assert tree(tmp_path / "home" / "lake") == {}
