"""Rows of a mapped table in the contract's types, read by DuckDB; every refusal names table, field and expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from feature_repo.adapters.base import mixed_ids, string_ids
from feature_repo.adapters.mapping import EPOCHS, LISTS, Mapping, TableMapping
from feature_repo.tables import TIME

SURFACE, KIND = "all", "event"
"""What events without a surface or a kind get."""
PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")
"""Texts that are kept as numbers."""
IDS = ("request_id", "ad_id", "user_id", "item_id", "advertiser_id", "campaign_id")
TEXTS = {"surface": SURFACE, "kind": KIND, "objective": "", "format": "", "title": None, "split": None}
FLOATS = ("propensity", "bid")
NEEDED = ("ad_id", "user_id", "item_id", "timestamp")
EXAMPLES = 3


def read_rows(mapping: Mapping, table: TableMapping) -> pa.Table:
    """All rows that pass `where`; events are sorted by time and have request ids, positions and labels.

    Raises:
        ValueError: a file can't be read, an expression names a column that isn't there, a needed value is null, or a
            time does not parse; names table, field, expression and counts.
    """
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(f"SET TimeZone = '{mapping.timezone}'")
        source = _source(connection, mapping, table)
        columns = _columns(mapping, table, source.columns)
        rows = _select(connection, mapping, table, columns, source)
    _check_nulls(mapping, table, rows)
    made = {name: _convert(name, rows[name].combine_chunks()) for name in rows.column_names}
    for name in LISTS:
        made |= _gather(name, made, list(table.many(name)), rows.num_rows)
    return _finish(table.name, pa.table(made))


def _sql(expression: str, have: Sequence[str]) -> str:
    """A mapped value as SQL: the name of a column is quoted, as it may be a keyword (`order`, `when`)."""
    return '"' + expression.replace('"', '""') + '"' if expression in have else expression


def _columns(mapping: Mapping, table: TableMapping, have: Sequence[str]) -> dict[str, str]:
    """Output column -> SQL: fields as mapped, list fields as `<field>.<name>`, labels as `label_<name>`."""
    columns: dict[str, str] = {}
    for name in table.fields:
        if name in LISTS:
            columns |= {f"{name}.{part}": _sql(expression, have) for part, expression in table.many(name).items()}
        else:
            columns[name] = _sql(table.one(name), have)
    if table.has("timestamp"):
        columns["timestamp"] = _time(mapping, table, _sql(table.one("timestamp"), have))
    if table.name == "impressions":
        columns |= {
            f"label_{name}": f"coalesce(({_sql(e, have)})::BOOLEAN, false)" for name, e in mapping.labels.items()
        }
    return columns


def _time(mapping: Mapping, table: TableMapping, value: str) -> str:
    """SQL of a time: an epoch in a unit, ISO text or a typed column (local unless it says otherwise), or strptime."""
    form = table.time_format
    if form in EPOCHS:
        return f"make_timestamptz((({value}) * {EPOCHS[form]})::BIGINT)"
    if form == "iso":
        return f"({value})::TIMESTAMPTZ"
    pattern = form.replace("'", "''")
    return f"timezone('{mapping.timezone}', strptime(({value})::VARCHAR, '{pattern}'))"


def _source(connection: Any, mapping: Mapping, table: TableMapping) -> Any:
    paths = [str(path) for path in table.files]
    try:
        if table.files[0].suffix == ".parquet":
            return connection.read_parquet(paths, union_by_name=True)
        return connection.read_csv(paths, union_by_name=True)
    except duckdb.Error as error:
        raise ValueError(f"{mapping.path}: [{table.name}] files can't be read: {error}") from error


def _select(connection: Any, mapping: Mapping, table: TableMapping, columns: dict[str, str], source: Any) -> pa.Table:
    where = f"{mapping.path}: [{table.name}]"
    for name, expression in {"where": table.where, **columns}.items():
        try:
            source.limit(0).project(f"({expression}) AS value").fetchall()
        except duckdb.Error as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{where} {name} = {expression!r}: {reason}; the files have {', '.join(source.columns)}"
            ) from error
    try:
        chosen = ", ".join(f'({expression}) AS "{name}"' for name, expression in columns.items())
        return source.filter(table.where).project(chosen).to_arrow_table()
    except duckdb.Error as error:
        raise ValueError(f"{where} can't be read: {str(error).splitlines()[0]}") from error


def _check_nulls(mapping: Mapping, table: TableMapping, rows: pa.Table) -> None:
    for name in NEEDED:
        if name in rows.column_names and (missing := rows[name].null_count):
            place = np.flatnonzero(pc.is_null(rows[name]).to_numpy())[:EXAMPLES]
            raise ValueError(
                f"{mapping.path}: [{table.name}] {name} = {table.one(name)!r} is null in {missing:,} of "
                f"{rows.num_rows:,} rows, the first of them rows {place.tolist()}; "
                "map another column, or leave these rows out by where"
            )


def _convert(name: str, values: pa.Array) -> pa.Array:
    field = name.partition(".")[0]
    if field in (*IDS, "category", "categorical"):
        return _ids(values)
    if field in TEXTS:
        return (
            pc.fill_null(values.cast(pa.string()), TEXTS[field])
            if TEXTS[field] is not None
            else values.cast(pa.string())
        )
    if field in FLOATS:
        return values.cast(pa.float32())
    if field == "dense":
        return pc.fill_null(values.cast(pa.float32()), 0.0)
    if field == "timestamp":
        return values.cast(TIME)
    return values.cast(pa.int16()) if field == "position" else values


def _ids(values: pa.Array) -> pa.Array:
    """Integers from 0 on as they are, also where a file has them as text; everything else hashed; null is 0.

    Value by value: an id is the same in every column, whatever else stands there.
    """
    encoded = values.cast(pa.string()).dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    known = np.array([int(t) if PLAIN.fullmatch(t) else h for t, h in zip(texts, string_ids(texts), strict=True)])
    places = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    return pa.array(np.where(places < 0, 0, np.append(known.astype(np.int64), 0)[places]).astype(np.int64))


def _gather(name: str, made: dict[str, pa.Array], names: Sequence[str], count: int) -> dict[str, pa.Array]:
    """The columns `<name>.<part>` of `made`, taken out, as one list column under the contract's name."""
    parts = [made.pop(f"{name}.{part}").to_numpy(zero_copy_only=False) for part in names]
    kind = pa.float32() if name == "dense" else pa.int64()
    if name == "category":
        # A path ends where a level is missing, and its ids are positive.
        lists = [[int(v) or 1 for v in row] for row in zip(*parts, strict=True)] if parts else [[]] * count
        return {"category_path": pa.array(lists, pa.list_(kind))}
    matrix: NDArray[Any] = np.column_stack(parts) if parts else np.zeros((count, 0))
    return {name: _lists(matrix, kind)}


def _lists(matrix: NDArray[Any], kind: pa.DataType) -> pa.Array:
    offsets = np.arange(len(matrix) + 1, dtype=np.int32) * matrix.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(matrix.reshape(-1), kind))


def _finish(table: str, rows: pa.Table) -> pa.Table:
    """Add what every row of the contract needs and the mapping may leave out."""
    count = rows.num_rows
    if table == "ads":
        rows = _filled(
            rows, {"advertiser_id": 0, "campaign_id": 0, "objective": "", "format": "", "optimisation_event": ""}
        )
        rows = rows.append_column("attributes", rows["dense"])
        return rows.append_column("embedding", pa.array([[]] * count, pa.list_(pa.float32())))
    if table == "users":
        return rows
    rows = _filled(rows, {"surface": SURFACE, "kind": KIND})
    rows = rows.take(pc.sort_indices(rows, [("timestamp", "ascending")]))
    if table == "engagements":
        number = pa.array(np.arange(count))
        exact = pa.repeat("exact", count)
        for name, values in {
            "event_id": number, "known_at": rows["timestamp"], "sequence_number": number, "time_quality": exact,
        }.items():  # fmt: skip
            rows = rows.append_column(name, values)
        return rows
    return _with_requests(rows)


def _filled(rows: pa.Table, defaults: dict[str, Any]) -> pa.Table:
    for name, value in defaults.items():
        if name not in rows.column_names:
            rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    return rows


def _with_requests(rows: pa.Table) -> pa.Table:
    """Request ids where the log has none (same user, time and surface) and positions (order within the request)."""
    if "request_id" not in rows.column_names:
        surface = rows["surface"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
        keys: Sequence[NDArray[np.int64]] = [
            rows["user_id"].to_numpy(), rows["timestamp"].cast(pa.int64()).to_numpy(), surface.astype(np.int64)
        ]  # fmt: skip
        rows = rows.append_column("request_id", pa.array(mixed_ids(*keys)))
    if "position" not in rows.column_names:
        request = rows["request_id"].to_numpy()
        order = np.argsort(request, kind="stable")
        position = np.empty(len(request), np.int64)
        position[order] = np.arange(len(request)) - np.searchsorted(request[order], request[order])
        rows = rows.append_column("position", pa.array(np.minimum(position, 2**15 - 1), pa.int16()))
    return rows
