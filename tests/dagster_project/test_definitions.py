import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from dagster_project.definitions import defs
from dagster_project.lib.partitions import FACTS

ROOT = Path(__file__).parents[2]
KEYS = {
    *(f"ingest/{t}" for t in ("ads", "users", "impressions", "outcomes", "engagements", "oracle")),
    *(f"features/{t}" for t in ("catalogue", "event_log", "statistics", "training_frame", "online_store")),
    "gem/foundation_model", "gem/evaluation", "transfer/teacher_labels", "transfer/domain_model",
    "transfer/vertical_model", "index/retrieval_model", "index/hierarchical_index", "tuning/node_data",
    "tuning/tuned_release", "serving/retrieval_bento", "serving/shadow_report", "serving/promoted_release",
    "monitoring/request_log", "monitoring/outcomes_join", "monitoring/drift_report", "monitoring/recall_report",
}  # fmt: skip
TRAINED = {
    "gem/foundation_model", "transfer/domain_model", "transfer/vertical_model", "index/retrieval_model",
    "tuning/tuned_release",
}  # fmt: skip


@pytest.fixture(scope="module")
def definitions():
    return defs()


@pytest.fixture(scope="module")
def graph(definitions):
    return definitions.resolve_asset_graph()


def test_asset_keys_are_api(graph):
    assert {key.to_user_string() for key in graph.materializable_asset_keys} >= KEYS


def test_every_asset_says_what_it_is(graph):
    for node in graph.asset_nodes:
        name = node.key.to_user_string()
        assert node.description, name
        assert len(node.description) > 30, name
        assert node.group_name == node.key.path[0], name
        assert list(node.owners) == ["team:mirach"], name
        assert node.kinds, name
        assert node.code_version, name
        assert node.partitions_def is not None, name


def test_days_are_the_source_s(graph):
    days = graph.get(dg.AssetKey(["ingest", "impressions"])).partitions_def
    assert days.get_partition_keys() == FACTS.days
    verticals = graph.get(dg.AssetKey(["transfer", "vertical_model"])).partitions_def
    assert len(verticals.get_partition_keys()) == len(FACTS.days) * len(FACTS.verticals)
    assert verticals.get_partition_keys()[0] == f"{FACTS.days[0]}|{FACTS.verticals[0]}"


def test_every_check_has_the_partitions_of_its_asset(graph):
    checks = {node.key.name: node for node in graph.asset_check_nodes}
    wanted = {"contract", "no_leak", "parity", "calibration", "not_worse_than_logistic_regression", "health"}
    wanted |= {"recall_against_exact", "not_worse_than_untuned", "smoke", "not_worse_than_serving"}
    assert set(checks) >= wanted | {"drift", "recall_floor", "answered"}
    for node in graph.asset_check_nodes:
        if node.key.name != "contract":  # one verdict on what a run ingested, however many days that was
            assert node.partitions_def == graph.get(node.key.asset_key).partitions_def, node.key
    assert not checks["drift"].blocking
    assert checks["recall_floor"].blocking


def test_every_job_makes_the_assets_that_carry_its_name(definitions, graph):
    made = set()
    for name in ("ingest", "daily", "transfer", "verticals", "release", "monitoring"):
        made |= definitions.resolve_job_def(name).asset_layer.selected_asset_keys
    assert {k.to_user_string() for k in made} >= KEYS


def test_nothing_trained_follows_eagerly_and_everything_waits_for_audits(graph):
    for node in graph.asset_nodes:
        if node.automation_condition is None:
            continue
        text = repr(node.automation_condition)
        name = node.key.to_user_string()
        assert "BlockingChecks" in text or "blocking" in text.lower(), name
        if name in TRAINED:
            assert "CronTick" in text or "cron" in text.lower(), name
            assert "newly_missing" not in text.lower(), name


def test_previous_days_and_promotion_come_first(graph):
    served = graph.get(dg.AssetKey(["monitoring", "request_log"])).parent_keys
    assert dg.AssetKey(["serving", "promoted_release"]) in served
    promoted = graph.get(dg.AssetKey(["serving", "promoted_release"])).parent_keys
    assert dg.AssetKey(["serving", "shadow_report"]) in promoted


def test_the_automation_sensor_runs_by_default(definitions):
    (sensor,) = definitions.sensors
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING


def test_loading_imports_nothing_heavy():
    code = (
        "import sys; from dagster_project.definitions import defs; defs().get_repository_def();"
        "print(*[m for m in ('torch', 'feast', 'evidently', 'bentoml', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == ""
    assert "Warning" not in done.stderr
