from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from models.index.publish import publish
from models.index.search import beam_search
from models.tuning.node_data import NODE_DATA, NodeDataConfig, collect_node_data, interesting_nodes, node_data_quality
from tests.models.index.small import placed_model
from tests.models.worlds import make_world

WORLD = make_world(num_users=40, num_ads=60, num_days=1, rows_per_day=200)
DATA = WORLD.days[0]


def test_the_fewest_nodes_that_hold_the_rate_are_kept() -> None:
    node_BK = torch.tensor([[3, 3, 3, 1, 1, 2, 0, -1], [5, 5, 5, 5, 4, 4, 4, 4]])
    row, node, weight = interesting_nodes(node_BK, 6, 0.6)
    # 7 ads in row 0: node 3 holds 3/7 < 0.6, with node 1 it is 5/7; row 1: node 4 holds 4/8, node 5 the rest
    assert list(zip(row.tolist(), node.tolist(), strict=True)) == [(0, 3), (0, 1), (1, 4), (1, 5)]
    assert weight.tolist() == pytest.approx([3 / 5, 2 / 5, 0.5, 0.5])
    row, node, _ = interesting_nodes(node_BK, 6, 0.4)
    assert list(zip(row.tolist(), node.tolist(), strict=True)) == [(0, 3), (1, 4)]
    assert len(interesting_nodes(node_BK, 6, 1.0)[0]) == 6


def test_node_data_are_nodes_on_the_paths_of_the_best_ads() -> None:
    model = placed_model(WORLD.schema, DATA.ads)
    index = publish(model, DATA.ads)
    rows = torch.arange(30)
    config = NodeDataConfig(beams=(2, 6), best=8, depth=2, interest_rate=0.6)
    table = collect_node_data(model, index, DATA, rows, config)
    assert table.schema.equals(NODE_DATA)
    assert set(table["level"].to_pylist()) == {0, 1}
    with torch.no_grad():
        state = model.user_state(DATA.user_batch(rows), DATA.ads)
    found = beam_search(model, index, state, beams=(2, 6), k=8)
    for line in table.slice(0, 40).to_pylist():
        level = index.levels[line["level"]]
        codes = found.ad_code_BK[line["row"]]
        assert line["node"] in level.node_N[codes[codes >= 0]].tolist()
        assert line["path"] == level.path_KL[line["node"]].tolist()
        assert line["user_code"] == int(DATA.user_code_R[line["row"]])
    grouped = table.group_by(["row", "level"]).aggregate([("weight", "sum")])
    np.testing.assert_allclose(grouped["weight_sum"].to_numpy(), 1.0, rtol=1e-5)
    shallow = collect_node_data(model, index, DATA, rows, NodeDataConfig(beams=(2, 6), depth=1))
    assert set(shallow["level"].to_pylist()) == {1}


def test_purity_and_coverage_by_hand() -> None:
    model = placed_model(WORLD.schema, DATA.ads, (2,))
    index = publish(model, DATA.ads)
    node_N = index.levels[0].node_N
    ad_of = [int((node_N == node).nonzero()[0]) for node in range(2)]
    rows = [(0, 7, 0), (0, 7, 1), (1, 8, 0), (2, 9, 1)]
    table = pa.table(
        {
            "row": [r for r, _, _ in rows], "user_code": [u for _, u, _ in rows], "level": [0] * 4,
            "node": [n for _, _, n in rows], "path": [[n] for _, _, n in rows], "weight": [1.0] * 4,
        },
        schema=NODE_DATA,
    )  # fmt: skip
    # user 7 clicked in node 0, user 8 in node 1, user 9 nothing, user 3 has no data
    user = np.array([7, 8, 3])
    ad = np.array([ad_of[0], ad_of[1], ad_of[0]])
    (quality,) = node_data_quality(table, index, user, ad)
    assert quality.purity == pytest.approx(1 / 3)
    assert quality.coverage == pytest.approx(1 / 2)
    assert quality.num_users == 3
    assert quality.nodes_per_request == pytest.approx(4 / 3)


def test_knobs_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="interest_rate"):
        NodeDataConfig(beams=(1, 1), interest_rate=0.0)
    with pytest.raises(ValueError, match="depth"):
        NodeDataConfig(beams=(1, 1), depth=0)
