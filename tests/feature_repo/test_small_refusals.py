"""Refusals of helpers that no larger test meets: each names the field and the value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.adapters.registry import open_source
from feature_repo.catalogue import build_catalogue
from feature_repo.columns import finite
from feature_repo.days import codes_table
from feature_repo.event_log import _check_events
from feature_repo.sql import transform_text
from feature_repo.tables import read_facts
from tests.feature_repo.handmade import DAY1, FACTS, new_lake


def test_names_that_do_not_fit_codes() -> None:
    assert codes_table(["a", "b"])["code"].to_pylist() == [0, 1]
    with pytest.raises(ValueError, match="names: 256 of them do not fit 8-bit codes"):
        codes_table([str(n) for n in range(256)])


def test_values_that_are_not_finite_are_counted() -> None:
    with pytest.raises(ValueError, match="bid: 2 values are missing or not finite"):
        finite("bid", np.array([1.0, np.nan, np.inf]))


def test_unknown_transforms_and_lakes_without_a_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"transform 'nothing' does not exist; known transforms: .*training_frame"):
        transform_text("nothing")
    with pytest.raises(ValueError, match=r"source.json does not exist: ingest a source first"):
        read_facts(tmp_path)


def test_more_category_levels_than_columns(tmp_path: Path) -> None:
    facts = replace(FACTS, category_levels=99)
    with pytest.raises(ValueError, match="category_levels: 99 is more than"):
        build_catalogue(new_lake(tmp_path), facts, DAY1)


def test_events_on_surfaces_that_the_source_lacks() -> None:
    events = pa.table({"surface": pa.array([0, None], pa.uint8()), "available_us": pa.array([1, 2], pa.int64())})
    with pytest.raises(ValueError, match=r"engagements/2026-01-05: 1 events have a surface the source lacks"):
        _check_events(events, "2026-01-05", 10)


def test_an_amazon_source_without_a_folder() -> None:
    with pytest.raises(ValueError, match="data_dir: the amazon_beauty source needs the folder"):
        open_source("amazon_beauty")
