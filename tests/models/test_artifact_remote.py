"""Artefacts with a copy in an object store: manifest last, fetched and verified where they are missing."""

import json
from pathlib import Path

import pytest

from feature_repo.files import RemoteFolder
from models.artifact import MANIFEST, Artifact, ArtifactStore
from tests.models.test_artifact import SCHEMA
from tests.objects import bucket, s3_server

__all__ = ["bucket", "s3_server"]


def store(root: Path, bucket: str) -> ArtifactStore:
    return ArtifactStore(root, RemoteFolder(f"{bucket}/artifacts"))


def made(store: ArtifactStore, content: str = "weights") -> Artifact:
    with store.create("model", schema=SCHEMA, code_version="1") as draft:
        (draft.path / "weights.bin").write_text(content)
        draft.metrics = {"auc": 0.5}
    assert draft.result is not None
    return draft.result


def test_another_machine_fetches_what_it_lacks(tmp_path: Path, bucket: str) -> None:
    here, there = store(tmp_path / "here", bucket), store(tmp_path / "there", bucket)
    artifact = made(here)
    assert there.versions("model") == [artifact.version]
    fetched = there.open("model", artifact.version, schema=SCHEMA)
    assert fetched.manifest == artifact.manifest
    assert fetched.file("weights.bin").read_text() == "weights"
    assert there.versions("model") == here.versions("model") == [artifact.version]


def test_a_damaged_copy_is_refused(tmp_path: Path, bucket: str) -> None:
    artifact = made(store(tmp_path / "here", bucket))
    there = store(tmp_path / "there", bucket)
    path = there.remote.root + f"/model/{artifact.version}/weights.bin"  # type: ignore[union-attr]
    there.remote.filesystem.pipe_file(path, b"damaged")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"weights\.bin does not match its checksum"):
        there.open("model", artifact.version)


def test_an_upload_without_its_manifest_is_not_there_and_is_finished_later(tmp_path: Path, bucket: str) -> None:
    here, there = store(tmp_path / "here", bucket), store(tmp_path / "there", bucket)
    artifact = made(here)
    here.remote.filesystem.rm(f"{here.remote.root}/model/{artifact.version}/{MANIFEST}")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="does not exist below"):
        there.open("model", artifact.version)
    assert made(here).version == artifact.version
    assert there.open("model", artifact.version).manifest == artifact.manifest


def test_two_machines_that_make_the_same_agree(tmp_path: Path, bucket: str) -> None:
    first, second = (made(store(tmp_path / name, bucket)) for name in ("a", "b"))
    assert first.version == second.version
    stored = RemoteFolder(f"{bucket}/artifacts").read(f"model/{first.version}/{MANIFEST}")
    assert json.loads(stored or b"")["files"] == first.manifest.files


def test_the_slower_of_two_writers_of_the_same_accepts_what_is_there(tmp_path: Path, bucket: str) -> None:
    class Late(RemoteFolder):
        """Answers the first look as if the other writer had not finished yet."""

        looked = False

        def read(self, name: str) -> bytes | None:
            if not self.looked:
                self.looked = True
                return None
            return super().read(name)

    made(store(tmp_path / "fast", bucket))
    late = ArtifactStore(tmp_path / "late", Late(f"{bucket}/artifacts"))
    assert made(late).version in late.versions("model")


def test_a_lost_race_whose_winner_has_gone_is_an_error(tmp_path: Path, bucket: str) -> None:
    class Cleaned(RemoteFolder):
        """Another writer creates each object first, and removes it before anyone looks."""

        def write(self, name: str, content: bytes, replaces: str | None) -> None:
            super().write(name, content, None)
            try:
                super().write(name, content, replaces)
            finally:
                self.filesystem.rm(f"{self.root}/{name}")

    with pytest.raises(ValueError, match=rf"{MANIFEST}: another writer replaced it meanwhile; run again"):
        made(ArtifactStore(tmp_path / "here", Cleaned(f"{bucket}/artifacts")))
    assert RemoteFolder(f"{bucket}/artifacts").folders("model") != [], "the files are there, without a manifest"
    with pytest.raises(ValueError, match="does not exist below"):
        store(tmp_path / "there", bucket).open("model", ArtifactStore(tmp_path / "here").versions("model")[0])
