"""The whole service in process, and a client of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from bentos.retrieval.server import RetrievalServer
from tests.bentos.world import NOW_US, WorldReader
from tests.models.worlds import World

TOKEN = "secret"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def serving(world: World | None) -> AsyncIterator[tuple[httpx.AsyncClient, RetrievalServer]]:
    from bentos.retrieval.service import Retrieval, current_server

    app = Retrieval.to_asgi(is_main=True)  # type: ignore[attr-defined]
    thresholds = gc.get_threshold()
    async with app.router.lifespan_context(app.app):
        server = current_server()
        if world is not None:
            assert server.bundle is not None
            server.bundle = replace(server.bundle, reader=WorldReader(world))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield client, server
    gc.unfreeze()
    gc.set_threshold(*thresholds)


Scenario = Callable[[httpx.AsyncClient, RetrievalServer], Awaitable[None]]


def run(world: World | None, scenario: Scenario) -> None:
    async def go() -> None:
        async with serving(world) as (client, server):
            await scenario(client, server)

    asyncio.run(go())


def query(**change: Any) -> dict[str, Any]:
    return {"user_id": 10_003, "surface": "feed", "k": 5, "timestamp_us": NOW_US} | change
