"""KuaiRand-Pure as a source: two weeks of short-video impressions with their feedback, and earlier exposures.

Source: Gao et al., KuaiRand, CIKM 2022 (doi 10.1145/3511808.3557624), CC BY-SA 4.0; the folder holds
`interactions`, `history`, `users` and `items` as Parquet. What is derived, because the log lacks it:

- `request_id` is a hash of (user, timestamp, tab): rows of a user with the same millisecond and tab are siblings.
- `position` is the order of a video within such a request.
- Feedback has no time of its own: outcomes happen and become known at the impression's time (windows of 0 s).
- `history` has no times and no tabs: its rows are engagements of kind `exposure`, time quality `order`, surface
  `unknown`, on the first day. The 141 impressions of the evening before the first day join them, with their times.
- Exact repeats are left to the contract, which drops and counts them; of rows that repeat a (request, video) with
  another label or split, the first in the file is kept and the number of the others is logged.

User features are one snapshot of the period. `item_statistics` is never read: its averages cover the whole month
and leak the future.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from feature_repo.adapters.base import check_day, mixed_ids, string_ids
from feature_repo.adapters.raw import Column, find_file, read_file
from feature_repo.refusal import Breach, Breaches, RefusedError
from feature_repo.tables import CONTRACT, SourceFacts

logger = logging.getLogger(__name__)

FILES = ("interactions", "history", "users", "items")
TABLE_FILES = {
    "impressions": "interactions", "outcomes": "interactions", "engagements": "history", "ads": "items",
    "users": "users",
}  # fmt: skip
LABELS = {"click": "is_click", "long_view": "long_view", "like": "is_like"}
UNKNOWN_SURFACE = "unknown"
SURFACES = (*(f"tab_{i}" for i in range(15)), UNKNOWN_SURFACE)
USER_COUNTS = {
    "follow": "follow_user_num",
    "fans": "fans_user_num",
    "friend": "friend_user_num",
    "age": "register_days",
}
"""Dense feature -> column; stored as log1p / 3, at most 5."""
USER_STRINGS = (
    "user_active_degree", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range",
    "register_days_range",
)  # fmt: skip
USER_CODES = (
    "is_lowactive_period", "is_live_streamer", "is_video_author", *(f"onehot_feat{i}" for i in range(18)),
)  # fmt: skip
INTERACTIONS = {
    **dict.fromkeys(("user_id", "item_id", "timestamp_ms", "tab", *LABELS.values()), Column("integer")),
    "split": Column("text"),
}
HISTORY = dict.fromkeys(("user_id", "position", "item_id"), Column("integer"))
USERS = {
    "user_id": Column("integer"),
    **dict.fromkeys(USER_STRINGS, Column("text")),
    **dict.fromkeys(USER_CODES, Column("number", required=False)),
    **dict.fromkeys(USER_COUNTS.values(), Column("number")),
}
ITEMS = {
    "item_id": Column("integer"), "author_id": Column("integer"), "music_id": Column("integer", required=False),
    "upload_dt": Column("text"), "video_type": Column("text"), "upload_type": Column("text"),
    "tag": Column("text", required=False),
    **dict.fromkeys(("video_duration", "server_height", "server_width"), Column("number", required=False)),
}  # fmt: skip
"""What each file must have; other columns are not read."""
CATEGORY_LEVELS = 3
HISTORY_LENGTH = 200

FACTS = SourceFacts(
    name="kuairand",
    timezone="Asia/Shanghai",
    first_day="2022-04-25",
    last_day="2022-05-08",
    surfaces=SURFACES,
    verticals=("tab_1", "tab_0", "tab_4"),
    labels=dict.fromkeys(LABELS, 0),
    history_kinds=("exposure", "impression", *LABELS),
    history_length=HISTORY_LENGTH,
    user_categorical=(*USER_STRINGS, *USER_CODES),
    user_dense=tuple(f"log_{name}" for name in USER_COUNTS),
    ad_attributes=("log_duration", "duration_missing", "log_aspect", "upload_age"),
    category_levels=CATEGORY_LEVELS,
    embedding_dim=0,
    evaluation_cut="2022-04-30",
    negative_rate=1.0,
    max_ads=7_583,
    max_users=27_285,
    has_oracle=False,
)
"""Facts of the part that is described in the data's README. Verticals are the three tabs with most impressions."""


class KuaiRandSource:
    """Days of the KuaiRand part below `data_dir`."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        missing = [name for name in FILES if find_file(self.data_dir, name) is None]
        if missing:
            raise ValueError(f"data_dir: {self.data_dir} lacks {', '.join(f'{m}.parquet' for m in missing)}")

    def file_of(self, table: str) -> str:
        """Name of the file that holds a table."""
        return self._path(TABLE_FILES[table]).name

    def _path(self, name: str) -> Path:
        path = find_file(self.data_dir, name)
        assert path is not None, "the constructor checked it"
        return path

    @property
    def facts(self) -> SourceFacts:
        """Facts of the log (constant)."""
        return FACTS

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        """Tables of a day in the time zone of the app (UTC+8)."""
        first = check_day(FACTS, day) == 0
        start, end = (int(t.timestamp() * 1000) for t in FACTS.bounds(day))
        log = self._log
        stamp = log.column("timestamp_ms").to_numpy()
        today = log.take(np.flatnonzero((stamp >= start) & (stamp < end)))
        yield "impressions", _impressions(today)
        yield "outcomes", _outcomes(today)
        yield "engagements", self._engagements(log.take(np.flatnonzero(stamp < start)) if first else None)
        yield "ads", self._ads() if first else CONTRACT["ads"].empty_table()
        yield "users", self._users() if first else CONTRACT["users"].empty_table()

    @functools.cached_property
    def _log(self) -> pa.Table:
        """Interactions by time, with request ids and positions; conflicting repeats resolved."""
        labels = ", ".join(f'{column}::TINYINT AS "{name}"' for name, column in LABELS.items())
        kept = ", ".join(f'"{name}"' for name in LABELS)
        interactions = self._interactions()
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.register("interactions", interactions)
            ordered = connection.sql(
                f"""
                WITH numbered AS (
                    SELECT row, user_id::BIGINT AS user_id, item_id::BIGINT AS item_id,
                           timestamp_ms, tab::BIGINT AS tab, split, {labels}
                    FROM interactions
                ), placed AS (
                    SELECT *, min(row) OVER same AS first_row, first(split) OVER same AS first_split,
                           first([{kept}]) OVER same AS first_labels
                    FROM numbered
                    WINDOW same AS (PARTITION BY user_id, timestamp_ms, tab, item_id ORDER BY row
                                    ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
                )
                SELECT user_id, item_id, timestamp_ms, tab, split, {kept},
                       (dense_rank() OVER (PARTITION BY user_id, timestamp_ms, tab ORDER BY first_row) - 1)::SMALLINT
                           AS position,
                       split = first_split AND [{kept}] = first_labels AS agrees
                FROM placed
                ORDER BY timestamp_ms, user_id, tab, position, row
                """
            ).to_arrow_table()
        agrees = ordered.column("agrees").to_numpy()
        if not agrees.all():
            logger.warning("kuairand: dropped %d rows that contradict an earlier row of their key", (~agrees).sum())
        log = ordered.take(np.flatnonzero(agrees)).drop_columns(["agrees"])
        request = mixed_ids(*(log.column(name).to_numpy() for name in ("user_id", "timestamp_ms", "tab")))
        return log.append_column("request_id", pa.array(request))

    def _interactions(self) -> pa.Table:
        """The raw rows, numbered; rows after the last day or of an unknown tab are refused."""
        path = self._path("interactions")
        raw = read_file(path, INTERACTIONS)
        breaches = Breaches(path.name)
        end_ms = int(FACTS.bounds(FACTS.last_day)[1].timestamp() * 1000)
        tab, stamp = raw["tab"].to_numpy(), raw["timestamp_ms"].to_numpy()
        wrong = {
            "timestamp_ms": (stamp >= end_ms, f"times lie after the log's last day, {FACTS.last_day}"),
            "tab": ((tab < 0) | (tab >= len(SURFACES) - 1), f"tabs are 0 to {len(SURFACES) - 2}"),
        }
        for column, (broken, reason) in wrong.items():
            if broken.any():
                examples = raw.take(np.flatnonzero(broken)[:3]).to_pylist()
                breaches.add(f"{column}_range", column, int(broken.sum()), reason, examples)
        breaches.refuse()
        return raw.append_column("row", pa.array(np.arange(raw.num_rows)))

    def _engagements(self, before: pa.Table | None) -> pa.Table:
        """Exposures before the first day: those without times, then `before`, the evening before it."""
        schema = CONTRACT["engagements"]
        if before is None:
            return schema.empty_table()
        history = _read(self._path("history"), HISTORY, "user_id, position, item_id", "user_id, position")
        count, extra = history.num_rows, before.num_rows
        stamp = _time(before)
        columns = [
            pa.array(np.arange(count + extra)),
            pa.concat_arrays([_ints(history, "user_id"), _ints(before, "user_id")]),
            pa.concat_arrays([_ints(history, "item_id"), _ints(before, "item_id")]),
            pa.repeat("exposure", count + extra),
            pa.concat_arrays([pa.repeat(UNKNOWN_SURFACE, count), _surface(before)]),
            pa.concat_arrays([pa.nulls(count, stamp.type), stamp]),
            pa.concat_arrays([pa.nulls(count, stamp.type), stamp]),
            pa.concat_arrays([_ints(history, "position"), pa.array(HISTORY_LENGTH + np.arange(extra))]),
            pa.concat_arrays([pa.repeat("order", count), pa.repeat("exact", extra)]),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def _ads(self) -> pa.Table:
        """All videos; they were uploaded before the first day."""
        items = _read(
            self._path("items"),
            ITEMS,
            f"""item_id::BIGINT AS ad_id, timezone('{FACTS.timezone}', upload_dt::TIMESTAMP) AS created_at,
                author_id::BIGINT AS advertiser_id,
                CASE WHEN music_id > 0 THEN music_id ELSE author_id END::BIGINT AS campaign_id,
                video_type || ':' || upload_type AS format,
                [t::BIGINT FOR t IN string_split(tag, ',') IF t <> 'unknown'][1:{CATEGORY_LEVELS}] AS category_path,
                [coalesce(ln(1 + video_duration / 1000), 0) / 2, (video_duration IS NULL)::INTEGER,
                 coalesce(ln(server_height / server_width), 0),
                 date_diff('day', upload_dt::DATE, DATE '{FACTS.first_day}') / 10]::FLOAT[] AS attributes""",
            "item_id",
        )
        count = items.num_rows
        created = items.column("created_at").cast(CONTRACT["ads"].field("created_at").type)
        constant = {"objective": "watch", "optimisation_event": FACTS.main_label}
        columns: dict[str, pa.Array] = {
            **{name: pa.repeat(value, count) for name, value in constant.items()},
            **{name: items.column(name) for name in items.column_names},
            "created_at": created,
            "known_at": created,
            "embedding": pa.array([[]] * count, type=pa.list_(pa.float32())),
        }
        return _conform("ads", columns, count)

    def _users(self) -> pa.Table:
        """All users; string features are hashed, codes moved up by one, 0 means unknown."""
        users = _read(self._path("users"), USERS, "*", "user_id")
        codes = [string_ids(users.column(name).to_pylist()) for name in USER_STRINGS]
        for name in USER_CODES:
            raw = np.nan_to_num(users.column(name).to_numpy().astype(np.float64), nan=-1.0).astype(np.int64)
            codes.append(np.where(raw < 0, 0, raw + 1))
        dense = [np.minimum(np.log1p(users.column(c).to_numpy()) / 3, 5.0) for c in USER_COUNTS.values()]
        offsets = np.arange(users.num_rows + 1, dtype=np.int32)
        start_us = int(FACTS.bounds(FACTS.first_day)[0].timestamp()) * 1_000_000
        columns: dict[str, pa.Array] = {
            "user_id": _ints(users, "user_id"),
            "valid_from": pa.array(np.full(users.num_rows, start_us - 1)).cast(CONTRACT["users"].field(1).type),
            "categorical": pa.ListArray.from_arrays(offsets * len(codes), np.stack(codes, axis=1).reshape(-1)),
            "dense": pa.ListArray.from_arrays(
                offsets * len(dense), np.stack(dense, axis=1).astype(np.float32).reshape(-1)
            ),
        }
        return _conform("users", columns, users.num_rows)


def _read(path: Path, columns: Mapping[str, Column], selected: str, order: str) -> pa.Table:
    raw = read_file(path, columns)
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("raw", raw)
        try:
            table: pa.Table = connection.sql(f"SELECT {selected} FROM raw ORDER BY {order}").to_arrow_table()
        except duckdb.DataError as error:
            reason = str(error).splitlines()[0]
            raise RefusedError([Breach("value", "*", raw.num_rows, reason, file=path.name)]) from error
    return table.combine_chunks()


def _ints(rows: pa.Table, name: str) -> pa.Array:
    return pa.array(rows.column(name).to_numpy().astype(np.int64))


def _surface(rows: pa.Table) -> pa.Array:
    return pa.array(np.array(SURFACES, dtype=object)[rows.column("tab").to_numpy()], type=pa.string())


def _time(rows: pa.Table) -> pa.Array:
    return pa.array(rows.column("timestamp_ms").to_numpy() * 1000).cast(CONTRACT["impressions"].field("timestamp").type)


def _conform(table: str, columns: dict[str, pa.Array], count: int) -> pa.Table:
    """Order columns by the contract; columns that the source lacks are null."""
    schema = CONTRACT[table]
    arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(count, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _impressions(log: pa.Table) -> pa.Table:
    columns = {
        "request_id": _ints(log, "request_id"),
        "ad_id": _ints(log, "item_id"),
        "position": log.column("position"),
        "user_id": _ints(log, "user_id"),
        "surface": _surface(log),
        "timestamp": _time(log),
        "split": log.column("split"),
    }
    return _conform("impressions", columns, log.num_rows)


def _outcomes(log: pa.Table) -> pa.Table:
    """One row for every positive label."""
    parts = []
    for name in LABELS:
        positive = log.take(np.flatnonzero(log.column(name).to_numpy() == 1))
        stamp = _time(positive)
        columns = {
            "request_id": _ints(positive, "request_id"),
            "ad_id": _ints(positive, "item_id"),
            "label": pa.repeat(name, positive.num_rows),
            "value": pa.array(np.ones(positive.num_rows, dtype=np.float32)),
            "event_time": stamp,
            "known_at": stamp,
        }
        parts.append(_conform("outcomes", columns, positive.num_rows))
    return pa.concat_tables(parts).combine_chunks()
