"""Files that Feast reads: links to the published cuts, and the vectors and packed histories that go online."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_repo.feature_schema import schema_for
from feature_repo.history_bytes import pack_histories
from feature_repo.lake import Lake
from feature_repo.tables import TIME, SourceFacts
from feature_repo.training_tables import load_history, load_tables


def export_online(folder: Path, lake: Lake, facts: SourceFacts, day: str, cut_us: int, vector: str) -> int:
    """Write the vectors (view `vector`) and packed histories of a cut below `folder`, one sub-folder a view.

    Only the newest files are kept: training reads the tables and the event log.

    Returns:
        The number of users that have events.
    """
    schema = schema_for(facts)
    tables = load_tables(lake, facts, day, day)
    user_id = pa.array(tables.user_id_U)
    vectors = pa.table(
        {
            "user_id": user_id,
            "categorical": _lists(tables.user_categorical_UC, len(schema.categorical_of("user"))),
            "dense": _lists(tables.user_dense_UD, len(schema.dense_of("user"))),
        }
    )
    days = facts.days[: facts.days.index(day) + 1]
    packed_U = pack_histories(load_history(lake, days, len(tables.user_id_U)), facts.history_length)
    # Users without events get an empty history: an earlier cut may have left one online.
    histories = pa.table({"user_id": user_id, "history": packed_U})
    for view, rows in ((vector, vectors), ("user_history", histories)):
        _write_newest(folder / view, day, rows, cut_us)
    return int(pa.compute.sum(pa.compute.greater(pa.compute.binary_length(packed_U), 0)).as_py())


def _lists(values: NDArray[Any], width: int) -> pa.ListArray:
    offsets = pa.array(np.arange(len(values) + 1) * width, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))


def _write_newest(folder: Path, day: str, rows: pa.Table, cut_us: int) -> None:
    cut = pa.array(np.full(rows.num_rows, cut_us), pa.int64())
    for name, column in (("published_at", cut.cast(TIME)), ("created_at", cut.cast(TIME)), ("event_timestamp_us", cut)):
        rows = rows.append_column(name, column)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{day}.tmp"
    pq.write_table(rows, temporary, compression="zstd")
    os.replace(temporary, folder / f"{day}.parquet")
    for stale in folder.glob("*.parquet"):
        if stale.name != f"{day}.parquet":
            stale.unlink()


def place(lake: Lake, table: str, day: str, target: Path) -> None:
    """Make `target` the file of a partition: a hard link where that is possible, else a copy; replaced atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = Path(lake.path(table, day))
    if target.exists() and source.exists() and os.path.samefile(source, target):
        return
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    lake.fetch(table, day, temporary)
    os.replace(temporary, target)
