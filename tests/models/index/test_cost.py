from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.index.cost import candidate_cost
from tests.models.index.small import small_config


def test_flops_are_counted_from_the_sizes() -> None:
    cost = candidate_cost(replace(small_config(), node_values=2), 2)
    # dots 2*4*8, features 6, tower 2*6*4+4, over 2*8*(8+1)+8+2*8, ensemble of two levels 4
    assert cost.ad == 64 + 6 + 52 + (144 + 8 + 16) + 4
    assert cost.sketch == 2 * 16 + 4 + 2 * 2
    # nodes look two values up and weigh them: 4 times the features
    assert cost.node_L == (64 + 24 + 52 + 168 + 0, 64 + 24 + 52 + 168 + 2)


def test_heavier_levels_cost_more_and_a_full_scan_costs_one() -> None:
    config = small_config()
    heavy = candidate_cost(replace(config, num_user_vectors=(8, 2, 2), hidden=(32, 8, 8)), 2)
    light = candidate_cost(config, 2)
    assert heavy.node_L[0] > 3 * light.node_L[0]
    assert heavy.ad == light.ad
    nothing, everything = torch.zeros(1, 2), torch.tensor([500])
    assert light.request(nothing, everything, 500).tolist() == [1.0]
    part = light.request(torch.tensor([[4, 8]]), torch.tensor([50]), 500)
    assert float(light.request(nothing, everything, 500, everything)[0]) == pytest.approx(1.0 + light.sketch / light.ad)
    expected = (4 * light.node_L[0] + 8 * light.node_L[1] + 50 * light.ad) / (500 * light.ad)
    assert float(part) == pytest.approx(expected)
