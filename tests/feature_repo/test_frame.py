from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from feature_repo.features import build_catalogue, build_day, build_event_log, build_frame, frame_labels
from feature_repo.training_tables import load_frame
from tests.feature_repo.handmade import (
    DAY1,
    DAY2,
    FACTS,
    ad,
    at_us,
    engagement,
    impression,
    new_lake,
    outcome,
    user,
    write,
)


def test_history_ends_strictly_before_the_request(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(11), ad(12)], users=[user(1), user(2)],
        impressions=[
            impression(100, 11, 1, "01 10:00"),
            impression(100, 12, 1, "01 10:00", position=1),
            impression(101, 11, 1, "01 10:00:00.000001"),
            impression(102, 11, 1, "01 12:00"),
            impression(103, 11, 2, "01 12:00"),
        ],
        outcomes=[
            outcome(100, 11, "01 10:00", "01 10:00:00.000002"),  # a sibling's click, at the request's own time
            outcome(101, 11, "01 10:30"),
        ],
        engagements=[
            engagement(1, 1, 12, "01 09:00"),
            engagement(2, 1, 12, "01 10:00"),  # equal timestamp
            engagement(3, 1, 12, "01 08:00", known="01 11:00"),  # late
            engagement(4, 1, 12, "01 13:00"),  # future
        ],
    )  # fmt: skip
    build_day(lake, FACTS, DAY1)
    frame = load_frame(lake, DAY1)
    assert frame["request_id"].tolist() == [100, 100, 101, 102, 103]
    assert frame["position"].tolist() == [0, 1, 0, 0, 0]
    # Request 100: event 1. Request 101, a microsecond later: events 1, 2. Request 102: 1, 2, two clicks, late event 3.
    assert frame["end_offset"].tolist() == [1, 1, 2, 5, 0]
    assert frame["timestamp_us"][2] == at_us("01 10:00:00.000001")
    assert frame["row_id"].tolist() == [0, 1, 2, 3, 4]


def test_labels_known_after_the_cut_leave_the_row_censored(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(11), ad(12)], users=[user(1)],
        impressions=[
            impression(100, 11, 1, "01 10:00"),
            impression(100, 12, 1, "01 10:00", position=1),
            impression(101, 11, 1, "01 23:30"),
            impression(102, 11, 1, "01 23:30:00.000001"),
        ],
        outcomes=[
            outcome(100, 11, "01 10:30"),  # the last moment of the 30-minute window
            outcome(100, 12, "01 10:30:00.000001"),  # after the window
        ],
    )  # fmt: skip
    write(
        lake, DAY2,
        outcomes=[outcome(102, 11, "01 23:40", "02 00:00"), outcome(100, 11, "02 09:00", label="conversion")],
    )  # fmt: skip
    build_day(lake, FACTS, DAY1)
    frame = load_frame(lake, DAY1)
    assert frame["label_click"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert frame["mature_click"].tolist() == [True, True, True, False]
    assert frame["label_conversion"].tolist() == [0.0] * 4
    assert frame["mature_conversion"].tolist() == [False] * 4
    later = frame_labels(lake, FACTS, DAY1, DAY2, lake.read("training_frame", DAY1))
    assert later["click"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert later["conversion"].tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="cut_day: 2026-01-01 is before the frame's day 2026-01-02"):
        frame_labels(lake, FACTS, DAY2, DAY1, lake.read("training_frame", DAY1))


def test_hour_is_local_and_days_follow_the_source(tmp_path: Path) -> None:
    from dataclasses import replace

    facts = replace(FACTS, timezone="Asia/Shanghai")
    lake = new_lake(tmp_path)
    write(lake, DAY1, ads=[ad(11)], users=[user(1)], impressions=[impression(100, 11, 1, "01 15:30")])
    for build in (build_catalogue, build_event_log, build_frame):
        build(lake, facts, DAY1)
    frame = load_frame(lake, DAY1)
    assert frame["hour"].tolist() == [23]
    assert frame["mature_click"].tolist() == [True]  # 15:30 and half an hour is the end of the local day


def test_sampling_keeps_positives_and_the_stated_share_of_the_rest(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    shown = [impression(request, 11, 1, "01 10:00") for request in range(4000)]
    write(
        lake, DAY1, ads=[ad(11)], users=[user(1)], impressions=shown,
        outcomes=[outcome(request, 11, "01 10:01") for request in range(0, 4000, 50)],
    )  # fmt: skip
    build_day(lake, FACTS, DAY1)
    frame = load_frame(lake, DAY1)
    clicked = frame["label_click"] > 0
    assert clicked.sum() == 80
    assert frame["keep"][clicked].all()
    share = frame["keep"][~clicked].mean()
    assert abs(share - FACTS.negative_rate) < 4 * np.sqrt(0.25 / 3920)
    kept = load_frame(lake, DAY1, kept_only=True)
    assert len(kept["row_id"]) == frame["keep"].sum()
    version = lake.partition("training_frame", DAY1).version
    assert build_frame(lake, FACTS, DAY1).version == version  # the same rows again


def test_builds_say_what_is_missing(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    with pytest.raises(ValueError, match="catalogue/2026-01-01 does not exist"):
        build_catalogue(lake, FACTS, DAY2)
    with pytest.raises(ValueError, match=r"'2026-02-01' is outside the source's days 2026-01-01\.\.2026-01-05"):
        build_frame(lake, FACTS, "2026-02-01")
    write(
        lake, DAY1, ads=[ad(11)], users=[user(1)],
        impressions=[impression(1, 11, 1, "01 10:00", surface="billboard")],
    )  # fmt: skip
    with pytest.raises(ValueError, match="impressions/2026-01-01: 1 rows have a surface that the source lacks"):
        build_day(lake, FACTS, DAY1)


def test_a_quiet_day_has_an_empty_frame(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(lake, DAY1, ads=[ad(11)], users=[user(1)])
    build_day(lake, FACTS, DAY1)
    build_day(lake, FACTS, DAY2)
    assert lake.partition("training_frame", DAY2).num_rows == 0
    assert lake.partition("user_features", DAY2).num_rows == 1
