from __future__ import annotations

import numpy as np
import pytest

from feature_repo.adapters.registry import open_source
from feature_repo.oracle import click_matrix
from feature_repo.simulator.source import SimulatorSource


def test_the_matrix_holds_the_oracles_probability_of_every_live_ad() -> None:
    source = open_source("simulator", preset="tiny")
    assert isinstance(source, SimulatorSource)
    day = source.facts.days[3]
    tables = dict(source.tables(day))
    shown = tables["impressions"].slice(0, 200)
    ad_id_N = np.unique(shown["ad_id"].to_numpy())
    live_N = np.arange(len(ad_id_N)) % 5 > 0
    time_us = int(np.median(shown["timestamp"].cast("int64").to_numpy()))
    surfaces = shown["surface"].to_pylist()
    code_B = np.array([source.facts.surfaces.index(name) for name in surfaces])
    user_B = shown["user_id"].to_numpy()
    truth_BN = click_matrix(source, user_B, code_B, np.full(200, time_us), ad_id_N, live_N)
    assert truth_BN.shape == (200, len(ad_id_N))
    assert not truth_BN[:, ~live_N].any()
    for row, column in ((0, 1), (57, 3), (199, len(ad_id_N) - 2)):
        wanted = source.world.click_probability(user_B[[row]], ad_id_N[[column]], code_B[[row]], np.array([time_us]))
        assert truth_BN[row, column] == pytest.approx(wanted[0] if live_N[column] else 0.0, rel=1e-5)


def test_surfaces_without_requests_are_not_asked() -> None:
    source = open_source("simulator", preset="tiny")
    assert isinstance(source, SimulatorSource)
    tables = dict(source.tables(source.facts.days[3]))
    shown = tables["impressions"].slice(0, 5)
    ad_id_N, user_B = np.unique(shown["ad_id"].to_numpy()), shown["user_id"].to_numpy()
    time_us_B = np.full(5, int(shown["timestamp"].cast("int64")[0].as_py()))
    code = source.facts.surfaces.index("search")
    truth_BN = click_matrix(source, user_B, np.full(5, code), time_us_B, ad_id_N, np.ones(len(ad_id_N), bool))
    wanted_BN = source.world.click_matrix(user_B, "search", int(time_us_B[0]), ad_id_N)
    np.testing.assert_allclose(truth_BN, wanted_BN, rtol=1e-6)
