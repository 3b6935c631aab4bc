"""Where bulk files lie: a local folder, or a prefix of an object store that fsspec opens.

Both offer the same few steps, of which only the last one makes anything visible: fill a local folder, hand it over
under a new name, then write one small manifest. Locally the hand-over is a rename, on an object store an upload;
the manifest is a rename, or a conditional put, so that of two writers exactly one wins and the other one is told.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec

STAGING = ".staging-"
"""Prefix of folders that are being filled, `<prefix><process id>-<unique>`, as `models.staging` sweeps them."""


class Folder(Protocol):
    """A place for files that are named by paths relative to it (`table/key/manifest.json`)."""

    filesystem: Any
    """The fsspec file system; None for a local folder."""

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """An empty local folder, removed at the end of the block."""
        ...

    def read(self, name: str) -> bytes | None:
        """Content of a file, None when there is none."""
        ...

    def tag(self, name: str) -> str | None:
        """What `write` must be given to replace exactly this file; None when there is none."""
        ...

    def write(self, name: str, content: bytes, replaces: str | None) -> None:
        """Write a small file in one step; raises ValueError when it is not the file of tag `replaces` any more."""
        ...

    def hand_over(self, filled: Path, name: str) -> None:
        """Make the files of a local folder those of the folder `name`."""
        ...

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted; hidden ones are left out."""
        ...

    def remove(self, name: str) -> None:
        """Remove a folder and what is in it."""
        ...

    def location(self, name: str) -> str:
        """Path or URL of a file, as DuckDB and Arrow read it."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Make `target` the same file: a hard link where that is possible, else a copy."""
        ...


def open_folder(root: Path | str) -> Folder:
    """A local folder, or for `s3://...` and other URLs a prefix of an object store."""
    return RemoteFolder(str(root)) if "://" in str(root) else LocalFolder(Path(root))


class LocalFolder:
    """A folder of this machine."""

    filesystem: Any = None

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder beside the final ones, so that handing over is a rename."""
        folder = self._unused()
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _unused(self) -> Path:
        return self.root / f"{STAGING}{os.getpid()}-{uuid.uuid4().hex}"

    def read(self, name: str) -> bytes | None:
        """Content of a file, None when there is none."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def tag(self, name: str) -> str | None:
        """None: on one machine the last writer wins, and a run holds the lock of its home."""
        return None

    def write(self, name: str, content: bytes, replaces: str | None) -> None:
        """Write under a temporary name, sync, rename."""
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        with self.staging() as folder:
            temporary = folder / "file"
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.root / name)

    def hand_over(self, filled: Path, name: str) -> None:
        """Rename; a folder of that name is taken to have the same content and stays."""
        final = self.root / name
        final.parent.mkdir(parents=True, exist_ok=True)
        if not final.exists():
            os.replace(filled, final)

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted; hidden ones are left out."""
        folder = self.root / name
        if not folder.is_dir():
            return []
        return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))

    def remove(self, name: str) -> None:
        """Remove a folder: it leaves its place in one step, so that no half of it is ever found there."""
        doomed = self._unused()
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.root / name, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def location(self, name: str) -> str:
        """The path."""
        return str(self.root / name)

    def fetch(self, name: str, target: Path) -> None:
        """Hard link, or a copy where the file system has none."""
        try:
            os.link(self.root / name, target)
        except OSError:
            shutil.copyfile(self.root / name, target)


class RemoteFolder:
    """A prefix of an object store. Credentials and endpoint come from the store's usual environment variables."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.filesystem = open_filesystem(self.url.partition("://")[0])
        self.root: str = self.filesystem._strip_protocol(self.url)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary folder of this machine."""
        with tempfile.TemporaryDirectory(prefix="mirach-staging-") as folder:
            yield Path(folder)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def read(self, name: str) -> bytes | None:
        """Content of an object, None when there is none."""
        try:
            content: bytes = self.filesystem.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def tag(self, name: str) -> str | None:
        """The object's ETag, or its checksum on a store without ETags; None when there is no object."""
        try:
            info = self.filesystem.info(self._path(name))
        except FileNotFoundError:
            return None
        return str(info.get("ETag") or self.filesystem.checksum(self._path(name)))

    def write(self, name: str, content: bytes, replaces: str | None) -> None:
        """A put that succeeds only if the object is still the one of tag `replaces`, or still absent for None.

        Raises:
            ValueError: another writer was faster. Nothing was changed.
        """
        path = self._path(name)
        try:
            if replaces is None:
                self.filesystem.pipe_file(path, content, mode="create")
            elif hasattr(self.filesystem, "call_s3"):
                bucket, key, _ = self.filesystem.split_path(path)
                self.filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=content, IfMatch=replaces)
            elif self.tag(name) != replaces:
                raise FileExistsError(path)
            else:
                self.filesystem.pipe_file(path, content)
        except OSError as error:
            if isinstance(error, FileExistsError) or "PreconditionFailed" in repr(error.__cause__ or error):
                raise ValueError(f"{self.url}/{name}: another writer replaced it meanwhile; run again") from error
            raise

    def hand_over(self, filled: Path, name: str) -> None:
        """Upload every file; nothing names the folder yet, so half an upload is never read."""
        for file in sorted(p for p in filled.rglob("*") if p.is_file()):
            self.filesystem.put_file(str(file), self._path(f"{name}/{file.relative_to(filled)}"))

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        try:
            found = self.filesystem.ls(self._path(name), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")

    def remove(self, name: str) -> None:
        """Delete every object below a name."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self._path(name), recursive=True)

    def location(self, name: str) -> str:
        """The URL."""
        return f"{self.url}/{name}"

    def fetch(self, name: str, target: Path) -> None:
        """Download."""
        self.filesystem.get_file(self._path(name), str(target))


@functools.cache
def open_filesystem(protocol: str) -> Any:
    """The fsspec file system of a protocol, without a cache of listings: other processes write too."""
    return fsspec.filesystem(protocol, **({"use_listings_cache": False} if protocol in ("s3", "s3a") else {}))
