"""`make run` in a process that kills itself with SIGKILL at a chosen step.

Steps are the moments at which files of the home change: renames, links, removals, syncs, files opened for writing,
Parquet files written. They are counted by job; the process dies before or after one of them, or some time after it
started a `bentoml build` or `bentoml serve`. Nothing of this is in the product: the functions are wrapped here.

`python -m tests.crash.killer`, with `CRASH_PLAN` (JSON of `Plan`) and `CRASH_LOG` (a file that gets a line a process).
"""

import builtins
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """When to die. The default is never."""

    job: str = ""
    """Job whose steps are counted (`start` before the first one), or `build` / `serve` for BentoML's processes."""
    step: int = 0
    after: bool = False
    """After the step instead of before it."""
    seconds: float = 0.0
    """For `build` and `serve`: how long after the start of that process."""


@dataclass
class Counts:
    """What happened so far."""

    plan: Plan
    home: str
    log: str
    job: str = "start"
    steps: Counter[str] = field(default_factory=Counter)
    resumed: list[int] = field(default_factory=list)
    """Steps at which trainings began, where that was not 0."""

    def write_log(self, where: str) -> None:
        line = json.dumps({"steps": self.steps, "resumed": self.resumed, "died": where, "plan": asdict(self.plan)})
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)

    def die(self, where: str) -> None:
        self.write_log(where)
        os.kill(os.getpid(), signal.SIGKILL)

    def run(self, what: str, path: str, call: Callable[[], Any]) -> Any:
        """Run one step, and die before or after it when it is the one."""
        self.steps[self.job] += 1
        due = self.job == self.plan.job and self.steps[self.job] == self.plan.step
        if due and not self.plan.after:
            self.die(f"before {what} {path.removeprefix(self.home)}")
        try:
            return call()
        finally:
            if due:
                self.die(f"after {what} {path.removeprefix(self.home)}")


COUNTS = Counts(
    Plan(**json.loads(os.environ.get("CRASH_PLAN", "{}"))), os.environ["MIRACH_HOME"], os.environ["CRASH_LOG"]
)


def watch(module: Any, name: str, place: int = 0) -> None:
    """Count calls of a function whose argument number `place` is a path of the home."""
    original: Callable[..., Any] = getattr(module, name)

    def watched(*values: Any, **named: Any) -> Any:
        path = str(values[place]) if len(values) > place and isinstance(values[place], (str, Path)) else ""
        if not path.startswith(COUNTS.home) or "/dagster/storage" in path:
            return original(*values, **named)
        return COUNTS.run(name, path, lambda: original(*values, **named))

    setattr(module, name, watched)


def watch_open() -> None:
    """Count files of the home that are opened for writing."""
    original = builtins.open

    def watched(file: Any, mode: str = "r", *values: Any, **named: Any) -> Any:
        path = str(file) if isinstance(file, (str, Path)) else ""
        if not path.startswith(COUNTS.home) or "/dagster/storage" in path or not set(mode) & set("wax+"):
            return original(file, mode, *values, **named)
        return COUNTS.run("open", path, lambda: original(file, mode, *values, **named))

    builtins.open = io.open = watched  # type: ignore[assignment]


def watch_processes() -> None:
    """Die some time after BentoML was started, if that is the plan."""
    original = subprocess.Popen.__init__

    def watched(self: Any, command: Any, *values: Any, **named: Any) -> None:
        original(self, command, *values, **named)
        if isinstance(command, list) and "bentoml" in command and COUNTS.plan.job in command:
            threading.Timer(
                COUNTS.plan.seconds, COUNTS.die, [f"{COUNTS.plan.job} after {COUNTS.plan.seconds} s"]
            ).start()

    subprocess.Popen.__init__ = watched  # type: ignore[method-assign]


def watch_jobs() -> None:
    """Know the job that runs; checkpoints every few steps, and a note of trainings that went on from one."""
    from dagster_project.lib.runner import Runner

    original = Runner._execute

    def watched(self: Runner, job: str, *values: Any) -> None:
        COUNTS.job = job
        if job == "daily":
            from dagster_project.lib import gem_stages
            from models.training import loop

            gem_stages.CHECKPOINT_STEPS = 3
            if not hasattr(loop.load_checkpoint, "watched"):
                loop.load_checkpoint = _watched_load(loop.load_checkpoint)  # type: ignore[assignment]
        original(self, job, *values)

    Runner._execute = watched  # type: ignore[method-assign]


def _watched_load(original: Callable[..., tuple[int, float]]) -> Callable[..., tuple[int, float]]:
    def load(*values: Any) -> tuple[int, float]:
        step, loss_sum = original(*values)
        if step:
            COUNTS.resumed.append(step)
        return step, loss_sum

    load.watched = True  # type: ignore[attr-defined]
    return load


def main() -> int:
    import pyarrow.parquet as pq

    for module, name, place in (
        (os, "replace", 1), (os, "rename", 1), (os, "link", 1), (os, "unlink", 0), (os, "remove", 0),
        (os, "mkdir", 0), (shutil, "rmtree", 0), (pq, "write_table", 1),
    ):  # fmt: skip
        watch(module, name, place)
    watch_open()
    watch_processes()
    from dagster_project import run

    watch_jobs()
    code = run.main()
    COUNTS.write_log("")
    return code


if __name__ == "__main__":
    sys.exit(main())
