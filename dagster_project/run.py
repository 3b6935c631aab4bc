"""`make run`: the whole loop on one home. Exit code 0 done, 1 a stage failed, 2 the data or the settings are wrong."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dagster_project.lib.errors import StageFailedError
from dagster_project.lib.progress import TERMINAL_EVERY_S, listening
from dagster_project.lib.settings import Settings, read_settings
from models.artifact import write_json_atomically
from models.staging import sweep

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, style="red")


def main() -> int:
    """Run, print progress and one results table, write `<home>/reports/run.json`."""
    start, started = time.perf_counter(), time.time()
    try:
        settings = read_settings()
        with only_one(settings.home):
            sweep(settings.home)
            return _run(settings, start, started)
    except StageFailedError as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        errors.print("what was finished is kept: the next `make run` goes on from here")
        return 2 if error.user_error else 1
    except ValueError as error:
        errors.print(str(error), markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("stopped; the next `make run` goes on from here")
        return 130


def _run(settings: Settings, start: float, started: float) -> int:
    # Libraries warn about each other; nothing in it is for the person at the terminal.
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(logging.NullHandler())
    logging.getLogger("py.warnings").propagate = False
    from dagster_project.definitions import defs
    from dagster_project.lib.instance import open_instance
    from dagster_project.lib.loop import run_loop, summary
    from dagster_project.lib.partitions import FACTS
    from dagster_project.lib.resources import Home
    from dagster_project.lib.runner import Runner

    settings.write()
    console.print(
        f"[bold]mirach[/bold] {settings.source}, preset {settings.preset}, seed {settings.seed} in {settings.home}"
    )
    with open_instance(settings.home) as instance:
        runner = Runner(defs(), instance, Home.of(settings), _progress)
        try:
            with console.status("starting") as status, listening(status.update, TERMINAL_EVERY_S):
                run_loop(runner, FACTS)
        finally:
            report = summary(runner, FACTS, time.perf_counter() - start, started)
            write_json_atomically(settings.home / "reports" / "run.json", report)
    _print_summary(report, settings)
    return 0


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold the lock of a home; raises ValueError when another process does."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{home}: another run works on this home; wait for it or set MIRACH_HOME") from None
        yield


def _progress(step: Any) -> None:
    what = f"{step.partition:<24} {step.job:<10}"
    if not step.wall_s:
        return
    slowest = sorted(step.work_s.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.rpartition('/')[2]} {seconds:.1f}" for name, seconds in slowest if seconds >= 0.05)
    console.print(
        f"{what} {len(step.made):3d} made {step.skipped:3d} current {step.wall_s:7.1f} s   [dim]{parts}[/dim]",
        soft_wrap=True,
    )


def _print_summary(report: dict[str, Any], settings: Settings) -> None:
    table = Table(title=f"{report['source']}, {report['preset']}", title_justify="left")
    table.add_column("result")
    table.add_column("value", justify="right")
    for label, value in report["results"]:
        table.add_row(
            label, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        )
    table.add_section()
    table.add_row("made / current", f"{report['made']} / {report['skipped']}")
    table.add_row("wall time, s", f"{report['wall_s']:.1f}")
    if report["orchestration_share"] is not None:
        table.add_row("outside the stages", f"{report['orchestration_share']:.1%}")
    table.add_row("peak memory, MB", f"{report['peak_rss_mb']:,.0f}")
    console.print(table)
    home = os.path.relpath(settings.home)
    where = "" if home == f"data/{settings.source}" and settings.source == "simulator" else f" MIRACH_HOME={home}"
    screens = [
        ("make ui", "Dagster: runs, partitions, lineage, checks", "http://127.0.0.1:3000"),
        ("make serve", "the promoted release, answering requests", "http://127.0.0.1:3001/docs.json"),
        ("make monitor", "Evidently: drift, recall, index health", "http://127.0.0.1:8001"),
    ]
    for command, what, address in screens:
        console.print(f"{command + where:<{14 + len(where)}} {what:<44} {address}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
