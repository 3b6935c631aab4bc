"""Raw files of a source: Parquet or CSV, opened strictly. What can't be read whole, or lacks a column, is refused.

A file is checked before a row of it is used: it exists, is not empty, can be read to its end, and every column that
the source needs is there, of the right kind, and without nulls where it must not have any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from feature_repo.refusal import Breaches

Kind = Literal["integer", "number", "text"]
SUFFIXES = (".parquet", ".csv")
EXAMPLES = 3
_CASTS: dict[Kind, str] = {"integer": "BIGINT", "number": "DOUBLE", "text": "VARCHAR"}


@dataclass(frozen=True)
class Column:
    """What a source needs of a column."""

    kind: Kind
    required: bool = True
    """May not be null."""


def find_file(folder: Path, name: str) -> Path | None:
    """`<folder>/<name>.parquet`, or `.csv` where there is no such Parquet file; None where there is neither."""
    return next((path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").exists()), None)


def read_file(path: Path, columns: Mapping[str, Column]) -> pa.Table:
    """The named columns of a file, in that order: integers as int64 where a CSV has them, else as stored.

    Raises:
        RefusedError: names the file, and every column that is missing, of another kind or null, with the rows.
    """
    breaches = Breaches(path.name)
    rows = _parquet(path, columns, breaches) if path.suffix == ".parquet" else _csv(path, columns, breaches)
    breaches.refuse()
    assert rows is not None, "a file without breaches was read"
    if rows.num_rows == 0:
        breaches.add("file_empty", "*", 0, "the file has no rows")
    for name, column in columns.items():
        if column.required and rows[name].null_count:
            breaches.add("not_null", name, rows[name].null_count, f"{name} may not be null", _nulls(rows, name))
    breaches.refuse()
    return rows


def _parquet(path: Path, columns: Mapping[str, Column], breaches: Breaches) -> pa.Table | None:
    size = path.stat().st_size
    if size == 0:
        breaches.add("file_empty", "*", 0, "the file has 0 bytes")
        return None
    try:
        with pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
            _check_columns(schema, columns, num_rows, breaches)
            return None if breaches.found else file.read(columns=list(columns)).select(list(columns))
    except (pa.ArrowException, OSError) as error:
        reason = f"can't be read as Parquet, {size} bytes; it may be cut off: {str(error).splitlines()[0]}"
        breaches.add("file_readable", "*", 0, reason)
        return None


def _check_columns(schema: pa.Schema, columns: Mapping[str, Column], num_rows: int, breaches: Breaches) -> None:
    for name, column in columns.items():
        if name not in schema.names:
            breaches.add("column_missing", name, num_rows, f"column is missing; the file has {', '.join(schema.names)}")
        elif not _fits(schema.field(name).type, column.kind):
            kind = schema.field(name).type
            breaches.add("column_type", name, num_rows, f"type is {kind}, expected {column.kind}")


def _fits(kind: pa.DataType, wanted: Kind) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if wanted == "text":
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    integer = bool(pa.types.is_integer(kind))
    return integer if wanted == "integer" else integer or bool(pa.types.is_floating(kind))


def _csv(path: Path, columns: Mapping[str, Column], breaches: Breaches) -> pa.Table | None:
    if path.stat().st_size == 0:
        breaches.add("file_empty", "*", 0, "the file has 0 bytes")
        return None
    broken: list[dict[str, Any]] = []

    def skip(row: Any) -> str:
        broken.append({"line": row.number, "fields": row.actual_columns, "text": row.text[:80]})
        return "skip"

    with path.open(errors="replace") as file:
        names = next(iter(file)).strip().split(",")
    text = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
    # One thread: the parser knows line numbers then.
    options = {"read_options": pa.csv.ReadOptions(use_threads=False), "convert_options": text}
    try:
        rows = pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(invalid_row_handler=skip), **options)
    except pa.ArrowException as error:
        breaches.add("file_readable", "*", 0, f"can't be read as CSV: {str(error).splitlines()[0]}")
        return None
    if broken:
        reason = f"rows do not have the {len(names)} fields of the header"
        breaches.add("row_broken", "*", len(broken), reason, broken[:EXAMPLES])
    for name in columns:
        if name not in rows.column_names:
            breaches.add("column_missing", name, rows.num_rows, f"column is missing; the file has {', '.join(names)}")
    return None if breaches.found else _cast(rows, columns, breaches)


def _cast(rows: pa.Table, columns: Mapping[str, Column], breaches: Breaches) -> pa.Table:
    casts = {name: f'TRY_CAST("{name}" AS {_CASTS[column.kind]})' for name, column in columns.items()}
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("rows", rows)
        wrong = ", ".join(f'count(*) FILTER ("{n}" IS NOT NULL AND {cast} IS NULL)' for n, cast in casts.items())
        counts = connection.execute(f"SELECT {wrong} FROM rows").fetchall()[0]
        for (name, cast), count in zip(casts.items(), counts, strict=True):
            if count:
                query = f'SELECT * FROM rows WHERE "{name}" IS NOT NULL AND {cast} IS NULL LIMIT {EXAMPLES}'
                examples = connection.sql(query).to_arrow_table().to_pylist()
                breaches.add("column_type", name, int(count), f"no {columns[name].kind}", examples)
        selected = ", ".join(f'{cast} AS "{name}"' for name, cast in casts.items())
        cast_rows: pa.Table = connection.sql(f"SELECT {selected} FROM rows").to_arrow_table()
    return cast_rows


def _nulls(rows: pa.Table, name: str) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = rows.filter(pa.compute.is_null(rows[name])).slice(0, EXAMPLES).to_pylist()
    return shown
