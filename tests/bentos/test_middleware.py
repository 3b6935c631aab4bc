from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from bentos.retrieval.middleware import App, CancellingTimeout, Front, Gate


async def echo(request: Request) -> Response:
    return JSONResponse({"length": len(await request.body())})


async def slow(_request: Request) -> Response:
    await asyncio.sleep(10)
    return Response("late")


def application() -> Starlette:
    routes = [
        Route("/echo", echo, methods=["GET", "POST"]),
        Route("/slow", slow),
        Mount("/v1", routes=[Route("/ads/{ad_id}", echo)]),
    ]
    return Starlette(routes=routes)


def call(app: App, method: str, path: str, **options: object) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)  # type: ignore[arg-type]

    return asyncio.run(go())


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 100


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"json": {"a": 1}}, 200),
        ({"content": b"[]"}, 200),
        ({"content": b"x" * 2000}, 413),
        ({"content": chunks(5)}, 200),
        ({"content": chunks(20)}, 413),
        ({"content": b"{}", "headers": {"content-type": "application/vnd.bentoml+pickle"}}, 415),
        ({"data": {"user_id": "1"}}, 415),
        ({"content": b"{}", "headers": {"content-type": "application/json; charset=utf-8"}}, 200),
        ({"content": b"{}", "headers": {"content-length": "many"}}, 400),
    ],
)
def test_gate(options: dict[str, object], status: int) -> None:
    assert call(Gate(application(), max_bytes=1000), "POST", "/echo", **options).status_code == status


def test_gate_hands_the_body_on_and_leaves_get_alone() -> None:
    gate = Gate(application(), max_bytes=1000)
    assert call(gate, "POST", "/echo", content=chunks(3)).json() == {"length": 300}
    assert call(gate, "GET", "/echo", headers={"content-type": "text/plain"}).status_code == 200


def test_timeout_answers_504_and_passes_quick_ones() -> None:
    assert call(CancellingTimeout(application(), timeout=0.05), "GET", "/slow").status_code == 504
    assert call(CancellingTimeout(application(), timeout=5), "GET", "/echo").status_code == 200


def test_timeout_keeps_nothing_alive() -> None:
    app = CancellingTimeout(application(), timeout=60)

    async def many(client: httpx.AsyncClient, count: int) -> int:
        for _ in range(count):
            await client.get("/echo")
        gc.collect()
        return len(gc.get_objects())

    async def scenario() -> int:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            before = await many(client, 50)
            return await many(client, 500) - before

    assert asyncio.run(scenario()) < 500  # BentoML's own keeps about 25 objects a request


def test_front_answers_hot_routes_and_counts_by_template() -> None:
    seen: list[tuple[str, str, int]] = []

    async def hot(body: bytes) -> Response:
        return JSONResponse({"hot": len(body)})

    front = Front(application(), {("POST", "/hot"): hot}, lambda r, m, s, _: seen.append((r, m, s)), max_bytes=1000)
    assert call(front, "POST", "/hot", content=b"abc").json() == {"hot": 3}
    assert call(front, "POST", "/hot", content=b"x" * 2000).status_code == 413
    assert call(front, "POST", "/hot", data={"a": "b"}).status_code == 415
    assert call(front, "GET", "/hot").status_code == 404
    assert call(front, "GET", "/v1/ads/77").status_code == 200
    assert call(front, "GET", "/scanner/77").status_code == 404
    assert seen == [
        ("/hot", "POST", 200), ("/hot", "POST", 413), ("/hot", "POST", 415), ("other", "GET", 404),
        ("/v1/ads/{ad_id}", "GET", 200), ("other", "GET", 404),
    ]  # fmt: skip
