from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from bentos.retrieval.runtime import Engine
from models.artifact import Artifact, ArtifactStore
from models.release import promote
from tests.bentos.serving import TOKEN
from tests.bentos.world import add_release, small_world
from tests.models.worlds import World

torch.set_num_threads(1)
os.environ.setdefault("BENTOML_HOME", tempfile.mkdtemp(prefix="bentoml-home-"))
os.environ.setdefault("BENTOML_DO_NOT_TRACK", "True")


@pytest.fixture(scope="session")
def world() -> World:
    return small_world()


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def release(shared_home: Path, world: World) -> Artifact:
    return add_release(shared_home, world)


@pytest.fixture(scope="session")
def engine(shared_home: Path, release: Artifact) -> Engine:
    return Engine.load(ArtifactStore(shared_home / "artifacts"), release.version)


@pytest.fixture
def home(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRACH_HOME", str(tmp_path))
    monkeypatch.setenv("MIRACH_TOKEN", TOKEN)
    release = add_release(tmp_path, world)
    promote(tmp_path / "releases", release.version, "2026-01-03")
    return tmp_path
