import dagster as dg
import pytest

from dagster_project.lib.errors import StageFailedError
from dagster_project.lib.runner import Runner
from dagster_project.lib.staleness import Ledger, Node, parent_nodes, stale
from tests.dagster_project.world import ALL_DAYS, World

RAW, CHAIN, MODEL = (dg.AssetKey(["g", name]) for name in ("raw", "chain", "model"))


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def run_all(world, instance):
    """Every day in order; what was made."""
    world.calls.clear()
    runner = Runner(world.definitions(), instance, world.home, lambda step: None)
    for day in ALL_DAYS:
        runner.run("all", day, runner.keys("all"))
    return list(world.calls)


def test_parents_follow_the_partition_mappings(world):
    graph = world.definitions().resolve_asset_graph()
    assert parent_nodes(graph, Node(CHAIN, "2026-01-02")) == [Node(CHAIN, "2026-01-01"), Node(RAW, "2026-01-02")]
    assert parent_nodes(graph, Node(CHAIN, "2026-01-01")) == [Node(RAW, "2026-01-01")]
    assert parent_nodes(graph, Node(MODEL, "2026-01-03")) == [Node(RAW, day) for day in ALL_DAYS[:3]]


def test_a_second_run_makes_nothing(world, instance):
    assert len(run_all(world, instance)) == 12
    assert run_all(world, instance) == []


def test_a_changed_day_reaches_its_descendants_only(world, instance):
    run_all(world, instance)
    world.values |= {"raw 2026-01-03": "late data", "chain 2026-01-03": "late data"}
    runner = Runner(world.definitions(), instance, world.home, lambda step: None)
    runner._execute("all", ["2026-01-03"], {Node(RAW, "2026-01-03"): "ordered"}, 1)
    made = run_all(world, instance)
    assert made == ["chain 2026-01-03", "model 2026-01-03", "chain 2026-01-04", "model 2026-01-04"]


def test_equal_content_stops_the_wave_between_runs(world, instance):
    run_all(world, instance)
    runner = Runner(world.definitions(), instance, world.home, lambda step: None)
    runner._execute("all", ["2026-01-03"], {Node(RAW, "2026-01-03"): "ordered"}, 1)
    assert run_all(world, instance) == []


def test_changed_code_and_settings_are_reasons(world, instance):
    run_all(world, instance)
    world.codes["model"] = "2"
    ledger = Ledger(instance, world.definitions().resolve_asset_graph())
    wanted = [Node(key, ALL_DAYS[-1]) for key in (MODEL, CHAIN, RAW)]
    settings = world.home.settings_digest("g")
    assert stale(ledger, wanted, lambda key: settings) == {Node(MODEL, ALL_DAYS[-1]): "code changed"}
    reasons = stale(ledger, wanted, lambda key: "other seed")
    assert reasons[Node(RAW, ALL_DAYS[-1])] == "settings changed"
    assert set(reasons) == set(wanted)


def test_reasons_come_parents_first(world, instance):
    ledger = Ledger(instance, world.definitions().resolve_asset_graph())
    wanted = [Node(key, day) for key in (MODEL, CHAIN, RAW) for day in ALL_DAYS[:2]]
    found = list(stale(ledger, wanted, lambda key: ""))
    assert [n.partition for n in found] == ["2026-01-01"] * 3 + ["2026-01-02"] * 3
    assert found.index(Node(RAW, "2026-01-01")) < found.index(Node(CHAIN, "2026-01-01"))


def test_a_failed_blocking_check_stops_the_run_and_is_not_forgotten(world, instance):
    world.passes = False
    with pytest.raises(StageFailedError, match=r"check fine of g/raw failed: as told \(number=7"):
        run_all(world, instance)
    assert world.calls == ["raw 2026-01-01"]
    # The data is recorded as materialised; without the check's record a second run would go on from it.
    with pytest.raises(StageFailedError):
        run_all(world, instance)
    world.passes = True
    assert run_all(world, instance)[0] == "raw 2026-01-01"


def test_a_range_is_one_run_and_unbroken(world, instance):
    runner = Runner(world.definitions(), instance, world.home, lambda step: None)
    runner._execute("all", ["2026-01-02"], {Node(RAW, "2026-01-02"): "first"}, 1)
    seen = [step.partition for step in runner.steps]
    assert seen == ["2026-01-02"]
    reasons = stale(runner.ledger, [Node(RAW, day) for day in ALL_DAYS], runner._settings_of)
    assert [n.partition for n in reasons] == ["2026-01-01", "2026-01-03", "2026-01-04"]


def test_user_errors_are_told_apart(world, instance):
    world._made = lambda name, day: (_ for _ in ()).throw(ValueError("ads/2026-01-01: 3 rows have a negative bid"))
    with pytest.raises(StageFailedError, match="3 rows have a negative bid") as failure:
        run_all(world, instance)
    assert failure.value.user_error
