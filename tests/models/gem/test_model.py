"""GEM as a whole: shapes, independence of rows, priors, and which inputs it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.batch import Batch
from models.gem.model import Gem, GemConfig
from tests.models.worlds import World, make_world

CONFIG = GemConfig(width=8, num_fm=3, num_linear=3, fm_hidden=16, num_recent=4, head_hidden=8)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=30, num_ads=25, num_days=1, rows_per_day=100)


def test_logits_do_not_depend_on_the_rest_of_the_batch(world: World) -> None:
    model, day = Gem(CONFIG, world.schema).eval(), world.days[0]
    together = model(day.batch(torch.arange(40)), world.ads)
    assert together.shape == (40, 2)
    alone = torch.cat([model(day.batch(torch.tensor([i])), world.ads) for i in range(40)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_every_parameter_has_a_gradient(world: World) -> None:
    model = Gem(replace(CONFIG, num_layers=3), world.schema)
    model(world.days[0].batch(torch.arange(60)), world.ads).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_depths(world: World, num_layers: int) -> None:
    model = Gem(replace(CONFIG, num_layers=num_layers), world.schema)
    assert torch.isfinite(model(world.days[0].batch(torch.arange(10)), world.ads)).all()


def test_seed_decides_the_weights_and_nothing_global(world: World) -> None:
    before = torch.get_rng_state()
    first, second, other = (Gem(CONFIG, world.schema, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["tables.weight"], other["tables.weight"])


def test_prior_sets_the_rate_of_each_surface(world: World) -> None:
    model = Gem(CONFIG, world.schema)
    model.set_prior(torch.tensor([[0.2, 0.01], [0.5, 0.03]]))
    torch.testing.assert_close(torch.sigmoid(model.heads.bias_ST), torch.tensor([[0.2, 0.01], [0.5, 0.03]]))


def test_candidate_history_and_surface_matter(world: World) -> None:
    model, day = Gem(CONFIG, world.schema).eval(), world.days[0]
    batch = day.batch(torch.arange(20))
    base = model(batch, world.ads)

    def moved(other: Batch) -> torch.Tensor:
        return (model(other, world.ads) - base).abs().amax(dim=1)

    assert bool((moved(replace(batch, ad_code_B=(batch.ad_code_B + 1) % 25)) > 1e-5).all())
    history = batch.user.history
    shifted = replace(history, item_E=(history.item_E + 1) % 25)
    changed = moved(replace(batch, user=replace(batch.user, history=shifted)))
    assert bool((changed[history.start_B1.diff() > 0] > 1e-6).all())
    other_surface = replace(batch.user, surface_B=1 - batch.user.surface_B)
    assert bool((moved(replace(batch, user=other_surface)) > 1e-6).all())


def test_users_without_events(world: World) -> None:
    day = world.days[0]
    nobody = replace(day, end_offset_R=torch.zeros_like(day.end_offset_R))
    logits = Gem(CONFIG, world.schema)(nobody.batch(torch.arange(5)), world.ads)
    assert torch.isfinite(logits).all()
