"""A source of contract tables as they lie in a folder, `<day>/<table>.parquet`: breaks what KuaiRand can't express."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from feature_repo.tables import CONTRACT, SourceFacts
from tests.feature_repo.contract_rows import DAY, FACTS, at, good_row, table_of

FOLDER_FACTS = SourceFacts(**{**vars(FACTS), "name": "folder", "has_oracle": False})


class FolderSource:
    """Reads the tables as they are; a table that a day lacks is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = ""

    @property
    def facts(self) -> SourceFacts:
        return FOLDER_FACTS

    def tables(self, day: str) -> Iterator[tuple[str, pa.Table]]:
        for table in CONTRACT:
            path = self.folder / day / f"{table}.parquet"
            self._file = f"{day}/{table}.parquet"
            yield table, pq.read_table(path) if path.exists() else CONTRACT[table].empty_table()

    def file_of(self, table: str) -> str:
        return self._file


def write_folder(folder: Path) -> Path:
    """Good rows of every table on one day."""
    for table in CONTRACT:
        rows = table_of(table, [good_row(table)])
        (folder / DAY).mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, folder / DAY / f"{table}.parquet")
    return folder


def write_rows(folder: Path, table: str, rows: pa.Table) -> None:
    """Replace the rows of a table on the one day."""
    pq.write_table(rows, folder / DAY / f"{table}.parquet")


__all__ = ["DAY", "FOLDER_FACTS", "FolderSource", "at", "good_row", "table_of", "write_folder", "write_rows"]
