from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bentos.retrieval.release import copy_release
from bentos.retrieval.runtime import InlineUser
from bentos.retrieval.schemas import RetrieveRequest
from bentos.retrieval.server import Clock, NotReadyError, RetrievalServer, Settings
from bentos.serve import command as serve_command
from models.artifact import Artifact, ArtifactStore
from models.release import promote
from tests.bentos.world import NOW_US, WorldReader, add_release
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
    assert "release/gone does not exist" in str(server.refusal)

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
        assert server.refusal is None
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
    assert server.status() == {"ready": False, "refusal": None}

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


def test_a_damaged_copy_lives_and_says_why_it_is_not_ready(tmp_path: Path, bento_copy: Path, release: Artifact) -> None:
    (bento_copy / "release" / release.version / "ads.safetensors").write_bytes(b"damage")
    server = RetrievalServer(Settings(tmp_path / "home", bento_copy=bento_copy))
    server.load_initial()
    assert server.bundle is None
    assert "ads.safetensors does not match its checksum" in server.status()["refusal"]


@pytest.mark.parametrize(("clock", "near_the_cut"), [("log", True), ("wall", False)])
def test_the_clock_of_a_replayed_log_starts_at_its_cut(
    tmp_path: Path, bento_copy: Path, world: World, monkeypatch: pytest.MonkeyPatch, clock: Clock, near_the_cut: bool
) -> None:
    seen: list[int] = []

    class Reader(WorldReader):
        def read(self, user_ids: Sequence[int], now_us: int) -> list[InlineUser]:
            seen.append(now_us)
            return super().read(user_ids, now_us)

    server = RetrievalServer(Settings(tmp_path / "home", bento_copy=bento_copy, clock=clock, follow_pointer=False))
    monkeypatch.setattr(server, "_reader_for", lambda engine: Reader(world))
    server.load_initial()

    async def scenario() -> None:
        await server.start()
        await server.answer(RetrieveRequest(user_id=1, surface="feed", k=3))
        await server.stop()

    asyncio.run(scenario())
    assert (0 <= seen[-1] - NOW_US < 600_000_000) == near_the_cut


def test_serving_an_empty_home_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no release is promoted; `make run`"):
        serve_command(tmp_path, 3001)
