"""The student's heads: what each of them sees, and what reaches the backbone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.training.loop import predict
from models.training.storage import load_student, save_student
from models.transfer.distill import teacher_loss
from models.transfer.student import Adapter, Student, StudentConfig, recent_items, scale_gradient
from tests.models.worlds import World, make_world

SMALL = StudentConfig(width=4, hidden=8, num_recent=3)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=20, num_ads=15, num_days=1, rows_per_day=100)


def test_scale_gradient_is_identity_forward() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = scale_gradient(x, 3.0)
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_recent_items_are_the_newest(world: World) -> None:
    history = world.days[0].batch(torch.arange(6)).user.history
    item, bound = recent_items(history, 3)
    for row in range(6):
        newest = history.item_E[history.start_B1[row] : history.start_B1[row + 1]][-3:]
        assert torch.equal(item[bound[row] : bound[row + 1]], newest)


def test_only_recent_events_reach_a_student(world: World) -> None:
    model, batch = Student(SMALL, world.schema), world.days[0].batch(torch.arange(20))
    history = batch.user.history
    rank = torch.repeat_interleave(history.start_B1[1:], history.start_B1.diff()) - torch.arange(len(history.item_E))
    base = model(batch, world.ads)
    for which, changes in ((rank > 3, False), (rank <= 3, True)):
        item = torch.where(which, (history.item_E + 1) % 15, history.item_E)
        other = replace(batch, user=replace(batch.user, history=replace(history, item_E=item)))
        assert torch.allclose(model(other, world.ads), base) is not changes


def test_serving_head_and_both_heads_agree(world: World) -> None:
    model, batch = Student(SMALL, world.schema), world.days[0].batch(torch.arange(10))
    served, taught = model.both_heads(batch, world.ads, beta=2.0)
    torch.testing.assert_close(served, model(batch, world.ads))
    assert not torch.allclose(served, taught)


def test_the_teacher_never_touches_the_serving_head(world: World) -> None:
    model, batch = Student(SMALL, world.schema), world.days[0].batch(torch.arange(10))
    _, taught = model.both_heads(batch, world.ads, beta=2.0)
    taught.sum().backward()
    assert model.serving.weight.grad is None
    assert model.bias_ST.grad is None
    assert model.distillation.weight.grad is not None
    assert model.backbone[0].weight.grad is not None


def test_beta_scales_only_the_way_into_the_backbone(world: World) -> None:
    grads = {}
    for beta in (1.0, 4.0):
        model, batch = Student(SMALL, world.schema, seed=2), world.days[0].batch(torch.arange(10))
        model.both_heads(batch, world.ads, beta)[1].sum().backward()
        grads[beta] = (model.backbone[0].weight.grad, model.distillation.weight.grad)
    torch.testing.assert_close(grads[4.0][0], 4.0 * grads[1.0][0])
    torch.testing.assert_close(grads[4.0][1], grads[1.0][1])


def test_teacher_loss_scales_labels_and_skips_unknown_ones() -> None:
    teacher = torch.tensor([[math.log(0.25 / 0.75)], [math.nan], [math.log(0.8 / 0.2)]])
    logit = torch.tensor([[0.0], [5.0], [0.0]])
    # Targets 0.5 and min(1, 1.6); at logit 0 the loss is log 2 whatever the target.
    loss = teacher_loss(logit, teacher, alpha=2.0, weight_T=torch.ones(1))
    assert loss.item() == pytest.approx(math.log(2))
    high = teacher_loss(torch.tensor([[1.0], [0.0], [1.0]]), teacher, alpha=2.0, weight_T=torch.ones(1))
    softplus = math.log1p(math.e)
    assert high.item() == pytest.approx(((softplus - 0.5) + (softplus - 1.0)) / 2)


def test_adapter_starts_as_the_identity() -> None:
    teacher = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Adapter(3, 2)(teacher, torch.tensor([0, 1, 2, 0, 1])), teacher)


def test_student_artefact_round_trip(world: World, tmp_path: Path) -> None:
    model = Student(SMALL, world.schema, seed=3)
    save_student(tmp_path, model)
    loaded = load_student(tmp_path)
    assert loaded.config == SMALL
    assert torch.equal(predict(loaded, world.days[0]), predict(model, world.days[0]))


def test_snapshots_lie_beside_the_student(world: World, tmp_path: Path) -> None:
    now, earlier = Student(SMALL, world.schema, seed=3), Student(SMALL, world.schema, seed=4)
    save_student(tmp_path, now, {"a_day_ago": earlier})
    assert torch.equal(predict(load_student(tmp_path), world.days[0]), predict(now, world.days[0]))
    assert torch.equal(predict(load_student(tmp_path, "a_day_ago"), world.days[0]), predict(earlier, world.days[0]))
