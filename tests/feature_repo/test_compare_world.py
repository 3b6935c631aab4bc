"""The comparison with public logs: figures by hand, and the real comparison where the logs are present."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from feature_repo.compare_world import (
    Log,
    Row,
    WorldFigures,
    activity_spread,
    compare,
    hour_distance,
    main,
    normalised_entropy,
    render,
    short_gap_share,
    thinned,
    top_share,
)
from feature_repo.simulator.source import SimulatorSource

SHARED = Path(os.environ.get("MIRACH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_top_share() -> None:
    ids = np.repeat(np.arange(10), [55, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    assert top_share(ids, 0.1) == pytest.approx(0.55)
    assert top_share(ids, 0.2) == pytest.approx(0.60)
    assert top_share(ids, 0.001) == pytest.approx(0.55), "at least one id counts"


def test_activity_spread() -> None:
    users = np.repeat([1, 2], [1, 100])
    assert activity_spread(users) == pytest.approx(np.log(100) / 2)


def test_short_gaps_ignore_siblings_and_other_users() -> None:
    users = np.array([1, 2, 1, 1, 2, 1])
    time_s = np.array([0.0, 10.0, 0.0, 1799.0, 5000.0, 1799.0 + 1800.0])
    assert short_gap_share(users, time_s) == pytest.approx(1 / 3)


def test_thinning_keeps_the_wanted_rows_per_user() -> None:
    users = np.repeat(np.arange(500), 40)
    log = Log(users, users * 2, np.arange(len(users), dtype=np.float64), 0.1)
    thin = thinned(log, 10.0, seed=1)
    assert len(thin.user) / 500 == pytest.approx(10.0, rel=0.05)
    np.testing.assert_array_equal(thin.item, thin.user * 2)
    assert len(thinned(log, 1000.0, seed=1).user) == len(users)


def test_hour_distance() -> None:
    noon, one = np.full(10, 12 * 3600.0), np.full(4, 13 * 3600.0 + 86_400)
    assert hour_distance(noon, noon + 5 * 86_400) == 0.0
    assert hour_distance(noon, one) == 1.0
    assert hour_distance(noon, np.concatenate([noon, np.full(10, 0.0)])) == pytest.approx(0.5)


def test_normalised_entropy() -> None:
    assert normalised_entropy(np.full(5, 0.02)) == pytest.approx(1.0)
    p = np.array([0.1, 0.3])
    loss = -np.mean(p * np.log(p) + (1 - p) * np.log(1 - p))
    assert normalised_entropy(p) == pytest.approx(loss / -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)))


def test_page_names_broken_tolerances() -> None:
    rows = [Row("good", 0.5, 0.45, "a", 0.1), Row("bad", 0.5, 0.1, "b", 0.1), Row("other", 1.0, 9.0, "c", None)]
    assert [r.passed for r in rows] == [True, False, None]
    page = render(rows, {"tiny": WorldFigures(1, 2, 3000, 4, 5, 0.02, 0.85)})
    assert "| good | 0.500 | 0.450 | a | 0.100 | yes |" in page
    assert "| bad | 0.500 | 0.100 | b | 0.100 | **no** |" in page
    assert "| other | 1.000 | 9.000 | c |  | shown only |" in page
    assert "| `tiny` | 1 | 2 | 3,000 | 4 | 5 | 0.0200 | 0.850 |" in page


def test_missing_logs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kuairand_pure_part/interactions\.parquet does not exist"):
        compare(SimulatorSource.open("tiny", seed=0), tmp_path)


@pytest.mark.skipif(
    not (SHARED / "kuairand_pure_part" / "interactions.parquet").exists(),
    reason=f"public logs are not below {SHARED} (set MIRACH_SHARED_DATA)",
)
def test_real_comparison_of_the_tiny_world(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = tmp_path / "simulator.md"
    with caplog.at_level(logging.INFO):
        code = main(["--data", str(SHARED), "--page", str(page), "--preset", "tiny"])
    text = page.read_text()
    assert code == int("**no**" in text)
    assert text.count("| yes |") >= 6
    assert "| KuaiRand-Pure history lengths |" in text
    assert "click rate" in caplog.text


def test_the_command_names_the_folder_that_lacks_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare_world", "--data", str(tmp_path), "--page", str(tmp_path / "page.md"), "--preset", "tiny"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.delitem(sys.modules, "feature_repo.compare_world")
    with pytest.raises(ValueError, match=rf"data: {tmp_path}/kuairand_pure_part/interactions\.parquet does not exist"):
        runpy.run_module("feature_repo.compare_world", run_name="__main__")
    assert not (tmp_path / "page.md").exists()
