"""Hand-made rows of the contract that keep every rule, and the facts of the source that they belong to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from feature_repo.tables import CONTRACT, ORACLE, SourceFacts

DAY = "2026-01-06"
FACTS = SourceFacts(
    name="hand",
    timezone="UTC",
    first_day="2026-01-05",
    last_day="2026-01-07",
    surfaces=("feed", "search"),
    verticals=("feed",),
    labels={"click": 1800},
    history_kinds=("view", "like", "click"),
    history_length=10,
    user_categorical=("age", "region"),
    user_dense=("tenure",),
    ad_attributes=("price",),
    category_levels=3,
    embedding_dim=2,
    evaluation_cut="2026-01-06",
    negative_rate=1.0,
    max_ads=10,
    max_users=10,
    has_oracle=True,
)


def at(hour: float, day: int = 6) -> datetime:
    """A time of January 2026."""
    minutes = round(hour * 60)
    return datetime(2026, 1, day, minutes // 60, minutes % 60, tzinfo=UTC)


def good_row(table: str) -> dict[str, Any]:
    """A row that the contract accepts on `DAY`."""
    rows: dict[str, dict[str, Any]] = {
        "impressions": {
            "request_id": 1, "ad_id": 2, "position": 0, "user_id": 3, "surface": "feed", "timestamp": at(10),
            "propensity": 0.5, "split": None,
        },
        "outcomes": {
            "request_id": 1, "ad_id": 2, "label": "click", "value": 1.0, "event_time": at(10), "known_at": at(10.5),
        },
        "engagements": {
            "event_id": 1, "user_id": 3, "item_id": 2, "kind": "view", "surface": "feed", "timestamp": at(9),
            "known_at": at(9), "sequence_number": 0, "time_quality": "exact",
        },
        "ads": {
            "ad_id": 2, "created_at": at(8), "retired_at": None, "known_at": at(8), "advertiser_id": 1,
            "campaign_id": 1, "objective": "sales", "optimisation_event": "click", "format": "image",
            "category_path": [1, 4], "bid": 1.0, "budget": None, "attributes": [0.1], "embedding": [0.0, 1.0],
            "title": None,
        },
        "users": {"user_id": 3, "valid_from": at(1), "categorical": [1, 0], "dense": [0.5]},
        "oracle": {"request_id": 1, "ad_id": 2, "click": 0.5, "conversion": 0.1},
    }  # fmt: skip
    return rows[table]


def table_of(table: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as an Arrow table of the contract's schema."""
    schema = ORACLE if table == "oracle" else CONTRACT[table]
    return pa.Table.from_pylist(rows, schema=schema)


def with_changes(table: str, **changes: Any) -> pa.Table:
    """The good row and a copy of it, under another key, with some columns changed."""
    other = {"impressions": "request_id", "outcomes": "request_id", "engagements": "event_id", "ads": "ad_id",
             "users": "user_id", "oracle": "request_id"}[table]  # fmt: skip
    good = good_row(table)
    return table_of(table, [good, {**good, other: 77, **changes}])
