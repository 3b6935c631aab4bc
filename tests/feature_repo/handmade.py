"""A hand-made world: contract tables written out row by row, so that every expected number can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from feature_repo.lake import Lake
from feature_repo.tables import CONTRACT, SourceFacts

FACTS = SourceFacts(
    name="handmade",
    timezone="UTC",
    first_day="2026-01-01",
    last_day="2026-01-05",
    surfaces=("feed", "search"),
    verticals=("search",),
    labels={"click": 1800, "conversion": 86_400},
    history_kinds=("view", "like", "click"),
    history_length=8,
    user_categorical=("age_band",),
    user_dense=("tenure",),
    ad_attributes=("quality",),
    category_levels=2,
    embedding_dim=2,
    evaluation_cut="2026-01-04",
    negative_rate=0.5,
    max_ads=16,
    max_users=16,
    has_oracle=False,
)
DAY1, DAY2, DAY3, DAY4, DAY5 = FACTS.days


def at(text: str) -> datetime:
    """`01 10:00[:00[.000001]]` -> that time of January 2026, UTC."""
    day, clock = text.split(" ")
    clock = clock if clock.count(":") == 2 else f"{clock}:00"
    return datetime.fromisoformat(f"2026-01-{day}T{clock}+00:00")


def at_us(text: str) -> int:
    """`at` in microseconds since the epoch."""
    moment = at(text)
    return int(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond


def impression(request: int, ad: int, user: int, time: str, position: int = 0, surface: str = "feed") -> dict[str, Any]:
    return {
        "request_id": request, "ad_id": ad, "position": position, "user_id": user, "surface": surface,
        "timestamp": at(time), "propensity": None, "split": None,
    }  # fmt: skip


def outcome(
    request: int, ad: int, time: str, known: str | None = None, label: str = "click", value: float = 1.0
) -> dict[str, Any]:
    return {
        "request_id": request, "ad_id": ad, "label": label, "value": value,
        "event_time": at(time), "known_at": at(known or time),
    }  # fmt: skip


def engagement(
    event: int, user: int, item: int, time: str | None, known: str | None = None, kind: str = "view", sequence: int = 0
) -> dict[str, Any]:
    return {
        "event_id": event, "user_id": user, "item_id": item, "kind": kind, "surface": "feed",
        "timestamp": at(time) if time else None, "known_at": at(known) if known else (at(time) if time else None),
        "sequence_number": sequence, "time_quality": "exact" if time else "order",
    }  # fmt: skip


def ad(
    ad_id: int, known: str = "01 00:00", *, created: str | None = None, retired: str | None = None, advertiser: int = 7,
    category: Sequence[int] = (3, 31), bid: float | None = 1.0,
) -> dict[str, Any]:  # fmt: skip
    return {
        "ad_id": ad_id, "created_at": at(created or known), "retired_at": at(retired) if retired else None,
        "known_at": at(known), "advertiser_id": advertiser, "campaign_id": advertiser * 10, "objective": "sales",
        "optimisation_event": "click", "format": "image", "category_path": list(category), "bid": bid, "budget": None,
        "attributes": [0.25], "embedding": [1.0, ad_id / 100], "title": None,
    }  # fmt: skip


def user(user_id: int, valid: str = "01 00:00", age_band: int = 2, tenure: float = 0.5) -> dict[str, Any]:
    return {"user_id": user_id, "valid_from": at(valid), "categorical": [age_band], "dense": [tenure]}


def write(lake: Lake, day: str, **tables: list[dict[str, Any]]) -> None:
    """Write the contract tables of one day; tables that are left out have no partition."""
    for table, rows in tables.items():
        lake.write(table, day, pa.Table.from_pylist(rows, schema=CONTRACT[table]))


def new_lake(folder: Path) -> Lake:
    """An empty lake that belongs to the hand-made source."""
    lake = Lake(folder / "lake")
    FACTS.write(lake.root)
    return lake
