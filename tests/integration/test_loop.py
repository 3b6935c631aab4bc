"""The whole tiny loop, run once a session, looked at from outside."""

import json
import shutil

import dagster as dg
import pytest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from dagster_project.definitions import defs
from dagster_project.lib.instance import open_instance
from dagster_project.lib.partitions import FACTS
from dagster_project.lib.resources import Home
from dagster_project.lib.staleness import Ledger, Node
from models.release import read_pointer
from tests.conftest import run_loop

pytestmark = pytest.mark.slow
RELEASE_DAY, LAST_DAY = FACTS.days[-2], FACTS.days[-1]


@pytest.fixture(scope="module")
def report(tiny_home):
    return json.loads((tiny_home / "reports" / "run.json").read_text())


@pytest.fixture(scope="module")
def instance(tiny_home):
    with open_instance(tiny_home) as instance:
        yield instance


def home_of(path):
    return Home(root=str(path), source="simulator", preset="tiny", seed=0)


def test_it_ends_with_results_and_the_commands_of_the_screens(tiny_loop, report):
    for words in (
        "foundation model, AUC",
        "index, recall@10 against exact",
        "latency p50 / p99, ms",
        "peak memory, MB",
    ):
        assert words in tiny_loop.output
    for command in ("make ui", "make serve", "make monitor"):
        assert command in tiny_loop.output
    assert report["preset"] == "tiny"
    assert report["wall_s"] >= report["work_s"] > 0
    assert 0 <= report["orchestration_share"] < 1
    assert {"gem/foundation_model", "index/retrieval_model", "monitoring/request_log"} <= set(report["stage_s"])
    results = dict(report["results"])
    assert 0.5 < results["foundation model, AUC"] < 1
    assert results["  recall against exact"] > 0.5


def test_every_asset_of_every_day_is_recorded(instance, report):
    graph = defs().resolve_asset_graph()
    ledger = Ledger(instance, graph)
    daily = ("ingest/", "features/training_frame", "features/statistics", "gem/evaluation", "transfer/teacher_labels")
    for key in graph.materializable_asset_keys:
        name = key.to_user_string()
        if name.startswith(daily):
            assert all(ledger.record(Node(key, day)) for day in FACTS.days), name
    gem = dg.AssetKey(["gem", "foundation_model"])
    assert ledger.record(Node(gem, RELEASE_DAY)) is not None
    assert ledger.record(Node(gem, LAST_DAY)) is None, "the last day is held out"
    for vertical in FACTS.verticals:
        assert ledger.record(Node(dg.AssetKey(["transfer", "vertical_model"]), f"{RELEASE_DAY}|{vertical}"))


def test_blocking_checks_passed_for_every_partition(instance):
    graph = defs().resolve_asset_graph()
    blocking = [node.key for node in graph.asset_check_nodes if node.blocking and node.partitions_def is not None]
    infos = instance.event_log_storage.get_asset_check_partition_info(blocking)
    assert len({info.check_key for info in infos}) == len(blocking) >= 10
    assert {info.latest_execution_status for info in infos} == {AssetCheckExecutionRecordStatus.SUCCEEDED}


def test_a_release_was_promoted_and_its_bento_exists(tiny_home):
    pointer = read_pointer(tiny_home / "releases")
    assert pointer is not None
    assert pointer.as_of == RELEASE_DAY
    release = home_of(tiny_home).artifacts.open("release", pointer.version)
    assert release.manifest.audit["index"]["recall_vs_exact"] > 0.5
    assert list((tiny_home / "bentoml" / "bentos" / "retrieval").glob(f"{pointer.version}-*"))


def test_the_explain_page_shows_purity_nodes_and_requests_and_needs_no_network(tiny_home):
    page = (tiny_home / "reports" / "index" / f"explain-{RELEASE_DAY}.html").read_text()
    assert page.count("<h2>Request ") == 5
    assert "Level 2: the largest of" in page
    assert page.count("<td>category") >= 2
    for forbidden in ("<script", "http://", "https://", "src="):
        assert forbidden not in page


def test_promotion_reads_the_audit_again_and_refuses(tiny_home, tmp_path):
    from dagster_project.lib.serving_stages import promote_candidate

    copy = tmp_path / "home"
    shutil.copytree(tiny_home / "artifacts", copy / "artifacts")
    shutil.copytree(tiny_home / "reports", copy / "reports")
    (copy / "lake").mkdir()
    shutil.copy(tiny_home / "lake" / "source.json", copy / "lake")
    path = copy / "reports" / "smoke" / f"{RELEASE_DAY}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "errors": 3}))
    with pytest.raises(RuntimeError, match="is refused: smoke: 3 errors"):
        promote_candidate(home_of(copy), RELEASE_DAY)
    assert read_pointer(copy / "releases") is None
    path.unlink()
    with pytest.raises(RuntimeError, match="smoke: was not measured on release"):
        promote_candidate(home_of(copy), RELEASE_DAY)


def test_a_second_run_makes_nothing(tiny_loop):
    done = tiny_loop.run()
    assert done.returncode == 0, done.stderr
    second = json.loads((tiny_loop.home / "reports" / "run.json").read_text())
    assert second["made"] == 0
    assert second["skipped"] > 100
    assert second["wall_s"] < 45
    assert "foundation model, AUC" in done.stdout, "the results are shown although nothing was made"


def test_a_home_holds_one_world(tiny_home):
    done = run_loop(tiny_home, PRESET="laptop")
    assert done.returncode == 2
    assert "use another home" in done.stderr
    settings = json.loads((tiny_home / "settings.json").read_text())
    assert settings["preset"] == "tiny", "a refused run changes nothing"
