from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.catalogue import build_catalogue, extend_codes
from feature_repo.event_log import build_event_log
from feature_repo.frame import build_frame
from feature_repo.lake import Lake
from feature_repo.training_tables import HistoryArrays, load_frame, load_history
from tests.feature_repo.handmade import (
    DAY1,
    DAY2,
    DAY3,
    FACTS,
    ad,
    at,
    at_us,
    engagement,
    impression,
    new_lake,
    outcome,
    user,
    write,
)

VIEW, LIKE, CLICK = range(3)


def build(lake: Lake, *days: str) -> None:
    for day in days:
        build_catalogue(lake, FACTS, day)
        build_event_log(lake, FACTS, day)


def history_of(history: HistoryArrays, user_code: int) -> list[tuple[int, int, int]]:
    rows = slice(*history.offset_U1[user_code : user_code + 2])
    return [tuple(row) for row in np.column_stack([history.item_E[rows], history.time_E[rows], history.kind_E[rows]])]


def test_events_are_ordered_by_when_they_became_available(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(11), ad(12), ad(13)], users=[user(1), user(2)],
        impressions=[impression(100, 11, 1, "01 10:00"), impression(100, 12, 1, "01 10:00", 1)],
        outcomes=[
            outcome(100, 11, "01 10:01", "01 10:05"),
            outcome(100, 12, "01 10:01", value=0.0),
            outcome(100, 12, "01 10:02", label="conversion"),
        ],
        engagements=[
            engagement(3, 1, 12, "01 09:00", kind="like"),
            engagement(4, 1, 13, "01 08:00", known="01 11:00"),
            engagement(5, 1, 13, "01 09:30", kind="purchase"),
            engagement(2, 1, 11, "01 09:00"),
        ],
    )  # fmt: skip
    build(lake, DAY1)
    history = load_history(lake, [DAY1], 2)
    # Known at 9:00 (event 2 before event 3), 10:05 and 11:00. A negative outcome, a label and a kind that are not
    # history kinds leave no event.
    assert history_of(history, 0) == [
        (0, at_us("01 09:00") // 10**6, VIEW),
        (1, at_us("01 09:00") // 10**6, LIKE),
        (0, at_us("01 10:01") // 10**6, CLICK),
        (2, at_us("01 08:00") // 10**6, VIEW),
    ]
    assert history_of(history, 1) == []
    events = lake.read("event_log", DAY1, "events")
    assert [str(kind) for kind in events.schema.types] == ["int32", "uint32", "uint8", "uint8"]


def test_order_only_events_lie_one_minute_apart_before_the_first_day(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(11), ad(12)], users=[user(1)],
        engagements=[engagement(9, 1, 11, None, sequence=0), engagement(4, 1, 12, None, sequence=1)],
        impressions=[impression(100, 11, 1, "01 00:00:00.000001")],
    )  # fmt: skip
    build(lake, DAY1)
    midnight_s = at_us("01 00:00") // 10**6
    assert history_of(load_history(lake, [DAY1], 1), 0) == [(0, midnight_s - 61, VIEW), (1, midnight_s - 1, VIEW)]
    build_frame(lake, FACTS, DAY1)
    assert load_frame(lake, DAY1)["end_offset"].tolist() == [2]


def test_late_events_append_to_later_segments(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(11), ad(12)], users=[user(1), user(2)],
        engagements=[engagement(1, 1, 11, "01 09:00"), engagement(2, 2, 12, "01 09:00")],
    )  # fmt: skip
    write(
        lake, DAY2,
        engagements=[engagement(3, 1, 12, "01 08:00", known="02 07:00"), engagement(4, 3, 12, "02 06:00")],
    )  # fmt: skip
    build(lake, DAY1, DAY2)
    history = load_history(lake, [DAY1, DAY2], 3)
    assert history_of(history, 0) == [
        (0, at_us("01 09:00") // 10**6, VIEW),
        (1, at_us("01 08:00") // 10**6, VIEW),
    ]
    assert history.offset_U1.tolist() == [0, 2, 3, 4]
    segment = lake.read("event_log", DAY2, "users").to_pydict()
    assert segment == {"user_code": [0, 2], "num_events": [1, 1], "num_before": [1, 0]}


def test_impressions_are_events_only_where_the_source_says_so(tmp_path: Path) -> None:
    from dataclasses import replace

    facts = replace(FACTS, history_kinds=("view", "impression"))
    lake = Lake(tmp_path)
    write(lake, DAY1, ads=[ad(11)], users=[user(1)], impressions=[impression(100, 11, 1, "01 10:00", surface="search")])
    build_catalogue(lake, facts, DAY1)
    build_event_log(lake, facts, DAY1)
    assert lake.read("event_log", DAY1, "events").to_pylist() == [
        {"item_code": 0, "time_s": at_us("01 10:00") // 10**6, "kind": 1, "surface": 1}
    ]


def test_events_of_another_day_are_refused(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(lake, DAY1, ads=[ad(11)], users=[user(1)], engagements=[engagement(1, 1, 11, "02 09:00")])
    with pytest.raises(ValueError, match=r"engagements/2026-01-01: 1 events happen or become known after the end"):
        build(lake, DAY1)


def test_history_needs_all_earlier_segments(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(lake, DAY1, ads=[ad(11)], users=[user(1)], engagements=[engagement(1, 1, 11, "01 09:00")])
    write(lake, DAY2, engagements=[engagement(2, 1, 11, "02 09:00")])
    build(lake, DAY1, DAY2)
    with pytest.raises(ValueError, match="leave out segments that event_log/2026-01-02 builds on"):
        load_history(lake, [DAY2], 1)


def test_catalogue_codes_are_append_only_and_attributes_follow_the_log(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(
        lake, DAY1, ads=[ad(30), ad(20, created="01 00:00"), ad(10, "01 08:00")], users=[user(7), user(5)],
        impressions=[impression(100, 99, 6, "01 10:00")],
    )  # fmt: skip
    write(
        lake, DAY2,
        ads=[
            ad(30, "02 01:00", created="01 00:00", bid=2.0, retired="02 12:00", category=(9,)),
            ad(20, "02 01:00", created="01 00:00", retired="03 00:00:00.000001"),
            ad(5, "02 02:00", advertiser=8),
        ],
        users=[user(5, "02 03:00", age_band=4)],
    )  # fmt: skip
    build_catalogue(lake, FACTS, DAY1)
    build_catalogue(lake, FACTS, DAY2)
    first, second = (lake.read("catalogue", day, "ads").to_pydict() for day in (DAY1, DAY2))
    assert first["ad_id"] == [20, 30, 10, 99]  # by (created_at, ad_id); 99 was only seen, at 10:00
    assert second["ad_id"] == [20, 30, 10, 99, 5]
    assert second["retired"] == [False, True, False, False, False]
    assert second["bid"] == [1.0, 2.0, 1.0, 0.0, 1.0]
    assert second["category_1"] == [3, 9, 3, 0, 3]
    assert second["category_2"] == [31, 0, 31, 0, 31]
    assert second["group_category_1"] == [1, 2, 1, 0, 1]
    assert second["group_advertiser"] == [1, 1, 1, 0, 2]
    assert second["embedding"][3] == [0.0, 0.0]
    users = lake.read("catalogue", DAY2, "users").to_pydict()
    assert users["user_id"] == [5, 6, 7]
    assert users["categorical"] == [[4], [0], [2]]


def test_group_codes_stop_at_their_bound() -> None:
    values = np.array([50, 0, 60, 50, 70])
    codes, known, known_codes = extend_codes(values, np.array([], np.int64), np.array([], np.int32), num_codes=3)
    assert codes.tolist() == [1, 0, 2, 1, 0]
    assert (known.tolist(), known_codes.tolist()) == ([50, 60], [1, 2])
    codes, known, _ = extend_codes(np.array([70, 60]), known, known_codes, num_codes=4)
    assert codes.tolist() == [3, 2]
    assert known.tolist() == [50, 60, 70]


def test_a_list_of_a_wrong_length_is_named(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    write(lake, DAY1, ads=[ad(11), {**ad(12), "embedding": [1.0]}], users=[user(1)])
    with pytest.raises(ValueError, match=r"ads\.embedding: 1 rows do not have 2 values; ad_id=12 has 1"):
        build_catalogue(lake, FACTS, DAY1)


MINUTES = st.integers(0, 3 * 1440 - 1)
LOG = st.lists(st.tuples(st.integers(1, 3), MINUTES, st.sampled_from([0, 0, 0, 5, 700, 2000])), max_size=25)
REQUESTS = st.lists(st.tuples(st.integers(1, 3), MINUTES), min_size=1, max_size=12)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(log=LOG, requests=REQUESTS)
def test_a_prefix_is_exactly_what_happened_before_and_was_known_before(
    log: list[tuple[int, int, int]], requests: list[tuple[int, int]]
) -> None:
    """Brute force over random logs: event time < t and knowledge time < t, whatever day each became known on."""

    def clock(minute: int) -> str:
        return f"{1 + minute // 1440:02d} {minute % 1440 // 60:02d}:{minute % 60:02d}"

    days = [DAY1, DAY2, DAY3]
    events = [(u, t, t + delay, i) for i, (u, t, delay) in enumerate(log) if t + delay < 3 * 1440]
    with tempfile.TemporaryDirectory() as folder:
        lake = new_lake(Path(folder))
        for number, day in enumerate(days):
            mine = [engagement(i, u, 11, clock(t), clock(k)) for u, t, k, i in events if k // 1440 == number]
            shown = [impression(i, 11, u, clock(t)) for i, (u, t) in enumerate(requests) if t // 1440 == number]
            extra: dict[str, Any] = {"ads": [ad(11)], "users": [user(1), user(2), user(3)]} if number == 0 else {}
            write(lake, day, engagements=mine, impressions=shown, **extra)
            build(lake, day)
            build_frame(lake, FACTS, day)
        history = load_history(lake, days, 3)
        for number, day in enumerate(days):
            frame = load_frame(lake, day)
            for row in range(len(frame["row_id"])):
                u, t = requests[frame["request_id"][row]]
                assert t // 1440 == number
                known = sorted((k, s, i) for v, s, k, i in events if v == u and s < t and k < t)
                prefix = history_of(history, u - 1)[: frame["end_offset"][row]]
                assert [moment for _, moment, _ in prefix] == [at_us(clock(s)) // 10**6 for _, s, _ in known]


def test_times_of_the_helper_are_utc() -> None:
    assert at("01 10:00").isoformat() == "2026-01-01T10:00:00+00:00"
