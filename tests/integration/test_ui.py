"""`make ui` on the home of a finished loop: the code location loads, runs and checks are there, pages render."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_project.lib.partitions import FACTS
from tests.conftest import ROOT, Loop

pytestmark = pytest.mark.slow
CHROMIUM = Path("/usr/bin/chromium")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def ui(tiny_loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("ui") / "ui.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster_project.ui", "--port", str(port)],
            cwd=ROOT, env=tiny_loop.environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{url}/server_info", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"the UI did not come up: {log.read_text()[-3000:]}")
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def query(url: str, text: str) -> Any:
    body = json.dumps({"query": text}).encode()
    request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert "errors" not in answer, answer
    return answer["data"]


def test_finished_runs_are_visible(ui):
    runs = query(ui, "{runsOrError(limit: 100) {... on Runs {results {status jobName}}}}")["runsOrError"]["results"]
    assert len(runs) >= 19
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert {"ingest", "daily", "transfer", "verticals", "release", "monitoring"} <= {run["jobName"] for run in runs}


def test_assets_show_their_materialisations_and_checks(ui):
    text = """{assetNodes {assetKey {path} groupName isPartitioned
        assetMaterializations(limit: 1) {metadataEntries {label}}
        assetChecksOrError {... on AssetChecks {checks {name}}}}}"""
    nodes = {"/".join(n["assetKey"]["path"]): n for n in query(ui, text)["assetNodes"]}
    for name in ("features/training_frame", "gem/evaluation", "index/hierarchical_index", "monitoring/recall_report"):
        (latest,) = nodes[name]["assetMaterializations"]
        labels = {entry["label"] for entry in latest["metadataEntries"]}
        assert {"work_seconds", "peak_rss_mb"} <= labels, name
        assert nodes[name]["assetChecksOrError"]["checks"], name


@pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")
def test_the_lineage_renders(ui, tmp_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1000}, bypass_csp=True)
        lineage = "/assets/serving/promoted_release?view=lineage&lineageScope=upstream&lineageDepth=5"
        page.goto(ui + lineage, wait_until="domcontentloaded")
        for name in ("promoted_release", "hierarchical_index", "training_frame"):
            page.get_by_text(name).first.wait_for(state="visible", timeout=60_000)
        page.screenshot(path=str(tmp_path / "lineage.png"))
        page.goto(f"{ui}/assets/gem/evaluation?view=partitions", wait_until="domcontentloaded")
        page.get_by_text(f"Materialized ({len(FACTS.days)})").first.wait_for(state="visible", timeout=60_000)
        page.screenshot(path=str(tmp_path / "partitions.png"))
        browser.close()
    for name in ("lineage.png", "partitions.png"):
        assert (tmp_path / name).stat().st_size > 20_000
