"""The event log: every event stored once, per user in the order in which it became available.

`event_log/<day>` holds what became known on that day:
  events.parquet     item_code int32, time_s uint32, kind uint8, surface uint8 (10 bytes an event), sorted by
                     (user_code, available_at, timestamp, event_id)
  available.parquet  available_us int64, row by row with events.parquet (audits and frames read it)
  users.parquet      user_code, num_events in this segment, num_before in all earlier segments
  totals.parquet     num_events through this day; row = user code of the day's catalogue

Sorting by availability makes the first n events of a user exactly what was known at some time, so a training row
needs one number. Events without a time (`time_quality` order) lie one minute apart in sequence order and end one
second before the start of the day that holds them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from feature_repo.days import (
    attribution_days,
    codes_table,
    contract_rows,
    day_bounds_us,
    previous_day,
)
from feature_repo.lake import Lake, Partition
from feature_repo.sql import run_transform
from feature_repo.tables import SourceFacts

EARLIEST_US = 0
"""Events of the first day may be as old as the epoch."""


def build_event_log(lake: Lake, facts: SourceFacts, day: str) -> Partition:
    """Write `event_log/<day>` from what became known on that day.

    Raises:
        ValueError: the catalogue of the day or the log of the previous day is missing, an event has an unknown
            surface, or an event lies after the end of the day that holds it.
    """
    before = previous_day(facts, day)
    start_us, end_us = day_bounds_us(facts, day)
    events = run_transform(
        "event_log",
        {
            "engagements": contract_rows(lake, "engagements", [day]),
            "outcomes": contract_rows(lake, "outcomes", [day]),
            "impressions": contract_rows(lake, "impressions", [day]),
            "shown": contract_rows(lake, "impressions", attribution_days(facts, day)),
            "kinds": codes_table(facts.history_kinds),
            "surfaces": codes_table(facts.surfaces),
            "users": lake.paths("catalogue", [day], "users"),
            "ads": lake.paths("catalogue", [day], "ads"),
        },
        {
            "day_start_us": start_us,
            "floor_us": start_us if before else EARLIEST_US,
            "impression_kind": "impression" if "impression" in facts.history_kinds else "",
        },
    )
    _check_events(events, day, end_us)
    num_users = lake.partition("catalogue", day).facts["num_users"]
    total_U = np.zeros(num_users, np.int64)
    if before:
        earlier = lake.read("event_log", before, "totals")["num_events"].to_numpy()
        total_U[: len(earlier)] = earlier
    user_code, num_events = np.unique(events["user_code"].to_numpy(), return_counts=True)
    users = pa.table(
        {
            "user_code": pa.array(user_code, pa.int32()),
            "num_events": pa.array(num_events, pa.int32()),
            "num_before": pa.array(total_U[user_code], pa.int32()),
        }
    )
    total_U[user_code] += num_events
    return lake.write(
        "event_log", day,
        {
            "events": _packed(events),
            "available": events.select(["available_us"]),
            "users": users,
            "totals": pa.table({"num_events": pa.array(total_U, pa.int32())}),
        },
        facts={"num_events": events.num_rows, "num_users": users.num_rows},
    )  # fmt: skip


def _check_events(events: pa.Table, day: str, end_us: int) -> None:
    if events["surface"].null_count:
        raise ValueError(f"engagements/{day}: {events['surface'].null_count} events have a surface the source lacks")
    available_us = events["available_us"].to_numpy()
    late = int((available_us >= end_us).sum())
    if late:
        raise ValueError(
            f"engagements/{day}: {late} events happen or become known after the end of the day that holds them; "
            f"the latest at {np.datetime64(int(available_us.max()), 'us')}Z"
        )


def _packed(events: pa.Table) -> pa.Table:
    time_s = np.maximum(events["time_us"].to_numpy() // 1_000_000, 0)
    return pa.table(
        {
            "item_code": events["item_code"].cast(pa.int32()),
            "time_s": pa.array(time_s, pa.uint32()),
            "kind": events["kind"].cast(pa.uint8()),
            "surface": events["surface"].cast(pa.uint8()),
        }
    )
