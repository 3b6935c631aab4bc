"""Row-wise Adagrad by hand, and the optimiser's state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.training.optimizer import OptimizerConfig, RowWiseAdagrad, TableOptimizer


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 2))
        self.dense = nn.Linear(2, 1)

    def loss(self, rows: list[int]) -> torch.Tensor:
        picked = nn.functional.embedding(torch.tensor(rows), self.table, sparse=True)
        return (self.dense(picked) ** 2).mean()


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def test_rows_step_by_their_own_accumulator() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    adagrad = RowWiseAdagrad([table])
    grad = torch.sparse_coo_tensor(
        torch.tensor([[2, 1, 2]]), torch.tensor([[1.0, 1.0], [3.0, 4.0], [2.0, 3.0]]), (4, 2), check_invariants=True
    )
    table.grad = grad
    adagrad.step(rate=0.5)
    # Row 2: gradient (3, 4), mean square 12.5; row 1: the same.
    root = math.sqrt(12.5)
    expected = torch.tensor([[0.0, 0.0], [-1.5 / root, -2.0 / root], [-1.5 / root, -2.0 / root], [0.0, 0.0]])
    torch.testing.assert_close(table.data, expected)
    table.grad = grad
    adagrad.step(rate=0.5)
    torch.testing.assert_close(adagrad.square[0], torch.tensor([0.0, 25.0, 25.0, 0.0]))
    torch.testing.assert_close(table.data[1], expected[1] + torch.tensor([-1.5 / 5, -2.0 / 5]))


def test_first_table_step_is_warmed_up() -> None:
    net = _net()
    optimizer = TableOptimizer(net, OptimizerConfig(table_rate=0.4, warmup_steps=10), ("table",))
    net.loss([3]).backward()
    optimizer.step()
    moved = (net.table.data[3] - 1.0).square().mean().sqrt()
    assert moved.item() == pytest.approx(0.04, rel=1e-4)
    assert torch.equal(net.table.data[[0, 1, 2, 4, 5]], torch.ones(5, 2))
    assert net.table.grad is None


def test_state_round_trip_continues_bit_for_bit() -> None:
    config = OptimizerConfig(warmup_steps=3)
    straight, other = _net(), _net()
    first = TableOptimizer(straight, config, ("table",))
    batches = [[0, 1], [1, 2, 5], [5], [0, 4]]
    for number, rows in enumerate(batches):
        if number == 2:
            saved, weights = first.state(), {k: v.clone() for k, v in straight.state_dict().items()}
        straight.loss(rows).backward()
        first.step()
    other.load_state_dict(weights)
    second = TableOptimizer(other, config, ("table",))
    second.load_state(saved)
    for rows in batches[2:]:
        other.loss(rows).backward()
        second.step()
    assert all(
        torch.equal(a, b) for a, b in zip(straight.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_unknown_names_are_refused() -> None:
    net = _net()
    with pytest.raises(ValueError, match="no parameters \\['tables'\\]"):
        TableOptimizer(net, OptimizerConfig(), ("tables",))
    optimizer = TableOptimizer(net, OptimizerConfig(), ("table",))
    state = optimizer.state()
    with pytest.raises(ValueError, match="no accumulator for table 'table'"):
        optimizer.load_state({"num_steps": state["num_steps"]})
    with pytest.raises(ValueError, match="names parameter 'nothing'"):
        optimizer.load_state(state | {"adam.step.nothing": torch.zeros(())})
