"""Teaching on a world where the teacher knows the truth: the taught student must gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.data import FrameData
from models.training.loop import TrainConfig
from models.training.optimizer import OptimizerConfig
from models.transfer.distill import TransferConfig, compare, comparison_table, newest, train_by_day
from models.transfer.student import Student, StudentConfig
from tests.models.worlds import World, make_world

SMALL = StudentConfig(width=4, hidden=16, num_recent=8)
TRAIN = TrainConfig(batch_size=128, optimizer=OptimizerConfig(dense_rate=4e-3, warmup_steps=5))


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=150, num_ads=60, num_days=3, rows_per_day=2500, negative_rate=0.4)


@pytest.fixture(scope="module")
def taught_days(world: World) -> list[FrameData]:
    days = []
    for day, probability in zip(world.days[:2], world.probability[:2], strict=True):
        logit = torch.logit(torch.from_numpy(probability).float())
        days.append(day.with_teacher(torch.stack([logit, logit - 1.2], dim=1)))
    return days


def _transfer(**changes: object) -> TransferConfig:
    return replace(TransferConfig(train=TRAIN), **changes)  # type: ignore[arg-type]


def test_every_taught_student_gains_from_an_oracle_teacher(world: World, taught_days: list[FrameData]) -> None:
    students: dict[str, Student] = {
        "none": newest(train_by_day(SMALL, _transfer(technique="none"), taught_days, seed=0)),
        "plain": newest(train_by_day(SMALL, _transfer(technique="plain", weight=2.0), taught_days, seed=0)),
        "auxiliary": newest(train_by_day(SMALL, _transfer(weight=3.0, beta=3.0), taught_days, seed=0)),
        "adapter": newest(
            train_by_day(SMALL, _transfer(technique="adapter", weight=3.0, beta=3.0), taught_days, seed=0)
        ),
    }
    result = compare(students, world.days[2], np.random.default_rng(0), probability_R=world.probability[2])
    assert result["none"].against_untaught is None
    for name in ("plain", "auxiliary", "adapter"):
        interval = result[name].against_untaught
        assert interval is not None
        assert interval.high < 0.0, name
        difference = result[name].values["oracle_ne"] - result["none"].values["oracle_ne"]
        assert interval.estimate == pytest.approx(difference, abs=1e-6)
        assert interval.num_clusters == 150
    table = comparison_table(result)
    assert [row["technique"] for row in table] == ["none", "plain", "auxiliary", "adapter"]
    assert "ne_difference" not in table[0]


def test_vertical_shares_the_domain_models_parameters(world: World, taught_days: list[FrameData]) -> None:
    domain = newest(train_by_day(SMALL, _transfer(), taught_days[:1], seed=0))
    before = {name: value.clone() for name, value in domain.state_dict().items()}
    vertical = newest(train_by_day(SMALL, _transfer(), taught_days[1:], seed=1, surface=1, start_from=domain))
    assert all(torch.equal(value, domain.state_dict()[name]) for name, value in before.items())
    own = {name for name, value in vertical.state_dict().items() if not torch.equal(value, before[name])}
    assert own == {"serving.weight", "serving.bias", "bias_ST"}
    alone = newest(train_by_day(SMALL, _transfer(), taught_days[1:], seed=1, surface=1))
    result = compare(
        {"none": alone, "shared": vertical}, world.days[2], np.random.default_rng(0), surface=1,
        probability_R=world.probability[2],
    )  # fmt: skip
    assert result["shared"].values["rows"] == float((world.days[2].surface_R == 1).sum())
    interval = result["shared"].against_untaught
    assert interval is not None
    assert interval.high < 0.0


def test_training_day_by_day_shows_every_day_and_ends_like_training_at_once(taught_days: list[FrameData]) -> None:
    seen = [
        {name: value.clone() for name, value in student.state_dict().items()}
        for student in train_by_day(SMALL, _transfer(), taught_days, seed=0)
    ]
    assert len(seen) == len(taught_days)
    first = newest(train_by_day(SMALL, _transfer(), taught_days[:1], seed=0)).state_dict()
    last = newest(train_by_day(SMALL, _transfer(), taught_days, seed=0)).state_dict()
    assert all(torch.equal(value, seen[0][name]) for name, value in first.items())
    assert all(torch.equal(value, seen[-1][name]) for name, value in last.items())
    assert not torch.equal(first["serving.weight"], last["serving.weight"])


def test_taught_techniques_need_a_teacher(world: World) -> None:
    with pytest.raises(ValueError, match=r"days\[0\]: technique 'auxiliary' needs teacher logits"):
        newest(train_by_day(SMALL, _transfer(), world.days[:1], seed=0))
    with pytest.raises(ValueError, match="at least one day"):
        newest(train_by_day(SMALL, _transfer(), [], seed=0))
