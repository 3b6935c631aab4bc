"""Artefact folders: what is saved loads again, and what doesn't fit is refused by name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from models.artifact import ArtifactStore
from models.gem.model import Gem, GemConfig
from models.training import checkpoint
from models.training.loop import CheckpointPlan, TrainConfig, predict, train_day
from models.training.optimizer import TableOptimizer
from models.training.storage import load_gem, load_gem_model, save_gem
from tests.models.worlds import World, make_world

SMALL = GemConfig(width=4, num_fm=2, num_linear=2, fm_hidden=8, num_recent=4, head_hidden=8)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=20, num_ads=15, num_days=2, rows_per_day=200)


def test_gem_artefact_round_trip_continues_training(world: World, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=64)
    model = Gem(SMALL, world.schema, seed=1)
    optimizer = TableOptimizer(model, config.optimizer, ("tables.weight",))
    train_day(model, optimizer, world.days[0], config, seed=0)
    store = ArtifactStore(tmp_path)
    with store.create("gem", schema=world.schema, code_version="1") as draft:
        save_gem(draft.path, model, optimizer)
    assert draft.result is not None
    loaded, loaded_optimizer = load_gem(store.open("gem", draft.result.version, schema=world.schema).path, config)
    assert loaded.config == SMALL
    assert loaded.schema == world.schema
    assert torch.equal(predict(loaded, world.days[1]), predict(model, world.days[1]))
    train_day(model, optimizer, world.days[1], config, seed=1)
    train_day(loaded, loaded_optimizer, world.days[1], config, seed=1)
    assert all(torch.equal(v, loaded.state_dict()[n]) for n, v in model.state_dict().items())


def test_the_model_alone_needs_no_optimizer_and_is_in_evaluation_mode(world: World, tmp_path: Path) -> None:
    model = Gem(SMALL, world.schema, seed=2)
    checkpoint.save_model(tmp_path, model, world.schema, asdict(SMALL))
    loaded = load_gem_model(tmp_path)
    assert (model.training, loaded.training) == (True, False)
    assert torch.equal(predict(loaded, world.days[0]), predict(model, world.days[0]))


def test_weights_of_other_sizes_are_refused(world: World, tmp_path: Path) -> None:
    checkpoint.save_model(tmp_path, Gem(SMALL, world.schema), world.schema, asdict(SMALL))
    bigger = Gem(GemConfig(width=8, num_recent=4), world.schema)
    with pytest.raises(ValueError, match="missing, unknown or of another shape"):
        checkpoint.load_weights(tmp_path, bigger)
    optimizer = TableOptimizer(bigger, TrainConfig().optimizer, ("tables.weight",))
    with pytest.raises(ValueError, match="saved without its optimiser"):
        checkpoint.load_optimizer(tmp_path, optimizer)


def test_config_and_schema_are_readable(world: World, tmp_path: Path) -> None:
    checkpoint.save_model(tmp_path, Gem(SMALL, world.schema), world.schema, asdict(SMALL))
    assert checkpoint.read_config(tmp_path)["width"] == 4
    assert checkpoint.read_schema(tmp_path) == world.schema


def test_no_checkpoint_means_the_start(world: World, tmp_path: Path) -> None:
    model = Gem(SMALL, world.schema)
    optimizer = TableOptimizer(model, TrainConfig().optimizer, ("tables.weight",))
    assert checkpoint.load_checkpoint(tmp_path, model, optimizer) == (0, 0.0)


def test_an_interrupted_day_goes_on_from_its_checkpoint_bit_for_bit(world: World, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=32)
    plan = CheckpointPlan(tmp_path / "checkpoints", every_steps=2)

    def fresh() -> tuple[Gem, TableOptimizer]:
        model = Gem(SMALL, world.schema, seed=1)
        return model, TableOptimizer(model, config.optimizer, ("tables.weight",))

    def die(step: int, total: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    whole, whole_optimizer = fresh()
    expected = train_day(whole, whole_optimizer, world.days[0], config, seed=0)
    with pytest.raises(KeyboardInterrupt):
        train_day(*fresh(), world.days[0], config, seed=0, progress=die, checkpoint=plan)
    # What a kill in the middle of the next checkpoint leaves beside the whole one.
    (plan.folder / f".{checkpoint.CHECKPOINT}.tmp").write_bytes(b"half")
    model, optimizer = fresh()
    seen: list[int] = []
    report = train_day(
        model, optimizer, world.days[0], config, seed=0, checkpoint=plan,
        progress=lambda step, total, loss: seen.append(step),
    )  # fmt: skip
    assert seen[0] == 3, "training began anew"
    assert report.mean_loss == expected.mean_loss
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())
    state = whole_optimizer.state()
    assert all(torch.equal(value, state[name]) for name, value in optimizer.state().items())
