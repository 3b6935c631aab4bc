import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dagster_project.lib.code import code_version
from dagster_project.lib.instance import DAGSTER_YAML, open_instance
from dagster_project.lib.resources import Home
from dagster_project.lib.settings import read_settings
from tests.conftest import run_loop


def test_settings_come_from_the_environment_then_from_the_home(tmp_path):
    first = read_settings({"MIRACH_HOME": str(tmp_path), "DATA": "kuairand", "DATA_DIR": str(tmp_path), "SEED": "3"})
    assert (first.source, first.preset, first.seed, first.data_dir) == ("kuairand", "laptop", 3, tmp_path)
    first.write()
    assert read_settings({"MIRACH_HOME": str(tmp_path)}) == first
    assert read_settings({"MIRACH_HOME": str(tmp_path), "SEED": "4"}).seed == 4


def test_settings_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="PRESET: 'huge' is unknown; known presets: tiny, laptop"):
        read_settings({"MIRACH_HOME": str(tmp_path), "PRESET": "huge"})
    with pytest.raises(ValueError, match="SEED: '-1' is not a whole number"):
        read_settings({"MIRACH_HOME": str(tmp_path), "SEED": "-1"})


def test_only_ingest_depends_on_the_folder_of_raw_files():
    here, there = (Home(root="h", source="s", preset="tiny", seed=0, data_dir=d) for d in ("/a", "/b"))
    assert here.settings_digest("ingest") != there.settings_digest("ingest")
    assert here.settings_digest("gem") == there.settings_digest("gem")
    assert here.settings_digest("gem") != Home(root="h", source="s", preset="tiny", seed=1).settings_digest("gem")


def test_code_versions_follow_meaning(tmp_path, monkeypatch):
    monkeypatch.setattr("dagster_project.lib.code.ROOT", tmp_path)
    (tmp_path / "a.py").write_text('"""Doc."""\nx = 1  # one\n')
    first = code_version("a.py")
    (tmp_path / "b.py").write_text('"""Other doc."""\n# comment\nx = 1\n')
    assert _version(tmp_path, "b.py") == first
    (tmp_path / "c.py").write_text("x = 2\n")
    assert _version(tmp_path, "c.py") != first
    with pytest.raises(ValueError, match=r"missing\.py does not exist"):
        code_version("missing.py")


def _version(root: Path, name: str) -> str:
    """The version as if the file were called a.py: paths count as well."""
    content = (root / name).read_text()
    (root / "a.py").write_text(content)
    code_version.__globals__["_file_hash"].cache_clear()
    return code_version("a.py")


def test_the_instance_is_deliberate_and_persistent(tmp_path):
    values = yaml.safe_load(DAGSTER_YAML)
    assert values["telemetry"] == {"enabled": False}
    assert values["nux"] == {"enabled": False}
    with open_instance(tmp_path) as instance:
        assert not instance.telemetry_enabled
        assert instance.run_retries_enabled
        assert instance.is_persistent
    assert (tmp_path / "dagster" / "dagster.yaml").exists()


def test_wrong_settings_exit_with_2(tmp_path):
    done = run_loop(tmp_path / "home", PRESET="huge")
    assert done.returncode == 2
    assert "known presets: tiny, laptop" in done.stderr


def test_a_home_belongs_to_one_run_and_one_world(tmp_path):
    home = tmp_path / "home"
    (home / "lake").mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl,sys,time; f=open({str(home / 'run.lock')!r},'w');"
         "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        done = run_loop(home)
    finally:
        holder.kill()
        holder.wait()
    assert done.returncode == 2
    assert "another run works on this home" in done.stderr


def test_references_name_artefacts_by_partition(tmp_path):
    home = Home(root=str(tmp_path), source="s", preset="tiny", seed=0)
    assert not home.remembers("gem/foundation_model", "2026-01-05")
    with pytest.raises(ValueError, match=r"gem/foundation_model\[2026-01-05\] was not made yet"):
        home.artifact("gem/foundation_model", "2026-01-05")


def test_json_settings_hold_no_home(tmp_path):
    read_settings({"MIRACH_HOME": str(tmp_path), "PRESET": "tiny"}).write()
    assert "home" not in json.loads((tmp_path / "settings.json").read_text())
