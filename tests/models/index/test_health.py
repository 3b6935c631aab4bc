from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.index.health import HealthLimits, gini, health_problems, index_health, num_duplicates, path_change
from models.index.publish import build_index, publish
from tests.models.index.small import random_index, small_ads, small_model


def test_gini_of_even_and_concentrated_use() -> None:
    assert gini(torch.tensor([5.0, 5.0, 5.0, 5.0]), 4) == pytest.approx(0.0)
    assert gini(torch.tensor([20.0]), 4) == pytest.approx(0.75)
    assert gini(torch.tensor([1.0, 3.0]), 2) == pytest.approx(0.25)


def test_duplicates_are_counted_once_each() -> None:
    codebook = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1e-4]])
    assert num_duplicates(codebook) == 2
    assert num_duplicates(codebook[[0, 2]]) == 0


def test_figures_of_an_index_with_known_paths() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(16, generator)
    vector_NQd = model.ad_vectors(ads)
    even = torch.stack([torch.arange(16) // 4, torch.arange(16) % 4], dim=1)
    index = build_index(model, ads, vector_NQd, even, ~ads.retired_N)
    health = index_health(model, index)
    assert health.path_change is None
    assert [level.num_used for level in health.levels] == [4, 16]
    assert [level.num_possible for level in health.levels] == [4, 16]
    assert [level.effective for level in health.levels] == pytest.approx([4.0, 16.0])
    assert [level.largest_share for level in health.levels] == pytest.approx([0.25, 1 / 16])
    collapsed = build_index(model, ads, vector_NQd, torch.zeros_like(even), ~ads.retired_N)
    bad = index_health(model, collapsed, previous=index)
    assert bad.levels[0].effective == pytest.approx(1.0)
    assert bad.levels[1].gini == pytest.approx(15 / 16)
    assert bad.path_change == pytest.approx(15 / 16)
    reasons = health_problems(bad, 16)
    assert any("uses 1 of 4" in r for r in reasons)
    assert any("spreads ads like 1.0 of 4" in r for r in reasons)
    assert any(
        "100.0% of the ads in one node" in r for r in health_problems(bad, 16, HealthLimits(max_largest_share=0.3))
    )


def test_mismatch_is_small_where_ads_sit_on_their_nodes() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model((4,)), small_ads(40, generator)
    index = publish(model, ads)
    soft = index_health(model, index).levels[0].mismatch
    model.index.spread_L.fill_(1e-6)
    hard = index_health(model, index).levels[0].mismatch
    assert hard < 1e-3 < soft


def test_limits_decide() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(64, generator)
    index = random_index(model, ads, generator)
    health = index_health(model, index, previous=index)
    assert health.path_change == 0.0
    lenient = HealthLimits(max_mismatch=1.0)
    assert health_problems(health, 64, lenient) == []
    moved = replace(health, path_change=0.4)
    assert health_problems(moved, 64, replace(lenient, max_path_change=0.3)) == ["40.0% of the ads changed their path"]


def test_path_change_matches_ads_by_id() -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(20, generator)
    path_NL = torch.stack([torch.arange(20) % 4, torch.arange(20) % 3], dim=1)
    vector_NQd = model.ad_vectors(ads)
    old = build_index(model, ads, vector_NQd, path_NL, torch.arange(20) >= 5)
    changed = path_NL.clone()
    changed[10:13, 1] = 3
    new = build_index(model, ads, vector_NQd, changed, torch.arange(20) < 15)
    assert path_change(new, old) == pytest.approx(3 / 10)
