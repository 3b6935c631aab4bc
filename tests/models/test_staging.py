"""Half-done work: gone after an error, swept after a kill, left alone while its process lives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from models.staging import STAGING, staging, sweep, unused, write_atomically
from tests.conftest import ROOT


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), staging(tmp_path / "new") as folder:
        (folder / "half").write_text("x")
        raise OSError("disk full")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_renamed_folder_stays(tmp_path: Path) -> None:
    with staging(tmp_path) as folder:
        (folder / "whole").write_text("x")
        os.replace(folder, tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


def test_a_write_replaces_in_one_step(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b.json", b"1")
    write_atomically(tmp_path / "a" / "b.json", b"2")
    assert (tmp_path / "a" / "b.json").read_bytes() == b"2"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b.json"]


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from models.staging import staging, unused\n"
        "root = Path(sys.argv[1])\n"
        "with staging(root / 'artifacts') as folder:\n"
        "    (folder / 'half').write_text('x'); unused(root / 'artifacts').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    mine = unused(tmp_path)
    mine.mkdir()
    of_init = tmp_path / f"{STAGING}1-abc"
    of_init.write_text("x")
    (tmp_path / "artifacts" / "kept").write_text("x")
    assert sweep(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(["artifacts", "kept", mine.name, of_init.name])


def test_processes_of_others_count_as_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: int, number: int) -> None:
        raise PermissionError

    left = unused(tmp_path)
    left.write_text("x")
    monkeypatch.setattr(os, "kill", refused)
    assert sweep(tmp_path) == 0
    assert left.exists()
