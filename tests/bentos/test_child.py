"""A child ends with its parent, however the parent ended, and its own children with it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bentos.child import command
from tests.conftest import ROOT


@pytest.fixture
def module(tmp_path: Path) -> dict[str, str]:
    """A module that starts a child of its own, says its process ids, and waits; and the environment that finds it."""
    (tmp_path / "waits.py").write_text(
        textwrap.dedent(
            """
            import os, subprocess, sys, time
            inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            with open(sys.argv[1] + ".tmp", "w") as file:
                file.write(f"{os.getpid()} {inner.pid} {len(sys.argv)} {sys.stdin.read()!r}")
            os.replace(sys.argv[1] + ".tmp", sys.argv[1])
            time.sleep(300)
            """
        )
    )
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def waiting(condition: object, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.1)
    return False


def test_a_killed_parent_takes_child_and_grandchild_with_it(module: dict[str, str], tmp_path: Path) -> None:
    said = tmp_path / "said"
    parent = textwrap.dedent(
        f"""
        import subprocess, time
        subprocess.Popen({command("waits", str(said))!r}, stdin=subprocess.PIPE, start_new_session=True)
        time.sleep(300)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env=module, cwd=tmp_path)
    assert waiting(said.exists)
    child, grandchild, arguments, read = said.read_text().split()
    assert (arguments, read) == ("2", "''"), "the module has its own command line and an empty standard input"
    assert alive(int(child))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert waiting(lambda: not alive(int(child)) and not alive(int(grandchild)))


def test_a_child_whose_parent_lives_goes_on_and_ends_by_itself(module: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit(7)")
    done = subprocess.Popen(command("ends"), stdin=subprocess.PIPE, env=module, start_new_session=True)
    assert done.wait(60) == 7
    assert done.stdin is not None
    done.stdin.close()
