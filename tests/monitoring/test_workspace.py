from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bentos.served import free_port
from monitoring.recall import audit_rows, recall_report
from monitoring.workspace import plain, repair, ui_command, workspace_of
from tests.monitoring.test_recall import REQUESTS


def test_plain_values_are_json() -> None:
    value = plain({"count": np.float64(3.0), "deep": {"share": np.int64(2)}, 1: "x"})
    assert json.loads(json.dumps(value)) == {"count": 3.0, "deep": {"share": 2}, "1": "x"}


def test_what_a_killed_report_left_is_repaired(tmp_path: Path) -> None:
    recall_report(audit_rows(REQUESTS), day="2026-01-05", floor=0.1, home=tmp_path)
    workspace = workspace_of(tmp_path)
    assert repair(workspace) == []
    (project,) = (path for path in workspace.iterdir() if path.is_dir())
    (run,) = project.glob("snapshots/*.json")
    half = run.with_name("01a22f13-5ec1-7f19-8df9-159f710bbede.json")
    half.write_text(run.read_text()[:100])
    assert repair(workspace) == [half]
    for name, content in (("metadata.json", ""), ("dashboard.json", '{"panels": []}')):
        unfinished = workspace / "01a22f14-363d-7351-bcbe-74ad7d860647"
        shutil.copytree(project, unfinished)
        shutil.rmtree(unfinished / "snapshots")
        (unfinished / name).write_text(content)
        assert repair(workspace) == [unfinished]
    recall_report(audit_rows(REQUESTS), day="2026-01-06", floor=0.1, home=tmp_path)
    assert len(list(project.glob("snapshots/*.json"))) == 2


@pytest.mark.slow
def test_the_ui_shows_our_projects(tmp_path: Path) -> None:
    for day in ("2026-01-05", "2026-01-06"):
        recall_report(audit_rows(REQUESTS), day=day, floor=0.1, home=tmp_path)
    port = free_port()
    command = ui_command(tmp_path, port)
    command[0] = str(Path(sys.executable).with_name("evidently"))
    output = (tmp_path / "ui.log").open("w")
    ui = subprocess.Popen(
        command, env={**os.environ, "DO_NOT_TRACK": "1"}, stdout=output, stderr=output, start_new_session=True
    )
    try:
        projects = wait_for(f"http://127.0.0.1:{port}/api/projects")
        assert [p["name"] for p in projects] == ["mirach recall"]
        runs = wait_for(f"http://127.0.0.1:{port}/api/projects/{projects[0]['id']}/reports")
        assert sorted(r["name"] for r in runs) == ["recall 2026-01-05", "recall 2026-01-06"]
    finally:
        ui.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ui.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ui.pid, signal.SIGKILL)
        ui.wait()
        output.close()


def wait_for(url: str, timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
