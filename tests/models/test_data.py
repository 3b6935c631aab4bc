"""Frames to batches: order, offsets, slices, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.data import FrameData, to_ad_table, to_history, to_user_table
from tests.models.worlds import World, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(num_users=30, num_ads=25, num_days=2, rows_per_day=200)


def _frame_columns(num_rows: int = 2) -> dict[str, Any]:
    return {
        "user_code": np.zeros(num_rows), "ad_code": np.zeros(num_rows), "surface": np.zeros(num_rows),
        "hour": np.zeros(num_rows), "timestamp_us": np.zeros(num_rows), "end_offset": np.zeros(num_rows),
        "keep": np.ones(num_rows, dtype=bool), "label_click": np.array([1, 0]), "label_conversion": np.zeros(num_rows),
        "mature_click": np.ones(num_rows), "mature_conversion": np.zeros(num_rows),
    }  # fmt: skip


def test_batch_gathers_users_history_and_labels(world: World) -> None:
    day = world.days[1]
    rows = torch.tensor([5, 17, 3])
    batch = day.batch(rows)
    users = day.user_code_R[rows]
    assert torch.equal(batch.user.categorical_BC, world.users.categorical_UC[users])
    assert torch.equal(batch.label_BT, day.label_RT[rows])
    assert torch.equal(batch.user.history.start_B1.diff(), day.end_offset_R[rows].clamp(max=100))
    newest = world.history.offset_U1[users[0]] + day.end_offset_R[5] - 1
    last = int(batch.user.history.start_B1[1]) - 1
    assert batch.user.history.item_E[last] == world.history.item_E[newest]
    assert torch.isnan(batch.teacher_BT).all()


def test_logit_offset_is_minus_log_of_the_rate(world: World) -> None:
    day = replace(world.days[0], negative_rate=0.25)
    assert day.batch(torch.tensor([0])).logit_offset_B[0].item() == pytest.approx(math.log(4))


def test_batches_cover_the_training_sample_once(world: World) -> None:
    day = world.days[0]
    generator = torch.Generator().manual_seed(3)
    seen = torch.cat([b.ad_code_B for b in day.batches(16, generator=generator)])
    kept = day.ad_code_R[day.keep_R]
    assert len(seen) == int(day.keep_R.sum()) < day.num_rows
    assert torch.equal(seen.sort().values, kept.sort().values)
    assert not torch.equal(seen, kept)
    again = torch.cat([b.ad_code_B for b in day.batches(16, generator=torch.Generator().manual_seed(3))])
    assert torch.equal(seen, again)


def test_batches_without_a_generator_keep_the_order(world: World) -> None:
    day = world.days[0]
    rows = torch.tensor([9, 2, 4])
    parts = list(day.batches(2, rows=rows))
    assert [len(b.ad_code_B) for b in parts] == [2, 1]
    assert torch.equal(torch.cat([b.ad_code_B for b in parts]), day.ad_code_R[rows])


def test_rows_by_surface_and_sample(world: World) -> None:
    day = world.days[0]
    stories = day.rows(surface=1)
    assert bool((day.surface_R[stories] == 1).all())
    assert len(stories) + len(day.rows(surface=0)) == day.num_rows
    vertical = day.only_surface(1)
    assert torch.equal(vertical.rows(kept_only=True), day.rows(kept_only=True, surface=1))


def test_pairs_have_no_labels(world: World) -> None:
    day = world.days[0]
    rows, codes = day.random_pairs(50, torch.Generator().manual_seed(0))
    batch = day.pairs(rows, codes)
    assert torch.equal(batch.ad_code_B, codes)
    assert float(batch.mature_BT.sum()) == 0.0
    assert torch.equal(batch.user.surface_B, day.surface_R[rows])


def test_random_pairs_leave_out_retired_ads(world: World) -> None:
    day = world.days[0]
    retired = torch.ones(25, dtype=torch.bool)
    retired[7] = False
    only = replace(day, ads=replace(day.ads, retired_N=retired))
    _, codes = only.random_pairs(20, torch.Generator().manual_seed(0))
    assert set(codes.tolist()) == {7}


def test_with_teacher_checks_the_shape(world: World) -> None:
    day = world.days[0]
    taught = day.with_teacher(torch.zeros(day.num_rows, 2))
    assert float(taught.batch(torch.tensor([0])).teacher_BT.sum()) == 0.0
    with pytest.raises(ValueError, match="teacher: shape"):
        day.with_teacher(torch.zeros(3, 2))


def test_from_columns_refuses_bad_input(world: World) -> None:
    schema, users, ads, history = world.schema, world.users, world.ads, world.history

    def build(columns: dict[str, Any], rate: float = 1.0) -> FrameData:
        return FrameData.from_columns(schema, columns, users, ads, history, negative_rate=rate)

    good = _frame_columns()
    assert build(good).num_rows == 2
    with pytest.raises(ValueError, match="negative_rate"):
        build(good, rate=0.0)
    with pytest.raises(ValueError, match="'label_click' is missing"):
        build({k: v for k, v in good.items() if k != "label_click"})
    with pytest.raises(ValueError, match=r"ad_code: values 0\.\.25, the table has 25 rows"):
        build(good | {"ad_code": np.array([0, 25])})


def test_tables_refuse_other_widths_and_infinities(world: World) -> None:
    schema = world.schema
    good: dict[str, Any] = {
        "user_id_U": np.arange(2), "user_categorical_UC": np.zeros((2, 2)), "user_dense_UD": np.zeros((2, 1))
    }  # fmt: skip
    assert to_user_table(good, schema).dense_UD.dtype == torch.float32
    with pytest.raises(ValueError, match="user_categorical_UC: shape"):
        to_user_table(good | {"user_categorical_UC": np.zeros((2, 3))}, schema)
    with pytest.raises(ValueError, match=r"not finite: \['activity'\]"):
        to_user_table(good | {"user_dense_UD": np.array([[0.0], [np.inf]])}, schema)
    with pytest.raises(ValueError, match="column 'ad_dense_NF' is missing"):
        to_ad_table(good, schema)


def test_history_offsets_must_end_at_the_number_of_events() -> None:
    events = {
        "offset_U1": np.array([0, 2]), "item_E": np.zeros(3), "time_E": np.zeros(3), "kind_E": np.zeros(3),
        "surface_E": np.zeros(3),
    }  # fmt: skip
    with pytest.raises(ValueError, match="offset: ends at 2, there are 3 events"):
        to_history(events)
