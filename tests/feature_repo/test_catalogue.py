"""Codes of the catalogue: append-only, contiguous, 0 for what is unknown; and a source whose first day is empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from feature_repo.catalogue import extend_codes
from feature_repo.feature_schema import ad_dense_names, rate_names
from feature_repo.features import build_day
from feature_repo.training_tables import load_frame, load_tables
from tests.feature_repo.handmade import DAY1, DAY2, FACTS, ad, impression, new_lake, user, write

NONE, NO_CODES = np.empty(0, np.int64), np.empty(0, np.int32)


def test_codes_follow_the_order_of_appearance_and_stay() -> None:
    codes_N, value_V, code_V = extend_codes(np.array([9, 0, 4, 9]), NONE, NO_CODES, 10)
    assert (codes_N.tolist(), value_V.tolist(), code_V.tolist()) == ([1, 0, 2, 1], [9, 4], [1, 2])
    codes_N, value_V, code_V = extend_codes(np.array([1, 4, 9, 7]), value_V, code_V, 4)
    assert (value_V.tolist(), code_V.tolist()) == ([9, 4, 1], [1, 2, 3])
    assert codes_N.tolist() == [3, 2, 1, 0], "7 is beyond the group's bound"


def test_values_that_are_all_unknown_get_no_codes() -> None:
    codes_N, value_V, code_V = extend_codes(np.array([0, 0, 0]), NONE, NO_CODES, 10)
    assert (codes_N.tolist(), value_V.tolist(), code_V.tolist()) == ([0, 0, 0], [], [])
    assert codes_N.dtype == np.int32


def test_a_source_may_begin_with_an_empty_day(tmp_path: Path) -> None:
    """New ads of the second day find no published ad whose rates they could inherit."""
    lake = new_lake(tmp_path)
    write(lake, DAY1, impressions=[], outcomes=[], engagements=[], ads=[], users=[])
    build_day(lake, FACTS, DAY1)
    assert lake.partition("catalogue", DAY1).facts == {"num_ads": 0, "num_users": 0}
    shown = [impression(100, 11, 1, "02 10:00"), impression(101, 12, 1, "02 11:00")]
    write(lake, DAY2, impressions=shown, ads=[ad(11, "02 00:00"), ad(12, "02 00:00")], users=[user(1, "02 00:00")])
    build_day(lake, FACTS, DAY2)
    tables = load_tables(lake, FACTS, DAY1, DAY2)
    assert (tables.ad_id_N.tolist(), tables.user_id_U.tolist()) == ([11, 12], [1])
    names = ad_dense_names(FACTS)
    place = [names.index(name) for role in ("advertiser", "category") for name in rate_names(FACTS, role)]
    assert len(place) > 0
    assert (tables.ad_dense_NF[:, place] == 0.0).all()
    assert tables.ad_dense_NF[:, names.index("quality")].tolist() == [0.25, 0.25]
    assert load_frame(lake, DAY2)["ad_code"].tolist() == [0, 1]
