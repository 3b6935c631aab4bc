"""Runs a module as `python -m` does, in a process that does not outlive its parent.

Standard input is a pipe that only the parent holds open: when the parent is gone, however it ended, the whole process
group is ended too. Without this a killed `make run` would leave a server, or a build that still writes, behind.

`python -P child.py <module> <arguments>`; started by `bentos.served` and `bentos.build` in a group of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 5.0
"""Between asking the group to end and ending it."""


def command(*arguments: str) -> list[str]:
    """Command line that runs a module as a child."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), *arguments]


def watch(descriptor: int) -> None:
    """Wait for the end of the parent's pipe, then end this process group."""
    while os.read(descriptor, 1024):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Run `arguments[0]` as a module with the others as its command line."""
    # The module may use standard input itself: it gets an empty one, the watcher keeps the pipe.
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=watch, args=(pipe,), name="parent", daemon=True).start()
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
