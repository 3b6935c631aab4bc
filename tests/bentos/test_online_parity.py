"""The server on a real online store: what it reads is what training read, and pushed events count at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bentos.retrieval import features
from bentos.retrieval.features import Job
from bentos.retrieval.schemas import EventIn, RetrieveRequest
from bentos.retrieval.server import RetrievalServer, Settings
from feature_repo import online
from feature_repo.feature_schema import schema_for
from feature_repo.history_bytes import HISTORY_EVENT
from feature_repo.lake import Lake
from feature_repo.training_tables import load_frame, load_history, load_tables
from models.data import FrameData, to_ad_table, to_history, to_user_table
from models.release import promote
from tests.bentos.world import publish_release
from tests.feature_repo.handmade import DAY1, DAY2, DAY3, FACTS
from tests.feature_repo.test_store import fill

SCHEMA = schema_for(FACTS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    lake = fill(folder)
    ads = to_ad_table(vars(load_tables(lake, FACTS, DAY2, DAY2)), SCHEMA)
    release = publish_release(folder, SCHEMA, ads, timezone=FACTS.timezone, as_of=DAY2)
    promote(folder / "releases", release.version, DAY2)
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> RetrievalServer:
    server = RetrievalServer(Settings(home))
    server.load_initial()
    assert server.refusal is None
    return server


def frame_data(home: Path) -> FrameData:
    lake = Lake(home / "lake")
    tables = vars(load_tables(lake, FACTS, DAY2, DAY3))
    history = to_history(vars(load_history(lake, [DAY1, DAY2, DAY3], len(tables["user_id_U"]))))
    return FrameData.from_columns(
        SCHEMA, load_frame(lake, DAY3), to_user_table(tables, SCHEMA), to_ad_table(tables, SCHEMA), history,
        negative_rate=FACTS.negative_rate,
    )  # fmt: skip


def test_layouts_are_the_feature_store_s() -> None:
    assert features.PUSHED_EVENT == online.PUSHED_EVENT
    assert features.EVENT == HISTORY_EVENT


def test_served_features_are_the_trained_ones(home: Path, server: RetrievalServer) -> None:
    """The first request of each user on day 3: nothing was pushed yet, the cut of day 2 is online."""
    assert server.bundle is not None
    data = frame_data(home)
    _, first = np.unique(data.user_code_R.numpy(), return_index=True)
    before = torch.from_numpy(load_frame(Lake(home / "lake"), DAY3)["timestamp_us"][first])
    rows = torch.from_numpy(first)
    rows = rows[data.end_offset_R[rows] > 0]
    jobs = []
    for row, now_us in zip(rows.tolist(), before.tolist(), strict=True):
        user_id = int(data.users.user_id_U[data.user_code_R[row]])
        surface = SCHEMA.surfaces[int(data.surface_R[row])]
        jobs.append(Job(RetrieveRequest(user_id=user_id, surface=surface, timestamp_us=now_us), now_us))
    engine = server.bundle.engine
    served = engine.user_batch(features.to_requests(engine, server.bundle.reader, jobs, "standard"))
    trained = data.user_batch(rows)
    assert served.history.num_rows == trained.history.num_rows >= 4
    for name in ("categorical_BC", "dense_BD", "surface_B", "hour_B"):
        torch.testing.assert_close(getattr(served, name), getattr(trained, name), rtol=0, atol=0)
    for name in ("start_B1", "item_E", "kind_E", "surface_E", "age_E"):
        torch.testing.assert_close(
            getattr(served.history, name), getattr(trained.history, name), rtol=0, atol=0, check_dtype=False
        )
    assert len(served.history.item_E) > 8


def test_pushed_events_change_the_next_answer(home: Path, server: RetrievalServer) -> None:
    data = frame_data(home)
    now_us = int(data.time_us_R[0])
    user_id = int(data.users.user_id_U[0])
    ad_ids = data.ads.ad_id_N.tolist()
    query = RetrieveRequest(user_id=user_id, surface="feed", k=3, tier="exact", timestamp_us=now_us)
    pushed = [EventIn(ad_id=ad, kind="like", surface="feed", timestamp_us=now_us - 10**6) for ad in (*ad_ids[:2], 999)]

    async def scenario() -> None:
        await server.start()
        before = await server.answer(query)
        assert (before.cold, before.release_source) == (False, "pointer")
        assert before.feature_age_s is not None
        assert 0 <= before.feature_age_s <= 86_400
        assert await server.push_events(user_id, pushed) == (2, 1)
        after = await server.answer(query)
        assert after.scores != before.scores
        assert await server.push_events(user_id, pushed) == (2, 1)
        assert (await server.answer(query)).scores == after.scores  # a repeated push adds nothing
        unknown = await server.answer(query.model_copy(update={"user_id": 424_242}))
        assert unknown.cold
        assert unknown.feature_age_s is None
        await server.stop()

    asyncio.run(scenario())


def test_a_release_of_other_features_is_refused(home: Path) -> None:
    other = replace(SCHEMA, history_length=4)
    ads = to_ad_table(vars(load_tables(Lake(home / "lake"), FACTS, DAY2, DAY2)), other)
    release = publish_release(home, other, ads, timezone="UTC", as_of=DAY2)
    server = RetrievalServer(Settings(home))
    with pytest.raises(ValueError, match=f"no feature service retrieval_{other.fingerprint}"):
        asyncio.run(server.activate(release.version))
    assert server.bundle is None
