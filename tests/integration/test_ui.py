"""`make ui` and `make monitor` on the home of a finished loop: runs and checks are there, every panel renders."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_project.lib.partitions import FACTS
from tests.conftest import ROOT, Loop
from tests.screens import (
    CHROMIUM,
    DAGSTER,
    MAX_BYTES,
    Screen,
    browser,
    dagster_ui,
    dashboards,
    evidently_ui,
    explained,
    visit,
)

pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")
PARTITIONS = Screen(
    "dagster_partitions", "/assets/gem/evaluation?view=partitions", (f"Materialized ({len(FACTS.days)})",)
)


@pytest.fixture(scope="module")
def ui(tiny_loop: Loop) -> Iterator[str]:
    with dagster_ui(tiny_loop.home) as url:
        yield url


def query(url: str, text: str) -> Any:
    body = json.dumps({"query": text}).encode()
    request = urllib.request.Request(f"{url}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert "errors" not in answer, answer
    return answer["data"]


def test_finished_runs_are_visible(ui: str) -> None:
    runs = query(ui, "{runsOrError(limit: 100) {... on Runs {results {status jobName}}}}")["runsOrError"]["results"]
    assert len(runs) >= 19
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert {"ingest", "daily", "transfer", "verticals", "release", "monitoring"} <= {run["jobName"] for run in runs}


def test_assets_show_their_materialisations_and_checks(ui: str) -> None:
    text = """{assetNodes {assetKey {path} groupName isPartitioned
        assetMaterializations(limit: 1) {metadataEntries {label}}
        assetChecksOrError {... on AssetChecks {checks {name}}}}}"""
    nodes = {"/".join(n["assetKey"]["path"]): n for n in query(ui, text)["assetNodes"]}
    for name in ("features/training_frame", "gem/evaluation", "index/hierarchical_index", "monitoring/recall_report"):
        (latest,) = nodes[name]["assetMaterializations"]
        labels = {entry["label"] for entry in latest["metadataEntries"]}
        assert {"work_seconds", "peak_rss_mb"} <= labels, name
        assert nodes[name]["assetChecksOrError"]["checks"], name


@needs_browser
def test_graph_asset_plots_checks_and_partitions_render(ui: str, tmp_path: Path) -> None:
    with browser() as page:
        pictures = [visit(page, ui, screen, tmp_path) for screen in (*DAGSTER, PARTITIONS)]
    assert all(picture.stat().st_size > 20_000 for picture in pictures)


@needs_browser
def test_every_panel_of_the_evidently_dashboards_renders(tiny_home: Path, tmp_path: Path) -> None:
    screens = dashboards(tiny_home)
    assert {screen.name for screen in screens} == {"evidently_drift", "evidently_recall"}
    with evidently_ui(tiny_home) as url, browser() as page:
        pictures = [visit(page, url, screen, tmp_path) for screen in screens]
    assert all(picture.stat().st_size > 20_000 for picture in pictures)


@needs_browser
def test_the_explain_page_renders(tiny_home: Path, tmp_path: Path) -> None:
    (screen,) = explained(tiny_home)
    with browser() as page:
        assert visit(page, tiny_home.as_uri(), screen, tmp_path).stat().st_size > 20_000


def test_pictures_of_the_documentation_are_small_and_shown() -> None:
    pictures = sorted((ROOT / "docs" / "images").glob("*.png"))
    names = {*(screen.name for screen in DAGSTER), "evidently_drift", "evidently_recall", "index_explained"}
    assert {p.stem for p in pictures} == names
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for picture in pictures:
        assert picture.stat().st_size < MAX_BYTES, picture
        assert f"images/{picture.name}" in pages, f"{picture.name} is shown nowhere"
