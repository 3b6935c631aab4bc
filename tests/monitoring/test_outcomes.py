from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from monitoring.outcomes import join_outcomes

CUT = datetime(2026, 1, 7, tzinfo=UTC)


def requests() -> pa.Table:
    rows: list[dict[str, Any]] = [
        {"request_id": 1, "user_id": 10, "surface": "feed", "ad_ids": [1, 2, 3, 4]},
        {"request_id": 2, "user_id": 10, "surface": "feed", "ad_ids": [5, 6, 7, 8]},
        {"request_id": 3, "user_id": 11, "surface": "stories", "ad_ids": [1, 9]},
        {"request_id": 4, "user_id": None, "surface": "feed", "ad_ids": [1]},
    ]
    return pa.Table.from_pylist([{"release": "r", "tier": "full", **r} for r in rows])


def outcome(request_id: int, ad_id: int, value: float = 1.0, label: str = "click", days: float = -1) -> dict[str, Any]:
    return {
        "request_id": request_id, "ad_id": ad_id, "label": label, "value": value, "known_at": CUT + timedelta(days=days)
    }  # fmt: skip


def test_recall_by_hand() -> None:
    outcomes = pa.Table.from_pylist([
        outcome(1, 1), outcome(1, 4), outcome(1, 1), outcome(2, 7, value=3.0), outcome(3, 9, value=2.0),
        outcome(3, 1, label="conversion"), outcome(3, 50, days=0), outcome(4, 1, value=0.0), outcome(77, 1),
    ])  # fmt: skip
    report = join_outcomes(requests(), outcomes, label="click", known_before=CUT, ks=(2, 4))
    # request 1: {1, 4}, request 2: {7}, request 3: {9}; the outcome known at the cut itself is not seen.
    assert report.num_requests == 4
    assert report.num_without_positive == 1
    at_2, at_4 = report.slice(k=2), report.slice(k=4)
    assert (at_2.num_requests, at_2.num_positives) == (3, 4)
    assert at_2.recall == pytest.approx((0.25 + 1.0) / 2)  # user 10: (1/2 + 0) / 2, user 11: 1
    assert at_4.recall == pytest.approx(1.0)
    assert at_2.value_recall == pytest.approx((1.0 + 2.0) / (2.0 + 3.0 + 2.0))
    assert at_2.standard_error == pytest.approx(math.sqrt(2 * 0.375**2) / math.sqrt(2))
    feed = report.slice(k=2, surface="feed")
    assert feed.recall == pytest.approx(0.25)
    assert math.isnan(feed.standard_error)
    assert report.slice(k=2, surface="stories", tier="full").num_requests == 1
    with pytest.raises(ValueError, match="0 found"):
        report.slice(k=3)


def test_no_outcomes_yet() -> None:
    none = pa.Table.from_pylist([outcome(9, 9)])
    report = join_outcomes(requests(), none, label="click", known_before=CUT)
    assert report.slices == ()
    assert report.num_without_positive == 4


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        join_outcomes(requests(), requests(), label="click", known_before=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="ks"):
        join_outcomes(requests(), requests(), label="click", known_before=CUT, ks=(0,))
