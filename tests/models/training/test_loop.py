"""Losses by hand, calibration under sampling, resume, and that GEM learns more than the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from models import metrics
from models.gem.model import Gem, GemConfig
from models.training.logistic import Logistic
from models.training.loop import (
    CheckpointPlan,
    TrainConfig,
    base_rates,
    decay,
    evaluate,
    even_batches,
    predict,
    task_weights,
    train_day,
    truth_loss,
)
from models.training.optimizer import OptimizerConfig, TableOptimizer
from tests.models.worlds import World, make_world

SMALL = GemConfig(width=8, num_fm=4, num_linear=4, fm_hidden=32, num_recent=8, head_hidden=16)
TABLES = ("tables.weight",)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=200, num_ads=80, num_days=3, rows_per_day=3000)


def _train(model: torch.nn.Module, world: World, days: int, config: TrainConfig) -> None:
    optimizer = TableOptimizer(model, config.optimizer, TABLES)
    for number in range(days):
        train_day(model, optimizer, world.days[number], config, seed=number)


def test_truth_loss_by_hand(world: World) -> None:
    batch = world.days[0].batch(torch.arange(3))
    batch = replace(
        batch,
        label_BT=torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]),
        mature_BT=torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]),
        logit_offset_B=torch.full((3,), math.log(4)),
    )
    logit = torch.tensor([[0.3, -0.2], [-0.5, 0.1], [2.0, 0.4]])
    main = binary_cross_entropy_with_logits(logit[:2, 0] + math.log(4), torch.tensor([1.0, 0.0]))
    # Rows without the main label stand for four each; row 0 has it and stands for itself.
    rows = binary_cross_entropy_with_logits(logit[:, 1], batch.label_BT[:, 1], reduction="none")
    other = (rows[0] + 4 * rows[1] + 4 * rows[2]) / 9
    weights = task_weights(TrainConfig(task_weights=(1.0, 0.5)), 2)
    torch.testing.assert_close(truth_loss(logit, batch, weights), main + 0.5 * other)


def test_task_weights_repeat_the_last() -> None:
    assert task_weights(TrainConfig(task_weights=(1.0, 0.25)), 4).tolist() == [1.0, 0.25, 0.25, 0.25]


def test_base_rates_undo_the_sampling(world: World) -> None:
    rates = base_rates(world.days[0])
    for surface in range(2):
        rows = world.days[0].surface_R == surface
        truth = world.days[0].label_RT[rows, 0].mean()
        assert rates[surface, 0].item() == pytest.approx(truth.item(), rel=0.1)


def test_gem_beats_logistic_regression_and_is_calibrated(world: World) -> None:
    config = TrainConfig(batch_size=128, passes=2, optimizer=OptimizerConfig(dense_rate=4e-3, warmup_steps=10))
    gem, logistic = Gem(SMALL, world.schema), Logistic(world.schema)
    _train(gem, world, 2, config)
    _train(logistic, world, 2, config)
    day, probability = world.days[2], world.probability[2]
    scores = {
        name: evaluate(day, predict(model, day), probability_R=probability)["click/all"]
        for name, model in (("gem", gem), ("logistic", logistic))
    }
    assert scores["gem"]["oracle_ne"] < scores["logistic"]["oracle_ne"] - 0.02 < 0.98
    assert scores["gem"]["oracle_ne"] > scores["gem"]["oracle_floor"]
    # Half of the negatives were dropped in training; the predictions are of all impressions all the same.
    assert 0.85 < scores["gem"]["calibration"] < 1.15


def test_evaluate_reports_every_surface_and_task(world: World) -> None:
    day = world.days[0]
    logit = torch.zeros(day.num_rows, 2)
    report = evaluate(day, logit)
    assert set(report) == {f"{task}/{part}" for task in ("click", "conversion") for part in ("all", "feed", "stories")}
    feed = (day.surface_R == 0) & (day.mature_RT[:, 1] > 0)
    label = day.label_RT[feed, 1].numpy()
    assert report["conversion/feed"]["rows"] == float(feed.sum())
    assert report["conversion/feed"]["ne"] == pytest.approx(metrics.normalised_entropy(label, np.zeros(len(label))))


def test_interrupted_and_resumed_equals_uninterrupted(world: World, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=128, passes=2)
    gem_config = replace(SMALL, dropout=0.2)

    def start() -> tuple[Gem, TableOptimizer]:
        model = Gem(gem_config, world.schema, seed=4)
        return model, TableOptimizer(model, config.optimizer, TABLES)

    class InterruptedRunError(Exception):
        pass

    def stop(step: int, num_steps: int, loss: float) -> None:
        if step == num_steps // 2:
            raise InterruptedRunError

    straight, optimizer = start()
    reference = train_day(straight, optimizer, world.days[0], config, seed=9)
    plan = CheckpointPlan(tmp_path, every_steps=5)
    model, optimizer_cut = start()
    with pytest.raises(InterruptedRunError):
        train_day(model, optimizer_cut, world.days[0], config, seed=9, progress=stop, checkpoint=plan)
    resumed, optimizer_two = start()
    report = train_day(resumed, optimizer_two, world.days[0], config, seed=9, checkpoint=plan)
    assert report.mean_loss == reference.mean_loss
    assert optimizer_two.num_steps == optimizer.num_steps == reference.num_steps
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    state, other = optimizer.state(), optimizer_two.state()
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_progress_and_report(world: World) -> None:
    seen: list[tuple[int, int]] = []
    model = Logistic(world.schema)
    config = TrainConfig(batch_size=256)
    report = train_day(
        model, TableOptimizer(model, config.optimizer, TABLES), world.days[0], config, seed=0,
        progress=lambda step, total, loss: seen.append((step, total)),
    )  # fmt: skip
    kept = int(world.days[0].keep_R.sum())
    assert seen == [(i + 1, math.ceil(kept / 256)) for i in range(math.ceil(kept / 256))]
    assert report.num_examples == kept
    assert report.to_dict()["num_steps"] == len(seen)


def test_global_random_state_is_left_alone(world: World) -> None:
    model = Gem(replace(SMALL, dropout=0.1), world.schema)
    before = torch.get_rng_state()
    config = TrainConfig()
    train_day(model, TableOptimizer(model, config.optimizer, TABLES), world.days[0], config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_days_are_refused(world: World) -> None:
    model = Logistic(world.schema)
    config = TrainConfig()
    optimizer = TableOptimizer(model, config.optimizer, TABLES)
    day = world.days[0]
    with pytest.raises(ValueError, match="no rows with keep=True"):
        train_day(model, optimizer, replace(day, keep_R=torch.zeros_like(day.keep_R)), config, seed=0)
    with torch.no_grad():
        model.dense_TF.fill_(math.inf)
    with pytest.raises(ValueError, match="loss: nan"):
        train_day(model, optimizer, day, config, seed=0)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1025, 512), (512, 512), (3, 512), (0, 4), (10, 3)])
def test_no_batch_is_a_handful_of_rows(num_rows: int, batch_size: int) -> None:
    batches = even_batches(torch.arange(num_rows), batch_size)
    assert torch.cat(batches).tolist() == list(range(num_rows))
    sizes = [len(b) for b in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_rates_fall_linearly_to_the_final_rate() -> None:
    assert [decay(step, 5, 0.2) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert decay(0, 1, 0.1) == 1.0
    assert {decay(step, 3, 1.0) for step in range(3)} == {1.0}
