"""Presets build models of the stated speed, scale moves every size, sources change only what they name."""

from __future__ import annotations

import time

import pytest
import torch

from models.gem.model import Gem
from models.training.loop import train_day
from models.training.optimizer import TableOptimizer
from models.training.presets import for_source, laptop, open_preset, scaled, tiny
from tests.models.worlds import make_world


def test_tiny_trains_a_day_within_a_second() -> None:
    world = make_world(num_users=200, num_ads=100, num_days=1, rows_per_day=1500, negative_rate=0.2)
    preset = tiny()
    model = Gem(preset.gem, world.schema)
    optimizer = TableOptimizer(model, preset.gem_training.optimizer)
    train_day(model, optimizer, world.days[0], preset.gem_training, seed=0)  # warms up allocators
    used = time.process_time()
    train_day(model, optimizer, world.days[0], preset.gem_training, seed=1)
    assert time.process_time() - used < 1.0


def test_scale_moves_depth_width_and_tokens_together() -> None:
    world = make_world(num_users=20, num_ads=20, num_days=1, rows_per_day=20)
    sizes, parameters = [], []
    for scale in (0.25, 0.5, 1.0, 2.0):
        gem = scaled(laptop(), scale).gem
        sizes.append((gem.width, gem.num_layers, gem.num_fm, gem.num_recent))
        model = Gem(gem, world.schema)
        assert torch.isfinite(model(world.days[0].batch(torch.arange(4)), world.ads)).all()
        parameters.append(sum(p.numel() for name, p in model.named_parameters() if name != "tables.weight"))
    assert sizes == [(4, 1, 2, 4), (8, 1, 4, 8), (16, 2, 8, 16), (32, 4, 16, 32)]
    assert parameters == sorted(parameters)
    assert parameters[-1] > 50 * parameters[0]
    assert scaled(laptop(), 1.0) == laptop()
    with pytest.raises(ValueError, match="scale: 0"):
        scaled(laptop(), 0.0)


def test_sources_override_by_name() -> None:
    assert for_source(laptop(), "simulator") == laptop()
    assert for_source(laptop(), "kuairand").gem_training != laptop().gem_training
    assert open_preset("laptop", "kuairand") == for_source(laptop(), "kuairand")


def test_logs_without_impressions_have_values_of_their_own() -> None:
    values = open_preset("laptop", "anything", positives_only=True).retrieval
    assert values.training.impression_weight == 0.0
    assert values.training.sampled_ads > 0
    assert values.covisit_neighbours > 0
    assert values.ages_by_order
    assert open_preset("laptop", "anything") == laptop()


def test_unknown_presets_are_named() -> None:
    with pytest.raises(ValueError, match="preset: 'huge' is unknown; known presets: tiny, laptop"):
        open_preset("huge")
