"""The training frame: one row per impression of a day, with labels as known by the end of that day.

Positives-only sources have one row a positive and one for each ad drawn beside it (`feature_repo/positives.py`).

Rows hold codes and one number into the event log instead of features and lists: statistics are joined by code from
the cut published before the day, histories are gathered when a batch is made.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from feature_repo.days import MICROSECONDS, codes_table, contract_rows, day_bounds_us, previous_day
from feature_repo.lake import Lake, Partition
from feature_repo.positives import draw_negatives, requests_of
from feature_repo.sql import run_transform
from feature_repo.tables import SourceFacts


def build_frame(lake: Lake, facts: SourceFacts, day: str) -> Partition:
    """Write `training_frame/<day>`; rows in the order of (timestamp, request_id, position), row_id 0..n-1.

    Columns: row_id, request_id, user_code, ad_code, surface, hour (local), timestamp_us, position, end_offset
    (events of the user available strictly before the request), label_<task> float32, mature_<task> (the window has
    passed by the end of the day), keep (in the down-sampled training set), propensity, split.

    Raises:
        ValueError: the catalogue or the event log of the day is missing, or an impression has an unknown surface.
    """
    before = previous_day(facts, day)
    no_totals = pa.table({"user_code": pa.array([], pa.int32()), "num_events": pa.array([], pa.int32())})
    impressions = requests_of(lake, facts, day) if facts.positives_only else contract_rows(lake, "impressions", [day])
    rows = run_transform(
        "training_frame",
        {
            "impressions": impressions,
            "segment": _segment(lake, day),
            "earlier": _totals(lake, before) if before else no_totals,
            "surfaces": codes_table(facts.surfaces),
            "users": lake.paths("catalogue", [day], "users"),
            "ads": lake.paths("catalogue", [day], "ads"),
        },
        {"timezone": facts.timezone, "negative_rate": facts.negative_rate},
    )
    if rows["surface"].null_count:
        raise ValueError(f"impressions/{day}: {rows['surface'].null_count} rows have a surface that the source lacks")
    _, cut_us = day_bounds_us(facts, day)
    if facts.positives_only:
        assert isinstance(impressions, pa.Table)
        rows, labels = _with_negatives(rows, impressions, facts, lake.partition("catalogue", day).facts["num_ads"])
        keep = np.full(rows.num_rows, facts.may_train(day))
    else:
        labels = frame_labels(lake, facts, day, day, rows)
        sampled_R = rows["sampled"].to_numpy(zero_copy_only=False)
        keep = (sampled_R | (labels[facts.main_label] > 0)) & facts.may_train(day)
    frame = pa.table(
        {
            **{name: rows[name] for name in ("row_id", "request_id", "user_code", "ad_code")},
            "surface": rows["surface"].cast(pa.uint8()),
            **{name: rows[name] for name in ("hour", "timestamp_us", "position", "end_offset")},
            **{f"label_{task}": pa.array(label) for task, label in labels.items()},
            **{f"mature_{task}": pa.array(values) for task, values in maturity(facts, rows, cut_us).items()},
            "keep": pa.array(keep),
            "propensity": rows["propensity"],
            "split": rows["split"],
        }
    )
    return lake.write(
        "training_frame", day, frame,
        facts={"num_rows": frame.num_rows, "num_kept": int(keep.sum())}
        | {f"rate_{task}": float(label.mean()) if len(label) else 0.0 for task, label in labels.items()},
    )  # fmt: skip


def _with_negatives(
    rows: pa.Table, requests: pa.Table, facts: SourceFacts, num_ads: int
) -> tuple[pa.Table, dict[str, NDArray[np.float32]]]:
    """Each positive followed by its drawn negatives, and the labels; times are those of the events themselves."""
    request_P, ad_code_P = rows["request_id"].to_numpy(), rows["ad_code"].to_numpy().astype(np.int64)
    drawn_PJ = draw_negatives(request_P, ad_code_P, facts.num_negatives, num_ads)
    ad_code_R = np.column_stack([ad_code_P, drawn_PJ]).reshape(-1)
    rows = rows.take(pa.array(np.repeat(np.arange(rows.num_rows), 1 + facts.num_negatives)))
    order = np.argsort(requests["request_id"].to_numpy())
    place_R = np.searchsorted(requests["request_id"].to_numpy()[order], rows["request_id"].to_numpy())
    happened_us = requests["happened_at"].cast(pa.int64()).to_numpy()[order][place_R]
    replaced = {
        "row_id": pa.array(np.arange(len(ad_code_R))),
        "ad_code": pa.array(ad_code_R, pa.int32()),
        "timestamp_us": pa.array(happened_us),
    }
    for name, values in replaced.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, values)
    label_R = np.zeros(len(ad_code_R), np.float32)
    label_R[:: 1 + facts.num_negatives] = 1.0
    return rows, {task: label_R if task == facts.main_label else np.zeros_like(label_R) for task in facts.labels}


def frame_labels(
    lake: Lake, facts: SourceFacts, day: str, cut_day: str, rows: pa.Table
) -> dict[str, NDArray[np.float32]]:
    """Labels of a day's frame rows as known by the end of `cut_day`, one float32 array of 0 and 1 a task.

    Args:
        lake: holds the outcomes of `day` .. `cut_day`.
        facts: of the source.
        day: the frame's day.
        cut_day: `day` or a later one; later cuts know more delayed outcomes.
        rows: frame rows with row_id, request_id, ad_code and timestamp_us, row_id being the row's number.
    """
    days = facts.days
    if cut_day < day:
        raise ValueError(f"cut_day: {cut_day} is before the frame's day {day}")
    _, cut_us = day_bounds_us(facts, cut_day)
    windows = pa.array([window_s * MICROSECONDS for window_s in facts.labels.values()], pa.int64())
    positive = run_transform(
        "training_labels",
        {
            "frame": rows.select(["row_id", "request_id", "ad_code", "timestamp_us"]),
            "outcomes": contract_rows(lake, "outcomes", days[days.index(day) : days.index(cut_day) + 1]),
            "labels": codes_table(tuple(facts.labels)).append_column("window_us", windows),
            "ads": lake.paths("catalogue", [day], "ads"),
        },
        {"cut_us": cut_us},
    )
    label_BT = np.zeros((rows.num_rows, len(facts.labels)), np.float32)
    label_BT[positive["row_id"].to_numpy(), positive["task"].to_numpy()] = 1.0
    return {task: np.ascontiguousarray(label_BT[:, i]) for i, task in enumerate(facts.labels)}


def maturity(facts: SourceFacts, rows: pa.Table, cut_us: int) -> dict[str, NDArray[np.bool_]]:
    """Whether the attribution window of each row has passed by the cut, one bool array a task."""
    timestamp_us = rows["timestamp_us"].to_numpy()
    return {task: timestamp_us + window_s * MICROSECONDS <= cut_us for task, window_s in facts.labels.items()}


def _segment(lake: Lake, day: str) -> pa.Table:
    users = lake.read("event_log", day, "users")
    user_code = np.repeat(users["user_code"].to_numpy(), users["num_events"].to_numpy())
    return lake.read("event_log", day, "available").append_column("user_code", pa.array(user_code, pa.int32()))


def _totals(lake: Lake, day: str) -> pa.Table:
    totals = lake.read("event_log", day, "totals")
    return totals.append_column("user_code", pa.array(np.arange(totals.num_rows), pa.int32()))
