"""Folders for bulk files: what a fetch finds in its way, and errors of an object store that are no lost race."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_repo.files import LocalFolder, RemoteFolder, open_folder
from tests.objects import bucket, s3_server

__all__ = ["bucket", "s3_server"]


def test_a_fetched_file_is_a_link_or_a_copy_where_none_can_be_made(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "lake")
    assert isinstance(folder, LocalFolder)
    folder.write("t/a.bin", b"content", None)
    folder.fetch("t/a.bin", tmp_path / "linked")
    assert (tmp_path / "linked").samefile(tmp_path / "lake" / "t" / "a.bin")
    (tmp_path / "taken").write_bytes(b"something longer")
    folder.fetch("t/a.bin", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"content"
    assert not (tmp_path / "taken").samefile(tmp_path / "lake" / "t" / "a.bin")


def test_only_a_lost_race_is_told_as_one(bucket: str) -> None:
    nowhere = RemoteFolder("s3://no-such-bucket/lake")
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        nowhere.write("t/manifest.json", b"{}", None)
    folder = RemoteFolder(f"{bucket}/lake")
    folder.write("t/manifest.json", b"{}", None)
    with pytest.raises(ValueError, match=r"/lake/t/manifest\.json: another writer replaced it meanwhile; run again"):
        folder.write("t/manifest.json", b"{1}", None)
    assert folder.read("t/manifest.json") == b"{}"
