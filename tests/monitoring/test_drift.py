from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from monitoring import workspace
from monitoring.drift import DriftConfig, drift_report, infer_config
from monitoring.embedding import centroid_shift


def features(seed: int, rows: int = 2000, shift: float = 0.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "dense_ctr": rng.normal(shift, 1.0, rows),
        "dense_age": rng.exponential(1.0 + shift, rows),
        "cat_country": rng.choice(5, rows, p=[0.4, 0.3, 0.1, 0.1, 0.1] if shift == 0 else [0.1, 0.1, 0.1, 0.3, 0.4]),
        "cat_user_id": rng.integers(0, 100_000, rows),
        "embedding": list(rng.normal(shift, 1.0, (rows, 4)).astype(np.float32)),
    }


def test_same_distribution_is_quiet() -> None:
    report = drift_report(pa.table(features(0)), pa.table(features(1)), name="users", day="2026-01-05")
    assert not report.alarm
    assert report.drifted == ()
    assert max(report.scores.values()) < 0.1
    assert report.embedding_shift is not None
    assert report.embedding_shift < 0.1
    assert report.new_values["cat_user_id"] > 0.9  # ids are always new; they alarm nobody
    assert report.new_values["cat_country"] == 0.0


def test_shifted_data_fires_and_is_stored(tmp_path: Path) -> None:
    reference, current = pa.table(features(0)), pa.table(features(1, shift=1.0))
    for _ in range(2):
        report = drift_report(reference, current, name="users", day="2026-01-05", home=tmp_path)
    assert set(report.drifted) == {"dense_ctr", "dense_age", "cat_country"}
    assert report.embedding_shift == pytest.approx(1.0, abs=0.1)  # shift of 1 in all 4, spread sqrt(4)
    assert len(report.alarms) == 2
    assert report.html is not None
    assert report.html.stat().st_size > 100_000
    project = workspace.open_project(tmp_path / "reports" / "workspace", "drift")
    from evidently.ui.workspace import Workspace

    stored = Workspace.create(str(tmp_path / "reports" / "workspace"))
    assert len(stored.list_runs(project.id)) == 1  # the re-run replaced the first
    assert [p.name for p in stored.list_projects()] == ["mirach drift"]
    assert [p.title for p in project.dashboard.model().panels][:2] == [
        "user features",
        "Share of drifted columns",
    ]


def test_missing_values_and_null_columns_alarm() -> None:
    old, new = features(0), features(1)
    new["dense_ctr"][:400] = np.nan
    new["dense_age"] = pa.nulls(2000, pa.float64())
    old["dense_extra"] = new["dense_extra"] = pa.nulls(2000, pa.float64())
    report = drift_report(pa.table(old), pa.table(new), name="users", day="2026-01-05")
    assert report.dropped == ("dense_age", "dense_extra")
    assert report.missing["dense_ctr"] == pytest.approx(0.2)
    assert report.alarms == ("dense_ctr is missing more often", "dense_age has no value at all")


def test_small_samples_raise_no_alarm() -> None:
    few = pa.table(features(1, rows=100, shift=2.0))
    assert not drift_report(pa.table(features(0)), few, name="users", day="2026-01-05").alarm


def test_large_tables_are_sampled() -> None:
    big = pa.table(features(0, rows=5000))
    config = infer_config(big, max_rows=1000)
    report = drift_report(big, big, name="users", day="2026-01-05", config=config)
    assert report.values["RowCount"] == 1000.0
    assert report.num_current == 5000


def test_embeddings_of_fixed_size_with_holes_and_of_no_width() -> None:
    table = pa.table(features(0))
    vectors = np.stack(features(0)["embedding"]).ravel()
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(vectors), 4).to_pylist()
    holes = pa.array([None, *fixed[1:]], pa.list_(pa.float32(), 4))
    place = table.column_names.index("embedding")
    report = drift_report(table, table.set_column(place, "embedding", holes), name="ads", day="2026-01-05")
    assert report.embedding_shift == pytest.approx(0.0, abs=1e-2)
    none = table.set_column(place, "embedding", pa.array([[]] * 2000, pa.list_(pa.float32())))
    assert drift_report(none, none, name="ads", day="2026-01-05").embedding_shift is None


def test_bad_input_names_the_column() -> None:
    table = pa.table(features(0))
    with pytest.raises(ValueError, match="columns missing: dense_nothing"):
        drift_report(table, table, name="x", day="2026-01-05", config=DriftConfig(("dense_nothing",), ()))
    with pytest.raises(ValueError, match="current: no rows"):
        drift_report(table, table.slice(0, 0), name="x", day="2026-01-05")


def test_centroid_shift_by_hand() -> None:
    reference = np.array([[0.0, 1.0], [0.0, -1.0]])
    assert centroid_shift(reference + np.array([3.0, 4.0]), reference) == pytest.approx(5.0)
    assert centroid_shift(np.zeros((2, 2)), np.zeros((3, 2))) == 0.0
