from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.capacity import ROW_COST, measured, row_of, variant_of
from benchmarks.index_cells import Cell
from models import metrics
from models.index.publish import publish
from models.index.search import beam_search
from tests.models.index.small import placed_model, small_config
from tests.models.worlds import make_world

WORLD = make_world(num_users=80, num_ads=120, num_days=1, rows_per_day=600)


def test_rows_name_the_sizes_of_their_levels() -> None:
    heavy = variant_of("L M S").change(small_config())
    assert (heavy.level_sizes, heavy.num_user_vectors, heavy.hidden) == ((8, 8), (12, 4, 2), (64, 16, 8))
    one_level = variant_of("L S").change(small_config())
    assert (one_level.level_sizes, one_level.hidden) == ((32,), (64, 8))
    flat = variant_of("M")
    assert not flat.with_index
    assert flat.change(small_config()).num_user_vectors[-1] == 4


def test_a_flat_row_costs_a_full_scan_and_a_beam_what_it_scored() -> None:
    data = WORLD.days[0]
    model = placed_model(data.schema, data.ads)
    index = publish(model, data.ads)
    flat, beam = measured(model, index, data, {}), measured(model, index, data, {ROW_COST: (1, 2)})
    assert beam["flops"] < 0.7 * flat["flops"]
    assert flat["ne"] == beam["ne"]
    assert min(flat["ms"], beam["ms"]) > 0.0
    state = model.user_state(data.user_batch(torch.arange(9)), data.ads)
    assert float(beam_search(model, index, state, beams=(1, 2), k=10).cost_B.mean()) < 1.0


def test_the_entropy_is_that_of_the_ad_scorers_logits_of_all_impressions() -> None:
    data = WORLD.days[0]
    model = placed_model(data.schema, data.ads)
    rows = data.rows()
    rows = rows[data.mature_RT[rows, 0] > 0]
    with torch.no_grad():
        state = model.user_state(data.user_batch(rows), data.ads)
        code_B1 = data.ad_code_R[rows][:, None]
        feature = torch.cat([state.interest.own(data.ads.group_NG[code_B1]), state.interest.seen(code_B1)])
        logit_B = model.level(2).own(state.levels[2], model.ad_vectors(data.ads)[code_B1], feature)[:, 0]
    wanted = metrics.normalised_entropy(data.label_RT[rows, 0].numpy(), logit_B.double().numpy() + data.judged_offset)
    assert measured(model, publish(model, data.ads), data, {})["ne"] == pytest.approx(wanted, rel=1e-5)


def test_a_row_is_the_mean_of_its_seeds_as_a_share_of_the_best() -> None:
    values = {"flops": 10.0, "ms": 1.0, "train_s": 2.0, "ne": 0.9}
    cells = [
        Cell(values, {"user": np.arange(2.0), "scorer@10": np.array([1.0, 1.0]), "best@10": np.array([2.0, 2.0])}),
        Cell(
            {**values, "ms": 3.0},
            {"user": np.arange(2.0), "scorer@10": np.array([2.0, 2.0]), "best@10": np.ones(2) * 2},
        ),
    ]
    row = row_of(cells)
    assert row["recall"] == pytest.approx(0.75)
    assert row["ms"] == pytest.approx(2.0)
    assert row["ne"] == pytest.approx(0.9)
