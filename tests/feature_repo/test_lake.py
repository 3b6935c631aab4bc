import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.lake import Lake

ROWS = pa.table({"x": [1, 2, 3]})


def test_write_read_and_replace(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    first = lake.write("t", "2026-01-05", ROWS, {"dropped": 2})
    assert first.num_rows == 3
    assert first.facts == {"dropped": 2}
    assert lake.read("t", "2026-01-05").equals(ROWS)
    second = lake.write("t", "2026-01-05", pa.table({"x": [9]}))
    assert second.version != first.version
    assert lake.read("t", "2026-01-05").column("x").to_pylist() == [9]
    folders = [p for p in (tmp_path / "t" / "2026-01-05").iterdir() if p.is_dir()]
    assert [p.name for p in folders] == [second.version]


def test_same_rows_are_the_same_version(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    assert lake.write("t", "a", ROWS).version == lake.write("t", "b", ROWS).version


def test_named_files_and_several_partitions(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.write("t", "a", {"events": ROWS, "users": ROWS})
    lake.write("t", "b", {"events": ROWS})
    assert lake.keys("t") == ["a", "b"]
    assert lake.read("t", ["a", "b"], "events").num_rows == 6
    with pytest.raises(ValueError, match=r"t/b has no users.parquet"):
        lake.path("t", "b", "users")


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.write("t", "a", ROWS)
    with pytest.raises(OSError, match="disk full"), lake.replace("t", "a") as folder:
        pq.write_table(pa.table({"x": [0]}), folder / "data.parquet")
        raise OSError("disk full")
    assert lake.partition("t", "a") == before
    with pytest.raises(ValueError, match=r"no \*.parquet file was written"), lake.replace("t", "a"):
        pass
    assert lake.read("t", "a").equals(ROWS)


def test_missing_partition_lists_what_exists(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.write("t", "a", ROWS)
    with pytest.raises(ValueError, match="t/z does not exist; partitions: a"):
        lake.read("t", "z")


def test_kill_leaves_the_last_good_partition(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.write("t", "a", ROWS)
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        import pyarrow as pa, pyarrow.parquet as pq
        from feature_repo.lake import Lake
        with Lake(Path({str(tmp_path)!r})).replace("t", "a") as folder:
            pq.write_table(pa.table({{"x": [0]}}), folder / "data.parquet")
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == -signal.SIGKILL
    assert lake.partition("t", "a") == before
    assert lake.read("t", "a").equals(ROWS)
