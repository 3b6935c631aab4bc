"""Positives-only mode: requests from engagements, drawn negatives, and what an official protocol holds out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from feature_repo.audit import audit_leaks
from feature_repo.contract import check
from feature_repo.features import build_day
from feature_repo.lake import Lake
from feature_repo.positives import draw_negatives, outcomes_of, requests_of
from feature_repo.training_tables import load_frame
from tests.feature_repo import handmade
from tests.feature_repo.handmade import DAY1, DAY2, DAY3, ad, engagement, user

NUM_ADS = 5
FACTS = replace(
    handmade.FACTS, labels={"like": 0}, history_kinds=("view", "like"), surfaces=("feed",), verticals=("feed",),
    positives_only=True, num_negatives=3, negative_rate=3 / NUM_ADS, training_through=DAY2, repeats=False,
)  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """User 1 views 10, likes 11 and 12 on the first day, likes 13 on the second; 14 is known on the third only."""
    lake = Lake(tmp_path / "lake")
    FACTS.write(lake.root)
    events = {
        DAY1: [
            engagement(1, 1, 10, "01 10:00"),
            engagement(2, 1, 11, "01 11:00", kind="like", sequence=1),
            engagement(3, 1, 12, "01 12:00", kind="like", sequence=2),
        ],
        DAY2: [engagement(4, 1, 13, "02 09:00", kind="like", sequence=3)],
        DAY3: [engagement(5, 1, 14, "02 10:00", known="03 00:00", kind="like", sequence=4)],
    }
    for day, rows in events.items():
        first = day == DAY1
        handmade.write(
            lake, day, impressions=[], outcomes=[], engagements=rows,
            ads=[ad(10 + n) for n in range(NUM_ADS)] if first else [], users=[user(1)] if first else [],
        )  # fmt: skip
        report = check("engagements", lake.read("engagements", day), FACTS, day)
        report.raise_if_broken()
        build_day(lake, FACTS, day)
    return lake


def test_every_positive_is_a_request_with_what_was_known_before(lake: Lake) -> None:
    frame = load_frame(lake, DAY1)
    assert frame["label_like"].tolist() == [1.0, 0.0, 0.0, 0.0] * 2
    assert frame["request_id"].tolist() == [2] * 4 + [3] * 4
    assert frame["end_offset"].tolist() == [1] * 4 + [2] * 4, "the view, then the view and the first like"
    ids = lake.read("catalogue", DAY1, "ads")["ad_id"].to_numpy()
    assert ids[frame["ad_code"][[0, 4]]].tolist() == [11, 12]
    for request in (2, 3):
        mine = frame["request_id"] == request
        assert len(np.unique(frame["ad_code"][mine & (frame["label_like"] == 0)])) >= 1
        assert frame["ad_code"][mine][0] not in frame["ad_code"][mine][1:], "a positive is never its own negative"


def test_a_held_out_event_keeps_its_time_and_its_history_but_trains_nothing(lake: Lake) -> None:
    frame = load_frame(lake, DAY3)
    assert frame["end_offset"].tolist() == [4] * 4, "it became known after the like of the second day"
    assert frame["timestamp_us"].tolist() == [handmade.at_us("02 10:00")] * 4
    assert not frame["keep"].any()
    assert load_frame(lake, DAY2)["keep"].all()


def test_held_out_events_are_in_no_statistic(lake: Lake) -> None:
    names = ("dense_ad_engagements_all", "dense_ad_engagements_1d")
    before, after = (lake.read("ad_features", day) for day in (DAY2, DAY3))
    held_out = before["ad_id"].to_pylist().index(14)
    assert after[names[0]].to_pylist() == before[names[0]].to_pylist()
    assert after[names[0]][held_out].as_py() == 0.0
    assert set(after[names[1]].to_pylist()) == {0.0}


def test_no_row_sees_the_future(lake: Lake) -> None:
    for day in (DAY1, DAY2, DAY3):
        report = audit_leaks(lake, FACTS, day)
        assert report.passed, report
    frame = lake.read("training_frame", DAY1)
    later = frame["end_offset"].to_numpy() + 1
    table = frame.set_column(frame.schema.get_field_index("end_offset"), "end_offset", [later.astype(np.int32)])
    lake.write("training_frame", DAY1, table)
    assert audit_leaks(lake, FACTS, DAY1).leaked == frame.num_rows


def test_outcomes_are_the_positives_themselves(lake: Lake) -> None:
    rows = outcomes_of(lake, FACTS, DAY3).to_pylist()
    assert [(r["request_id"], r["ad_id"], r["label"], r["value"]) for r in rows] == [(5, 14, "like", 1.0)]
    assert rows[0]["event_time"] == handmade.at("02 10:00")
    assert rows[0]["known_at"] == handmade.at("03 00:00")
    assert requests_of(lake, FACTS, DAY3)["timestamp"].to_pylist() == [handmade.at("03 00:00")]


def test_drawn_negatives_are_uniform_and_never_the_positive() -> None:
    request_P = np.arange(20_000)
    code_P = request_P % 7
    drawn_PJ = draw_negatives(request_P, code_P, 2, 7)
    assert drawn_PJ.shape == (20_000, 2)
    assert not (drawn_PJ == code_P[:, None]).any()
    steps = np.bincount(((drawn_PJ - code_P[:, None]) % 7).ravel(), minlength=7)
    assert steps[0] == 0
    assert abs(steps[1:] / steps.sum() - 1 / 6).max() < 0.01
    assert np.array_equal(drawn_PJ[5:9], draw_negatives(request_P[5:9], code_P[5:9], 2, 7))
    with pytest.raises(ValueError, match="num_ads: 1"):
        draw_negatives(request_P[:1], code_P[:1], 2, 1)


def test_a_like_is_an_engagement_here_and_nowhere_else(lake: Lake) -> None:
    rows = lake.read("engagements", DAY2)
    with pytest.raises(ValueError, match="kind_known"):
        check("engagements", rows, replace(handmade.FACTS, labels={"like": 0}), DAY2).raise_if_broken()
