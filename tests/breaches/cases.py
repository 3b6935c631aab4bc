"""Breaches of the input: how each is made, and what its refusal must say (file, column, count, reason)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from feature_repo.adapters.kuairand import FACTS
from tests.breaches.contract_folder import DAY, at, good_row, table_of, write_rows
from tests.breaches.kuairand_files import ITEMS, ROWS_A_DAY, USERS, Files, make_files

ROWS = ROWS_A_DAY * len(FACTS.days)
END_MS = int(FACTS.bounds(FACTS.last_day)[1].timestamp() * 1000)


@dataclass(frozen=True)
class Case:
    """One breach: `make` breaks a good folder."""

    name: str
    source: str
    make: Callable[[Path], None]
    file: str
    column: str
    count: int
    reason: str
    table: str
    """The asset whose check fails."""


TABLES = {"interactions": "impressions", "history": "engagements", "items": "ads", "users": "users"}


def _kuairand(name: str, make: Callable[[Files], Any], file: str, column: str, count: int, reason: str) -> Case:
    table = TABLES[file.partition(".")[0]]
    return Case(name, "kuairand", lambda folder: make(Files(folder)), file, column, count, reason, table)


def _folder(name: str, table: str, rows: Callable[[], pa.Table], column: str, count: int, reason: str) -> Case:
    return Case(
        name, "folder", lambda folder: write_rows(folder, table, rows()), f"{DAY}/{table}.parquet", column, count,
        reason, table,
    )  # fmt: skip


def _changed(table: str, *changes: dict[str, Any]) -> Callable[[], pa.Table]:
    return lambda: table_of(table, [{**good_row(table), **change} for change in changes])


def _naive() -> pa.Table:
    rows = table_of("outcomes", [good_row("outcomes")])
    naive = rows["event_time"].cast(pa.timestamp("us"))
    return rows.set_column(rows.column_names.index("event_time"), "event_time", naive)


def _null() -> pa.Table:
    rows = [{**good_row("impressions"), "user_id": None}]
    return pa.Table.from_pylist(
        rows, schema=pa.schema([f.with_nullable(True) for f in table_of("impressions", []).schema])
    )


def _stamps(files: Files) -> None:
    stamps = files.read("interactions")["timestamp_ms"].cast(pa.timestamp("ms"))
    files.set("interactions", "timestamp_ms", stamps)


def _truncate(files: Files) -> None:
    path = files.path("interactions")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _broken_csv(files: Files) -> None:
    path = files.to_csv("interactions")
    lines = path.read_text().splitlines()
    lines[5] += ",77,too,many"
    lines[9] = "1,2"
    path.write_text("\n".join(lines) + "\n")


def _text_in_csv(files: Files) -> None:
    path = files.to_csv("history")
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split(",")[0], "anna", 1)
    path.write_text("\n".join(lines) + "\n")


def _ten_times(files: Files) -> None:
    """The sixth day holds eleven times the rows of the others."""
    rows, more = files.read("interactions"), [make_files(seed)["interactions"] for seed in range(1, 11)]
    day = slice(5 * ROWS_A_DAY, 6 * ROWS_A_DAY)
    files.write("interactions", pa.concat_tables([rows, *(m.slice(day.start, ROWS_A_DAY) for m in more)]))


def _double_user(files: Files) -> None:
    users = files.read("users")
    other = users.slice(7, 1).set_column(0, "user_id", pa.array([3], pa.int64()))
    files.write("users", pa.concat_tables([users, other]))


CASES = [
    _kuairand(
        "a column is missing", lambda f: f.write("interactions", f.read("interactions").drop_columns(["is_click"])),
        "interactions.parquet", "is_click", ROWS, "column is missing",
    ),
    _kuairand(
        "a column has the wrong type",
        lambda f: f.set("interactions", "user_id", f.read("interactions")["user_id"].cast(pa.string())),
        "interactions.parquet", "user_id", ROWS, "type is string, expected integer",
    ),
    _kuairand(
        "times are stamps without a zone",
        _stamps,
        "interactions.parquet", "timestamp_ms", ROWS, "type is timestamp[ms], expected integer",
    ),
    _kuairand(
        "a key is null", lambda f: f.change("interactions", "item_id", r3=None, r7=None),
        "interactions.parquet", "item_id", 2, "item_id may not be null",
    ),
    _kuairand(
        "a file has no bytes", lambda f: f.path("items").write_bytes(b""), "items.parquet", "*", 0, "0 bytes",
    ),
    _kuairand(
        "a file has no rows", lambda f: f.write("users", f.read("users").slice(0, 0)),
        "users.parquet", "*", 0, "the file has no rows",
    ),
    _kuairand("a Parquet file is cut off", _truncate, "interactions.parquet", "*", 0, "it may be cut off"),
    _kuairand(
        "a file is no Parquet file", lambda f: f.path("history").write_text("user,item\n1,2\n" * 40),
        "history.parquet", "*", 0, "can't be read as Parquet",
    ),
    _kuairand(
        "times lie in the future", lambda f: f.change("interactions", "timestamp_ms", r0=END_MS, r1=END_MS + 10**9),
        "interactions.parquet", "timestamp_ms", 2, f"after the log's last day, {FACTS.last_day}",
    ),
    _kuairand(
        "a surface is unknown", lambda f: f.change("interactions", "tab", r5=99, r6=-1),
        "interactions.parquet", "tab", 2, "tabs are 0 to 14",
    ),
    _kuairand(
        "rows of a CSV file are broken", _broken_csv, "interactions.csv", "*", 2, "do not have the 8 fields",
    ),
    _kuairand("a number of a CSV file is text", _text_in_csv, "history.csv", "user_id", 1, "no integer"),
    _kuairand(
        "a day is ten times too large", _ten_times, "interactions.parquet", "*", 11 * ROWS_A_DAY,
        f"more than 10 times the {ROWS_A_DAY} rows",
    ),
    _kuairand(
        "an id is negative", lambda f: f.change("items", "item_id", r0=-5), "items.parquet", "ad_id", 1,
        "ids are hashed to non-negative int64",
    ),
    _kuairand(
        "a user comes twice and differs", _double_user, "users.parquet", "user_id, valid_from", 1,
        "repeats of the key (user_id, valid_from) differ",
    ),
    _kuairand(
        "a number is not finite",
        lambda f: f.set("users", "fans_user_num", pa.array(np.where(np.arange(USERS) < 4, -2.0, 1.0))),
        "users.parquet", "dense", 4, "numbers are finite",
    ),
    _kuairand(
        "a date is none", lambda f: f.change("items", "upload_dt", r2="yesterday"), "items.parquet", "*", ITEMS,
        "yesterday",
    ),
    _folder(
        "an outcome comes before its impression", "outcomes", _changed("outcomes", {"event_time": at(9)}),
        "event_time", 1, "lies before the impression",
    ),
    _folder(
        "repeats of a key conflict", "impressions", _changed("impressions", {}, {"position": 4}),
        "request_id, ad_id", 1, "repeats of the key (request_id, ad_id) differ",
    ),
    _folder("a time has no zone", "outcomes", _naive, "event_time", 1, "times need a time zone"),
    _folder("a required value is null", "impressions", _null, "user_id", 1, "user_id may not be null"),
    _folder(
        "a surface of the contract is unknown", "impressions", _changed("impressions", {"surface": "reels"}),
        "surface", 1, "surfaces are feed, search",
    ),
    _folder(
        "a label is unknown", "outcomes", _changed("outcomes", {"label": "install"}), "label", 1, "labels are click"
    ),
    _folder(
        "an outcome is known before it happens", "outcomes", _changed("outcomes", {"known_at": at(9)}),
        "event_time, known_at", 1, "nothing is known before it happens",
    ),
    _folder(
        "a propensity is above one", "impressions", _changed("impressions", {"propensity": 1.5}), "propensity", 1,
        "a propensity is a positive probability",
    ),
    _folder(
        "a request belongs to two users", "impressions", _changed("impressions", {}, {"ad_id": 9, "user_id": 4}),
        "user_id, surface, timestamp", 2, "share user, surface and time",
    ),
    _folder(
        "a row lies in the wrong day", "impressions", _changed("impressions", {"timestamp": at(1, day=7)}),
        "timestamp", 1, "timestamp must lie within",
    ),
]  # fmt: skip
