"""Half-done work has one kind of name, so that what a killed process left can be told from what is being written.

Everything is filled below `.staging-<process id>-<unique>` and renamed when it is whole. `sweep` removes the staging
files and folders of processes that are gone; it belongs to whoever holds the lock of a home on its one machine.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STAGING = ".staging-"


def unused(parent: Path) -> Path:
    """A name in a folder that nothing has."""
    return parent / f"{STAGING}{os.getpid()}-{uuid.uuid4().hex}"


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """An empty folder inside `parent`, removed at the end of the block unless it was renamed."""
    folder = unused(parent)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a staging name, sync it, and rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unused(path.parent)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sweep(root: Path) -> int:
    """Remove what processes that are gone were filling anywhere below `root`; how many files and folders that were."""
    num_removed = 0
    for folder, folders, files in os.walk(root):
        for name in [n for n in (*folders, *files) if n.startswith(STAGING)]:
            if _alive(int(name.removeprefix(STAGING).partition("-")[0])):
                continue
            path = Path(folder) / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            num_removed += 1
        folders[:] = [n for n in folders if not n.startswith(STAGING)]
    return num_removed


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
