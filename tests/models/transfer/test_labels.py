"""Teacher labels: made by an earlier model only, and stored whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.training.logistic import Logistic
from models.training.loop import predict
from models.transfer.labels import label_day, load_labels, save_labels
from tests.models.worlds import World, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=20, num_ads=15, num_days=1, rows_per_day=100)


@pytest.mark.parametrize("trained_through", ["2026-01-06", "2026-01-07"])
def test_a_teacher_that_saw_the_day_is_refused(world: World, trained_through: str) -> None:
    with pytest.raises(ValueError, match=f"the teacher saw {trained_through}, so it can't label 2026-01-06"):
        label_day(Logistic(world.schema), trained_through, "2026-01-06", world.days[0])


def test_labels_are_the_teachers_logits(world: World, tmp_path: Path) -> None:
    model, day = Logistic(world.schema), world.days[0]
    model.set_prior(torch.tensor([[0.2, 0.1], [0.3, 0.1]]))
    labels = label_day(model, "2026-01-05", "2026-01-06", day)
    torch.testing.assert_close(labels.logit_RT, predict(model, day))
    save_labels(tmp_path / "labels.safetensors", labels)
    loaded = load_labels(tmp_path / "labels.safetensors")
    assert (loaded.day, loaded.trained_through) == ("2026-01-06", "2026-01-05")
    assert torch.equal(loaded.logit_RT, labels.logit_RT)


def test_sample_only_labels_leave_the_rest_unlabelled(world: World) -> None:
    day = world.days[0]
    labels = label_day(Logistic(world.schema), "2026-01-05", "2026-01-06", day, kept_only=True)
    assert torch.equal(~torch.isnan(labels.logit_RT[:, 0]), day.keep_R)
