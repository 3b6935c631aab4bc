"""Runs the SQL transforms of `transforms/`: in-process DuckDB, two threads, UTC, nothing loaded from the network.

A transform is one SELECT in `transforms/<name>.duckdb.sql`. It reads the views that the caller names and the
parameters it writes as `$name`, and returns Arrow. Facts of a source (kinds, surfaces, labels) come in as small
tables, so that the SQL text is the same for every source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from feature_repo.files import open_filesystem

TRANSFORMS = Path(__file__).parent / "transforms"

Input: TypeAlias = "pa.Table | Sequence[str]"
"""An Arrow table, or paths of Parquet files that are read as one table."""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """The process's in-memory database; it holds no tables, only the settings that all connections share."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": 2,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    database = duckdb.connect(":memory:", config=settings)
    database.execute("SET GLOBAL TimeZone = 'UTC'")
    return database


def connect() -> duckdb.DuckDBPyConnection:
    """A connection of its own, safe in any thread: two threads in all, UTC, no extension is fetched or autoloaded."""
    return _database().cursor()


@cache
def transform_text(name: str) -> str:
    """SQL text of a transform; raises ValueError that lists the known ones."""
    path = TRANSFORMS / f"{name}.duckdb.sql"
    if not path.exists():
        known = ", ".join(sorted(p.name.removesuffix(".duckdb.sql") for p in TRANSFORMS.glob("*.duckdb.sql")))
        raise ValueError(f"transform {name!r} does not exist; known transforms: {known}")
    return path.read_text()


def run_transform(name: str, inputs: Mapping[str, Input], parameters: Mapping[str, Any] | None = None) -> pa.Table:
    """Run one transform and return its rows in the order that the SQL states.

    Args:
        name: file name in `transforms/` without `.duckdb.sql`.
        inputs: view name -> Arrow table or Parquet paths.
        parameters: values of the `$name` parameters; all that are given must occur in the text.
    """
    return query(transform_text(name), inputs, parameters)


def query(text: str, inputs: Mapping[str, Input], parameters: Mapping[str, Any] | None = None) -> pa.Table:
    """Run one SELECT over named inputs and return Arrow; see `run_transform`."""
    connection = connect()
    try:
        for view, rows in inputs.items():
            if isinstance(rows, pa.Table):
                connection.register(view, rows)
            else:
                connection.execute(f"CREATE TEMP VIEW {view} AS SELECT * FROM {parquet(connection, rows)}")
        result = connection.sql(text, params=dict(parameters)) if parameters else connection.sql(text)
        return result.to_arrow_table()
    finally:
        connection.close()


def parquet(connection: duckdb.DuckDBPyConnection, paths: Sequence[str]) -> str:
    """SQL of the rows of Parquet files, given by path or by URL; opens the object stores that URLs name."""
    for protocol in {path.partition("://")[0] for path in paths if "://" in path}:
        if not connection.filesystem_is_registered(protocol):
            connection.register_filesystem(open_filesystem(protocol))
    quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    return f"read_parquet([{quoted}])"
