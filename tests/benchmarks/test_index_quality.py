from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import index_quality
from benchmarks.baselines import dot_config, mixture_of_logits, two_tower
from benchmarks.index_cells import COSTS, VARIANTS, Cell, preset_of, run_cell
from benchmarks.index_quality import against, area, comparisons
from benchmarks.worlds import World, open_world
from models.index.publish import publish
from models.index.search import exact_search
from tests.models.index.small import small_ads, small_config, small_schema, small_users


def cell(name: str, scorer: list[float], at_cost: dict[float, list[float]]) -> Cell:
    arrays = {f"cost.{c}": np.array(v) for c, v in at_cost.items()}
    return Cell(
        {"variant": name}, {"user": np.arange(len(scorer), dtype=float), "scorer@10": np.array(scorer), **arrays}
    )


def test_area_is_the_mean_of_worth_over_the_grid_and_costs_without_a_beam_count_zero() -> None:
    constant = cell("joint", [1.0], {c: [0.5] for c in COSTS})
    assert area(constant) == pytest.approx([0.5])
    late = cell("joint", [1.0], {0.03: [0.4], 0.05: [0.4]})
    # A triangle from 2 % to 3 % and a rectangle from 3 % to 5 %, over a grid of 4.75 %.
    assert area(late) == pytest.approx([(0.01 * 0.4 / 2 + 0.02 * 0.4) / 0.0475])


def test_variants_are_compared_on_the_same_requests_over_all_seeds() -> None:
    cells = {
        ("joint", 0): cell("joint", [1.0, 2.0, np.nan], {}), ("none", 0): cell("none", [1.0, 1.0, 5.0], {}),
        ("joint", 1): cell("joint", [1.0, 0.0, 1.0], {}), ("none", 1): cell("none", [1.0, 1.0, 1.0], {}),
        ("joint", 2): cell("joint", [9.0, 9.0, 9.0], {}),
    }  # fmt: skip
    found = against(cells, "joint", "none", "scorer@10")
    assert found is not None
    assert found.estimate == pytest.approx(5.0 / 5.0)
    assert against(cells, "joint", "em", "scorer@10") is None
    assert against(cells, "joint", "none", "area") is None
    assert list(comparisons(cells)) == ["joint over none, scorer@10"]


@pytest.mark.parametrize(("build", "change"), [(two_tower, dot_config), (mixture_of_logits, lambda config: config)])
def test_a_baseline_scores_shared_and_own_candidates_alike(build: Any, change: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    ads, users = small_ads(40, generator), small_users(6, 40, generator)
    model = build(change(small_config()), small_schema(), 0).eval()
    state = model.user_state(users, ads)
    vector_NQd = model.ad_vectors(ads)
    over, own = model.level(2), state.levels[-1]
    nothing = torch.zeros(1, 6, 40)
    shared_BN = over.shared(own, vector_NQd, nothing)
    own_BN = over.own(own, vector_NQd.expand(6, *vector_NQd.shape), nothing)
    torch.testing.assert_close(shared_BN, own_BN)
    best_BK = exact_search(model, publish(model, ads), state, 5, ad_scorer=True).score_BK
    torch.testing.assert_close(best_BK, shared_BN.topk(5).values)


def test_the_benchmark_goes_on_from_its_cache(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    command = ["x", "--data", "tiny", "--variants", "joint", "none", "--seeds", "1", "--cache", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    assert index_quality.main() == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr(index_quality, "run_cell", None)  # a second run that trained anything would fail
    assert index_quality.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    kept = first["per_data"]["tiny"]["variants"]
    assert kept["joint"]["scorer@10"] > 0.05
    assert "area" not in kept["none"]


def test_cells_of_different_values_are_different_files(tmp_path: Path) -> None:
    for value in (0.0, 0.2):
        one = cell("joint", [value], {})
        path = index_quality.cell_path(tmp_path, "tiny", "joint", 0, True, {"trunk_gradient": value})
        assert not Cell.exists(path)
        one.save(path)
        assert Cell.load(path).arrays["scorer@10"].tolist() == [value]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world("tiny", tmp_path_factory.mktemp("cache"), None, report=lambda line: None)


@pytest.mark.parametrize("variant", ["joint", "no_residual"])
def test_a_cell_holds_what_every_request_got_within_each_cost(tiny: World, variant: str) -> None:
    judged = run_cell(tiny, VARIANTS[variant], 0, {"min_steps": 1})
    curve = judged.values["curve"]
    assert [point["limit"] for point in curve] == [c for c in COSTS if f"cost.{c}" in judged.arrays]
    for point in curve:
        assert 0.0 < point["cost"] < 1.5 * point["limit"]
        assert 0.0 < point["coverage"] <= 1.0
        worth_B = judged.arrays[f"cost.{point['limit']}"]
        assert worth_B.shape == judged.arrays["user"].shape
        assert 0.0 < worth_B.sum() <= judged.arrays["best@10"].sum()
    assert judged.arrays["exact@10"].sum() < judged.arrays["exact@100"].sum()
    sizes = {"joint": preset_of(tiny).level_sizes, "no_residual": (8, 8)}[variant]
    assert [level["num_possible"] for level in judged.values["health"]["levels"]] == np.cumprod(sizes).tolist()
