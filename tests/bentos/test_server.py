from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bentos.retrieval.release import copy_release
from bentos.retrieval.schemas import RetrieveRequest
from bentos.retrieval.server import NotReadyError, RetrievalServer, Settings
from models.artifact import Artifact, ArtifactStore
from models.release import promote
from tests.bentos.world import NOW_US, add_release
from tests.models.worlds import World

QUERY = RetrieveRequest(user_id=1, surface="feed", k=3, timestamp_us=NOW_US)


@pytest.fixture
def bento_copy(tmp_path: Path, shared_home: Path, release: Artifact) -> Path:
    folder = tmp_path / "bento" / "release"
    copy_release(ArtifactStore(shared_home / "artifacts"), release.version, folder)
    (folder / "release.json").write_text(json.dumps({"version": release.version}))
    return folder


def test_the_bento_s_copy_serves_until_a_pointer_can_be_loaded(
    tmp_path: Path, bento_copy: Path, release: Artifact, world: World
) -> None:
    home = tmp_path / "home"
    promote(home / "releases", "gone", "2026-01-02")
    server = RetrievalServer(Settings(home, bento_copy=bento_copy, poll_s=0.02))
    server.load_initial()
    assert "release/gone does not exist" in str(server.pointer_error)

    async def scenario() -> None:
        await server.start()
        answer = await server.answer(QUERY)
        assert (answer.release, answer.release_source) == (release.version, "bento")
        promoted = add_release(home, world, seed=5)
        promote(home / "releases", promoted.version, "2026-01-05")
        for _ in range(200):
            if server.status()["release"] == promoted.version:
                break
            await asyncio.sleep(0.02)
        answer = await server.answer(QUERY)
        assert (answer.release, answer.release_source) == (promoted.version, "pointer")
        assert server.pointer_error is None
        await server.stop()

    asyncio.run(scenario())


def test_a_candidate_ignores_the_pointer(tmp_path: Path, bento_copy: Path, release: Artifact, world: World) -> None:
    home = tmp_path / "home"
    promote(home / "releases", add_release(home, world, seed=5).version, "2026-01-02")
    server = RetrievalServer(Settings(home, bento_copy=bento_copy, follow_pointer=False))
    server.load_initial()
    assert server.status()["release"] == release.version
    followed = RetrievalServer(replace(server.settings, follow_pointer=True))
    followed.load_initial()
    assert followed.status()["release"] != release.version


def test_nothing_to_serve(tmp_path: Path) -> None:
    server = RetrievalServer(Settings(tmp_path))
    server.load_initial()
    assert server.status() == {"ready": False, "pointer_error": None}

    async def scenario() -> None:
        await server.start()
        with pytest.raises(NotReadyError, match="no release is promoted"):
            await server.answer(QUERY)
        with pytest.raises(NotReadyError, match="no release or no online store"):
            await server.push_events(1, [])
        with pytest.raises(ValueError, match="no previous release"):
            await server.roll_back()
        await server.stop()

    asyncio.run(scenario())
