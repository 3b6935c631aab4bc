"""Breaks good input in every way, each time runs the real `make run` on the home that holds the good data, and says
what happened. A process of its own: definitions belong to one source.

`python -m tests.breaches.driver <source> <work folder>`; prints one JSON object a line.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.breaches.cases import CASES
from tests.breaches.contract_folder import FolderSource, write_folder
from tests.breaches.kuairand_files import write_files
from tests.breaches.tree import tree


def prepare(source: str, work: Path) -> Path:
    """Good files, and the settings that the definitions read when they are imported."""
    good, raw = work / "good", work / "raw"
    (write_files if source == "kuairand" else write_folder)(good)
    shutil.copytree(good, raw)
    os.environ.update(
        MIRACH_HOME=str(work / "home"), DATA=source, DATA_DIR=str(raw), PRESET="tiny", SEED="0", COLUMNS="200"
    )
    if source == "folder":
        from feature_repo.adapters import registry

        registry.open_source = lambda name, **options: FolderSource(options["data_dir"])
    return good


def ingest_good() -> None:
    """What `make run` does first, on the good files."""
    from dagster_project.definitions import defs
    from dagster_project.lib.instance import open_instance
    from dagster_project.lib.partitions import FACTS
    from dagster_project.lib.resources import Home
    from dagster_project.lib.runner import Runner
    from dagster_project.lib.settings import read_settings

    settings = read_settings()
    settings.write()
    with open_instance(settings.home) as instance:
        runner = Runner(defs(), instance, Home.of(settings), lambda step: None)
        runner.run_days("ingest", FACTS.days, runner.keys("ingest"))


def start_anew() -> None:
    """Forget what a new process would not know."""
    from dagster_project.lib import resources
    from feature_repo.adapters import registry

    resources._stamps.cache_clear()
    if hasattr(registry.open_source, "cache_clear"):
        registry.open_source.cache_clear()


def failed_check(home: Path, table: str) -> dict[str, Any]:
    """The latest execution of a table's `contract` check, as the UI shows it."""
    import dagster as dg

    from dagster_project.lib.instance import open_instance

    with open_instance(home) as instance:
        key = dg.AssetCheckKey(dg.AssetKey(["ingest", table]), "contract")
        (record,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        evaluation = record.event.dagster_event.event_specific_data
        assert isinstance(evaluation, dg.AssetCheckEvaluation)
        return {
            "passed": evaluation.passed, "severity": evaluation.severity.value, "description": evaluation.description,
            **{name: evaluation.metadata[name].value for name in ("file", "column", "count", "reason")},
        }  # fmt: skip


def main(source: str, work: Path) -> None:
    good = prepare(source, work)
    ingest_good()
    from dagster_project import run

    for case in (case for case in CASES if case.source == source):
        shutil.rmtree(work / "raw")
        shutil.copytree(good, work / "raw")
        case.make(work / "raw")
        start_anew()
        before, said = tree(work / "home" / "lake"), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = run.main()
        found = {
            "name": case.name, "code": code, "said": said.getvalue(),
            "unchanged": tree(work / "home" / "lake") == before and len(before) > 5,
            "check": failed_check(work / "home", case.table),
        }  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
