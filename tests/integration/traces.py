"""Find a number anywhere in a home: in Parquet, SQLite, safetensors, JSON, HTML and text."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file


def traces(home: Path, number: int) -> list[str]:
    """Files (with table or column) that hold the number."""
    return sorted({where for path in home.rglob("*") if path.is_file() for where in _in_file(path, number)})


def _in_file(path: Path, number: int) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from (f"{path}: {name}" for name, column in _columns(pq.read_table(path)) if number in column)
    elif path.suffix == ".safetensors":
        for name, tensor in load_file(path).items():
            if tensor.dtype == np.int64 and (tensor == number).any():
                yield f"{path}: {name}"
    elif path.read_bytes()[:15] == b"SQLite format 3":
        yield from _in_database(path, number)
    else:
        content = path.read_bytes()
        if re.search(rb"(?<!\d)%d(?!\d)" % number, content) or number.to_bytes(8, "little") in content:
            yield str(path)


def _columns(rows: pa.Table) -> Iterator[tuple[str, set[Any]]]:
    for name in rows.column_names:
        column = rows[name]
        while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type)
        if pa.types.is_integer(column.type):
            yield name, set(pa.compute.unique(column).to_pylist())


def _in_database(path: Path, number: int) -> Iterator[str]:
    content = path.read_bytes()
    if number.to_bytes(8, "little") in content or number.to_bytes(8, "big") in content:
        yield f"{path}: bytes"
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for row in connection.execute(f'SELECT * FROM "{table}"'):
                if any(_holds(value, number) for value in row):
                    yield f"{path}: {table}"
                    break


def _holds(value: Any, number: int) -> bool:
    if isinstance(value, bytes):
        return number.to_bytes(8, "little") in value or _varint(number) in value
    return bool(re.search(rf"(?<!\d){number}(?!\d)", value)) if isinstance(value, str) else value == number


def _varint(number: int) -> bytes:
    """As protobuf stores it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))
