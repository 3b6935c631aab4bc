from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.index.audit import (
    SPARE,
    SweepPoint,
    answer,
    audit_index,
    beam_choices,
    beam_sweep,
    choices_to_sweep,
    choose_beams,
    choose_tiers,
    draw_requests,
    non_inferiority,
    true_clicks,
)
from models.index.cost import candidate_cost
from models.index.monn import RetrievalModel
from models.index.publish import publish
from tests.models.index.small import placed_model
from tests.models.worlds import make_world

WORLD = make_world(num_users=80, num_ads=60, num_days=1, rows_per_day=900)
DATA = WORLD.days[0]


def _model() -> RetrievalModel:
    return placed_model(WORLD.schema, DATA.ads)


def _points() -> list[SweepPoint]:
    rows = [
        ((1, 1), 0.5, 0.01),
        ((2, 4), 0.9, 0.03),
        ((4, 8), 0.96, 0.045),
        ((4, 16), 0.97, 0.06),
        ((8, 32), 0.99, 0.1),
    ]
    return [SweepPoint(b, c, 0.01, cost, 0.0, 0.0) for b, c, cost in rows]


def test_requests_are_of_different_users_in_disjoint_parts() -> None:
    calibration, audit = draw_requests(DATA, [20, 1000], seed=3)
    assert len(calibration.row_B) == 20
    users = np.concatenate([calibration.user_B, audit.user_B])
    assert len(np.unique(users)) == len(users) == len(torch.unique(DATA.user_code_R))
    assert (DATA.user_code_R.numpy()[audit.row_B] == audit.user_B).all()
    for user, relevant in zip(audit.user_B[:10], audit.relevant_BM[:10], strict=True):
        mine = (DATA.user_code_R == int(user)) & (DATA.label_RT[:, 0] > 0.5)
        assert set(relevant[relevant >= 0].tolist()) == set(DATA.ad_code_R[mine].tolist())
    again, _ = draw_requests(DATA, [20, 1000], seed=3)
    assert (again.row_B == calibration.row_B).all()
    with pytest.raises(ValueError, match="1000 requests"):
        draw_requests(DATA, [1000], seed=0)


def test_a_beam_of_all_nodes_covers_everything_and_the_oracle_bounds_clicks() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    (requests,) = draw_requests(DATA, [60], seed=0)
    generator = np.random.default_rng(0)
    probability_BN = generator.random((60, 60)).astype(np.float32)
    report = audit_index(model, index, DATA, requests, beams=index.level_sizes, k=5, probability_BN=probability_BN)
    assert report.coverage.estimate == 1.0
    assert report.expected_clicks["index"].estimate == report.expected_clicks["exact"].estimate
    assert all(0.0 < i.estimate < 1.0 for i in report.expected_clicks.values())
    assert report.recall["index"].estimate == report.recall["exact"].estimate
    assert report.ads_scored == 60.0
    assert report.cost > 1.0
    assert report.slices["surface=feed"]["num_requests"] + report.slices["surface=stories"]["num_requests"] == 60
    assert report.slices["activity=low"]["coverage"] == 1.0
    (best,) = answer(model, index, DATA, requests.row_B, ["exact"], k=60)
    everything = true_clicks(best.ad_code_BK, probability_BN)
    np.testing.assert_allclose(everything, probability_BN.sum(1), rtol=1e-5)


def test_the_oracle_of_a_perfect_answer_is_one() -> None:
    probability_BN = np.array([[0.1, 0.4, 0.3], [0.2, 0.0, 0.9]])
    np.testing.assert_allclose(true_clicks(np.array([[1, 2], [2, -1]]), probability_BN), [0.7, 0.9])


def test_a_narrow_beam_costs_less_and_covers_less() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    (requests,) = draw_requests(DATA, [60], seed=0)
    points = beam_sweep(model, index, DATA, requests, [(1, 1), (2, 5), index.level_sizes], k=5)
    assert [p.cost for p in points] == sorted(p.cost for p in points)
    assert points[0].beams == (1, 1)
    assert points[0].coverage < points[-1].coverage == 1.0
    assert points[0].ads_scored < points[1].ads_scored < points[2].ads_scored
    assert points[-1].standard_error == 0.0


def test_beams_are_the_cheapest_that_reach_the_target() -> None:
    assert choose_beams(_points(), target=0.95, max_cost=0.05).beams == (4, 8)
    assert choose_beams(_points(), target=0.85, max_cost=1.0).beams == (2, 4)
    assert choose_beams(_points(), target=0.99, max_cost=0.05).beams == (4, 8)
    unsure = [replace(point, standard_error=0.06) for point in _points()]
    assert (
        choose_beams(unsure, target=0.85, max_cost=1.0).cost > choose_beams(_points(), target=0.85, max_cost=1.0).cost
    )
    with pytest.raises(ValueError, match=r"0\.0100"):
        choose_beams(_points(), target=0.5, max_cost=0.001)
    tiers = choose_tiers(_points(), {"lite": (0.85, 0.05), "standard": (0.95, 0.05), "full": (0.98, 0.15)})
    assert {name: p.beams for name, p in tiers.items()} == {"lite": (2, 4), "standard": (4, 8), "full": (8, 32)}
    assert choose_tiers(_points()[-1:])["lite"].beams == (8, 32)


def test_choices_of_beams_fit_the_levels() -> None:
    choices = beam_choices((4, 16))
    assert (1, 1) in choices
    assert (4, 16) in choices
    assert all(a <= 4 and b <= 16 and a <= b for a, b in choices)
    assert len(choices) == len(set(choices))


def test_non_inferiority_needs_the_bound_above_the_margin() -> None:
    generator = np.random.default_rng(0)
    reference = generator.random(400) + 0.5
    user = np.arange(400)
    same = non_inferiority(reference * (1 + 0.01 * generator.normal(size=400)), reference, user)
    assert same.passed
    worse = non_inferiority(0.95 * reference, reference, user)
    assert not worse.passed
    assert worse.ratio.estimate == pytest.approx(0.95)
    noisy = non_inferiority(reference[:20] * generator.lognormal(0, 0.5, 20), reference[:20], user[:20])
    assert not noisy.passed
    assert "margin 2.00%" in noisy.reason


def test_only_affordable_beams_are_swept() -> None:
    model = _model()
    index = publish(model, DATA.ads)
    cost = candidate_cost(model.config, len(model.schema.groups))

    def expected(choice: tuple[int, ...]) -> float:
        *beams, related, spare = choice
        assert related == 0, "the model counts no co-visits"
        nodes = index.level_sizes[0], beams[0] * index.level_sizes[1] / index.level_sizes[0]
        under = beams[1] * index.num_ads / index.level_sizes[1]
        flops = sum(n * each for n, each in zip(nodes, cost.node_L, strict=True)) + under * cost.sketch
        return (flops + min(under, 10 + spare) * cost.ad) / (index.num_ads * cost.ad)

    swept = choices_to_sweep(model, index, max_cost=0.4)
    assert {c[-1] for c in swept} <= set(SPARE)
    assert max(map(expected, swept)) <= 0.6
    left_out = set(choices_to_sweep(model, index, max_cost=9.0)) - set(swept)
    assert min(map(expected, left_out)) > 0.6
    (cheapest,) = choices_to_sweep(model, index, max_cost=0.001)
    assert expected(cheapest) == min(map(expected, [*swept, *left_out]))
