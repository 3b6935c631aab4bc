"""Raw files: Parquet and CSV are read alike, and what is wrong with one is said in one go."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from feature_repo.adapters.kuairand import FACTS, KuaiRandSource
from feature_repo.adapters.raw import Column, find_file, read_file
from feature_repo.refusal import Breach, RefusedError
from tests.breaches.kuairand_files import Files, write_files

COLUMNS = {"id": Column("integer"), "score": Column("number", required=False), "name": Column("text")}
ROWS = pa.table({"name": ["a", "b"], "id": pa.array([1, 2]), "score": pa.array([0.5, None]), "more": [True, False]})


def test_both_forms_give_the_columns_that_were_asked_for(tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "t.parquet")
    pyarrow.csv.write_csv(ROWS, tmp_path / "t.csv")
    for suffix in ("parquet", "csv"):
        rows = read_file(tmp_path / f"t.{suffix}", COLUMNS)
        assert rows.column_names == ["id", "score", "name"]
        assert rows.to_pydict() == {"id": [1, 2], "score": [0.5, None], "name": ["a", "b"]}


def test_parquet_comes_before_csv_and_neither_is_none(tmp_path: Path) -> None:
    assert find_file(tmp_path, "t") is None
    (tmp_path / "t.csv").touch()
    assert find_file(tmp_path, "t") == tmp_path / "t.csv"
    (tmp_path / "t.parquet").touch()
    assert find_file(tmp_path, "t") == tmp_path / "t.parquet"


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["x"], "score": pa.array([1])}), tmp_path / "t.parquet")
    with pytest.raises(RefusedError) as refused:
        read_file(tmp_path / "t.parquet", COLUMNS)
    assert [(b.rule, b.column, b.count) for b in refused.value.breaches] == [
        ("column_type", "id", 1), ("column_missing", "name", 1),
    ]  # fmt: skip
    assert str(refused.value).splitlines()[0] == (
        "t.parquet: column_type: 1 row refused (column id: type is string, expected integer)"
    )


def test_dictionaries_and_small_integers_fit(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "id": pa.array([1], pa.int8()),
            "score": pa.array([2], pa.int32()),
            "name": pa.array(["a"]).dictionary_encode(),
        }
    )
    pq.write_table(rows, tmp_path / "t.parquet")
    assert read_file(tmp_path / "t.parquet", COLUMNS).num_rows == 1


@pytest.mark.parametrize(
    ("text", "rule", "reason"),
    [
        ("", "file_empty", "0 bytes"),
        ("id,score\n1,2\n", "column_missing", "the file has id, score"),
        ("id,score,name\n1,x,a\n", "column_type", "no number"),
        ("id,score,name\n", "file_empty", "no rows"),
        ("id,score,name\n,2,a\n", "not_null", "id may not be null"),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, text: str, rule: str, reason: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(RefusedError, match=reason) as refused:
        read_file(tmp_path / "t.csv", COLUMNS)
    assert refused.value.breaches[0].rule == rule


def test_broken_rows_are_counted_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,score,name\n1,2,a\n1,2\n3,4,b,c\n5,6,d\n")
    with pytest.raises(RefusedError) as refused:
        read_file(tmp_path / "t.csv", COLUMNS)
    (breach,) = refused.value.breaches
    assert (breach.rule, breach.column, breach.count, breach.file) == ("row_broken", "*", 2, "t.csv")
    assert [example["line"] for example in breach.examples] == [3, 4]


def test_a_refusal_can_be_told_its_place_and_keeps_what_it_knew() -> None:
    error = RefusedError([Breach("r", "c", 1, "why"), Breach("r", "c", 2, "why", table="ads/d", file="f")])
    assert [(b.table, b.file) for b in error.within(table="users/d", file="g").breaches] == [
        ("users/d", "g"), ("ads/d", "f"),
    ]  # fmt: skip
    assert error.breaches[1].text == "f: ads/d: r: 2 rows refused (column c: why)"


def test_the_small_kuairand_files_are_good_in_both_forms(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "raw")
    parquet = [dict(KuaiRandSource(folder).tables(day)) for day in FACTS.days[:2]]
    for name in ("interactions", "history", "users", "items"):
        Files(folder).to_csv(name)
    for day, tables in zip(FACTS.days, parquet, strict=False):
        for table, rows in KuaiRandSource(folder).tables(day):
            assert rows.equals(tables[table]), f"{table}/{day}"
    assert KuaiRandSource(folder).file_of("ads") == "items.csv"


def test_a_csv_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,score,name\n1,2,\xff\xfe\n")
    with pytest.raises(RefusedError, match="can't be read as CSV") as refused:
        read_file(tmp_path / "t.csv", COLUMNS)
    assert refused.value.breaches[0].rule == "file_readable"


def test_bad_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for content, rule in ((b"", "file_empty"), (b"PAR1 and no more", "file_readable")):
        path.write_bytes(content)
        with pytest.raises(RefusedError) as refused:
            read_file(path, COLUMNS)
        assert refused.value.breaches[0].rule == rule


def test_values_that_the_adapter_can_t_use_are_refused(tmp_path: Path) -> None:
    files = Files(write_files(tmp_path / "raw"))
    files.change("items", "upload_dt", r2="yesterday")
    with pytest.raises(RefusedError, match=r"items\.parquet: value: 40 rows refused .*yesterday"):
        dict(KuaiRandSource(files.folder).tables(FACTS.days[0]))
    files.change("interactions", "tab", r1=99)
    with pytest.raises(RefusedError, match=r"interactions\.parquet: tab_range: 1 row refused \(column tab: tabs are 0"):
        dict(KuaiRandSource(files.folder).tables(FACTS.days[0]))
