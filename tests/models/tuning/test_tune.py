from __future__ import annotations

import numpy as np
import pytest
import torch

from models.index.audit import answer, draw_requests
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.index.search import exact_search
from models.metrics import recall_at_k
from models.tuning.node_data import NodeDataConfig, collect_node_data
from models.tuning.tune import TuningConfig, click_pairs, judge, random_pairs, split_by_time, tune
from tests.models.index.small import placed_model
from tests.models.worlds import make_world

WORLD = make_world(num_users=60, num_ads=120, num_days=1, rows_per_day=600)
DATA = WORLD.days[0]
CONFIG = TuningConfig(num_steps=40, rows_per_step=32, learning_rate=3e-3, beam_width=4)


def _model() -> RetrievalModel:
    model = placed_model(WORLD.schema, DATA.ads)
    with torch.no_grad():
        model.ensemble_LL.fill_(-20.0)  # the serving score is the ad's own, so that the exact answer stays put
    return model


def test_tuning_on_node_data_raises_coverage_and_random_pairs_do_not() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    early, late = split_by_time(DATA, (0.5, 0.5))
    pairs = collect_node_data(
        model, index, DATA, early, NodeDataConfig(beams=index.level_sizes, best=5, interest_rate=0.8)
    )
    tuned = tune(model, index, DATA, pairs, CONFIG, seed=0)
    control = tune(model, index, DATA, random_pairs(pairs, index, seed=0), CONFIG, seed=0)
    rows = late.numpy()[:150]

    def coverage(searched: RetrievalModel) -> float:
        found, exact = answer(searched, index, DATA, rows, [(2, 4), "exact"], k=5)
        return float(recall_at_k(found.ad_code_BK, exact.ad_code_BK).mean())

    before, after, random = coverage(model), coverage(tuned), coverage(control)
    assert after > before + 0.05
    assert random < after - 0.05


def test_only_node_scorers_move() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    rows = torch.arange(100)
    pairs = collect_node_data(model, index, DATA, rows, NodeDataConfig(beams=(2, 4)))
    tuned = tune(model, index, DATA, pairs, CONFIG, seed=0)
    moved = {n for n, p in tuned.named_parameters() if not torch.equal(p, model.get_parameter(n))}
    assert moved
    assert all(name.startswith(("levels.0.", "levels.1.")) for name in moved)
    (requests,) = draw_requests(DATA, [20], seed=0)
    with torch.no_grad():
        user = DATA.user_batch(torch.from_numpy(requests.row_B))
        one = exact_search(model, index, model.user_state(user, DATA.ads), 5, ad_scorer=True)
        two = exact_search(tuned, index, tuned.user_state(user, DATA.ads), 5, ad_scorer=True)
    assert torch.equal(one.ad_code_BK, two.ad_code_BK)
    again = tune(model, index, DATA, pairs, CONFIG, seed=0)
    assert torch.equal(again.level(0).output_H, tuned.level(0).output_H)


def test_click_pairs_are_the_nodes_of_clicked_ads() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    rows = torch.arange(200)
    table = click_pairs(index, DATA, rows)
    num_clicks = int((DATA.label_RT[rows, 0] > 0.5).sum())
    assert table.num_rows == 2 * num_clicks
    for line in table.to_pylist()[:20]:
        assert float(DATA.label_RT[line["row"], 0]) == 1.0
        assert line["node"] == int(index.levels[line["level"]].node_N[DATA.ad_code_R[line["row"]]])
    with pytest.raises(ValueError, match="no node data"):
        tune(model, index, DATA, table.slice(0, 0), CONFIG, seed=0)


def test_the_gate_keeps_gains_and_refuses_null_results() -> None:
    generator = np.random.default_rng(0)
    base, user = generator.random(2000), np.arange(2000)
    noise = 0.01 * generator.normal(size=2000)
    better = judge(base + 0.01 + noise, base, user, margin=0.005)
    assert better.kept
    assert better.reason.startswith("kept: better")
    null = judge(base + noise, base, user, margin=0.005)
    assert not null.kept
    assert "no gain" in null.reason
    worse = judge(base - 0.01 + noise, base, user, margin=0.005)
    assert not worse.kept
    assert "worse" in worse.reason
    covered = generator.random(2000)
    by_coverage = judge(base + noise, base, user, margin=0.005, coverage=(covered + 0.02, covered))
    assert by_coverage.kept
    assert "coverage is better" in by_coverage.reason


def test_a_slice_that_cannot_see_the_effect_decides_nothing() -> None:
    generator = np.random.default_rng(0)
    base = (generator.random(60) < 0.05).astype(float)
    other = (generator.random(60) < 0.05).astype(float)
    other[:20] = np.nan
    verdict = judge(other, base, np.arange(60), margin=0.001, coverage=(base + 1.0, base))
    assert not verdict.kept
    assert "can't see" in verdict.reason
    assert verdict.gain.num_clusters == 40


def test_slices_follow_time() -> None:
    early, middle, late = split_by_time(DATA, (0.5, 0.25, 0.25))
    assert len(early) + len(middle) + len(late) == DATA.num_rows
    assert int(DATA.time_us_R[early].max()) <= int(DATA.time_us_R[middle].min())
    assert int(DATA.time_us_R[middle].max()) <= int(DATA.time_us_R[late].min())
    with pytest.raises(ValueError, match="shares"):
        split_by_time(DATA, (0.5, 0.4))
