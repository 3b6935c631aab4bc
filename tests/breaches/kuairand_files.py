"""A small folder in the form of the KuaiRand files: sixty users, forty videos, two weeks."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from feature_repo.adapters.kuairand import FACTS, LABELS, USER_CODES, USER_COUNTS, USER_STRINGS

USERS, ITEMS, ROWS_A_DAY = 60, 40, 130


def write_files(folder: Path, *, seed: int = 0) -> Path:
    """Write the four files; the same seed gives the same bytes."""
    folder.mkdir(parents=True)
    for name, rows in make_files(seed).items():
        pq.write_table(rows, folder / f"{name}.parquet")
    return folder


def make_files(seed: int = 0) -> dict[str, pa.Table]:
    """File name -> rows."""
    generator = np.random.default_rng(seed)
    return {
        "interactions": _interactions(generator), "history": _history(), "users": _users(generator),
        "items": _items(generator),
    }  # fmt: skip


def _interactions(generator: np.random.Generator) -> pa.Table:
    starts = [int(FACTS.bounds(day)[0].timestamp() * 1000) for day in FACTS.days]
    count = len(starts) * ROWS_A_DAY
    stamp = np.repeat(starts, ROWS_A_DAY) + generator.integers(0, 86_400_000, count)
    split = np.where(np.repeat(FACTS.days, ROWS_A_DAY) <= FACTS.evaluation_cut, "train", "test")
    rates = dict(zip(LABELS.values(), (0.3, 0.2, 0.05), strict=True))
    return pa.table(
        {
            "user_id": pa.array(generator.integers(0, USERS, count), pa.int32()),
            "item_id": pa.array(generator.integers(0, ITEMS, count), pa.int32()),
            "timestamp_ms": pa.array(stamp, pa.int64()),
            "tab": pa.array(generator.choice([0, 1, 4], count), pa.int8()),
            **{name: pa.array(generator.random(count) < rate).cast(pa.int8()) for name, rate in rates.items()},
            "split": pa.array(split, pa.string()),
        }
    )


def _history() -> pa.Table:
    position = np.tile(np.arange(5), USERS)
    user = np.repeat(np.arange(USERS), 5)
    return pa.table(
        {
            "user_id": pa.array(user, pa.int32()),
            "position": pa.array(position, pa.int16()),
            "item_id": pa.array((user + position) % ITEMS, pa.int32()),
        }
    )


def _users(generator: np.random.Generator) -> pa.Table:
    return pa.table(
        {
            "user_id": pa.array(np.arange(USERS), pa.int64()),
            **{name: pa.array(generator.choice(["a", "b", "c"], USERS).tolist()) for name in USER_STRINGS},
            **{name: pa.array(generator.integers(0, 5, USERS)) for name in USER_CODES},
            **{name: pa.array(generator.integers(0, 900, USERS)) for name in USER_COUNTS.values()},
        }
    )


def _items(generator: np.random.Generator) -> pa.Table:
    uploaded = datetime(2022, 4, 10, tzinfo=UTC).date().isoformat()
    numbers = {"video_duration": 30_000.0, "server_width": 720.0, "server_height": 1280.0}
    return pa.table(
        {
            "item_id": pa.array(np.arange(ITEMS), pa.int32()),
            "author_id": pa.array(generator.integers(1, 9, ITEMS), pa.int32()),
            "music_id": pa.array(generator.integers(1, 9, ITEMS), pa.int64()),
            "upload_dt": pa.array([uploaded] * ITEMS),
            "video_type": pa.array(["NORMAL"] * ITEMS),
            "upload_type": pa.array(["ShortImport"] * ITEMS),
            "tag": pa.array([str(t) for t in generator.integers(1, 20, ITEMS)]),
            **{name: pa.array([value] * ITEMS) for name, value in numbers.items()},
        }
    )


class Files:
    """The files of a folder, for breaking them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    def read(self, name: str) -> pa.Table:
        return pq.read_table(self.path(name))

    def write(self, name: str, rows: pa.Table) -> None:
        pq.write_table(rows, self.path(name))

    def set(self, name: str, column: str, values: Any) -> None:
        """Replace a column by an Arrow array."""
        rows = self.read(name)
        self.write(name, rows.set_column(rows.column_names.index(column), column, values))

    def change(self, name: str, column: str, **by_row: Any) -> None:
        """Replace single values: `r3=None`."""
        values = self.read(name)[column].to_pylist()
        for row, value in by_row.items():
            values[int(row[1:])] = value
        self.set(name, column, pa.array(values, self.read(name)[column].type))

    def to_csv(self, name: str) -> Path:
        """Put a CSV file in the place of the Parquet one."""
        path = self.folder / f"{name}.csv"
        pyarrow.csv.write_csv(self.read(name), path)
        self.path(name).unlink()
        return path
