"""Features of a day, built in the order of days: catalogue, event log, statistics, training frame.

Each function reads the contract tables of the lake and what the previous day left, writes one day's partitions, and
gives the same bytes when it is run again.
"""

from __future__ import annotations

from feature_repo.catalogue import build_catalogue
from feature_repo.event_log import build_event_log
from feature_repo.feature_schema import schema_for
from feature_repo.frame import build_frame, frame_labels
from feature_repo.lake import Lake
from feature_repo.statistics import build_statistics
from feature_repo.tables import SourceFacts

__all__ = [
    "build_catalogue",
    "build_day",
    "build_event_log",
    "build_frame",
    "build_statistics",
    "frame_labels",
    "schema_for",
]


def build_day(lake: Lake, facts: SourceFacts, day: str) -> None:
    """All four builds of one day, for tests and scripts; the orchestrator runs them as assets of their own."""
    build_catalogue(lake, facts, day)
    build_event_log(lake, facts, day)
    build_statistics(lake, facts, day)
    build_frame(lake, facts, day)
