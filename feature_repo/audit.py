"""Audits of a day's training frame that don't trust the code that made it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.days import previous_day
from feature_repo.lake import Lake
from feature_repo.positives import requests_of
from feature_repo.tables import SourceFacts


@dataclass(frozen=True)
class LeakReport:
    """Counts over the rows of one day. All but `rows` and `events_seen` must be 0."""

    rows: int
    missing_rows: int
    """Impressions of the day without a row, or rows without an impression."""
    leaked: int
    """Rows whose newest history event became available at or after the request."""
    withheld: int
    """Rows whose next event was available strictly before the request."""
    out_of_range: int
    """Rows whose history is longer than the user's log, or that lost events of earlier days."""
    events_seen: int
    """Events of the same day that some row may use: 0 means that the audit saw nothing."""

    @property
    def passed(self) -> bool:
        """No row leaks, none lacks what was known, and every impression has exactly one row."""
        return not (self.missing_rows or self.leaked or self.withheld or self.out_of_range)


def audit_leaks(lake: Lake, facts: SourceFacts, day: str) -> LeakReport:
    """Check every row's history offset against the availability times of the events on either side of it.

    The event log is sorted by availability, so the n events of a row are the right ones exactly if event n-1 was
    available strictly before the request and event n was not.
    """
    frame = lake.read("training_frame", day, columns=["request_id", "user_code", "timestamp_us", "end_offset"])
    user_R = frame["user_code"].to_numpy()
    end_R = frame["end_offset"].to_numpy().astype(np.int64)
    time_R, num_expected = _asked(lake, facts, day, frame)
    segment = lake.read("event_log", day, "users")
    available_E = lake.read("event_log", day, "available")["available_us"].to_numpy()
    num_users = int(lake.partition("catalogue", day).facts["num_users"])

    before_U = np.zeros(num_users, np.int64)
    if (earlier := previous_day(facts, day)) is not None:
        totals = lake.read("event_log", earlier, "totals")["num_events"].to_numpy()
        before_U[: len(totals)] = totals
    num_U, start_U = np.zeros(num_users, np.int64), np.zeros(num_users, np.int64)
    num_events = segment["num_events"].to_numpy().astype(np.int64)
    num_U[segment["user_code"].to_numpy()] = num_events
    start_U[segment["user_code"].to_numpy()] = np.cumsum(num_events) - num_events

    today_R = end_R - before_U[user_R]
    inside_R = (today_R >= 0) & (today_R <= num_U[user_R])
    has_last_R = inside_R & (today_R > 0)
    has_next_R = inside_R & (today_R < num_U[user_R])
    at_R = start_U[user_R] + today_R
    return LeakReport(
        rows=len(end_R),
        missing_rows=abs(len(end_R) - num_expected),
        leaked=int((available_E[at_R[has_last_R] - 1] >= time_R[has_last_R]).sum()),
        withheld=int((available_E[at_R[has_next_R]] < time_R[has_next_R]).sum()),
        out_of_range=int((~inside_R).sum()),
        events_seen=int(today_R[has_last_R].sum()),
    )


def _asked(lake: Lake, facts: SourceFacts, day: str, frame: pa.Table) -> tuple[NDArray[np.int64], int]:
    """When each row's request was asked, in microseconds, and how many rows the day must have."""
    if not facts.positives_only:
        return frame["timestamp_us"].to_numpy(), lake.partition("impressions", day).num_rows
    requests = requests_of(lake, facts, day)
    order = np.argsort(requests["request_id"].to_numpy())
    place_R = np.searchsorted(requests["request_id"].to_numpy()[order], frame["request_id"].to_numpy())
    asked_P = requests["timestamp"].cast(pa.int64()).to_numpy()
    return asked_P[order][place_R], requests.num_rows * (1 + facts.num_negatives)
