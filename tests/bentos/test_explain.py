"""`/v1/explain` names the ads that `/retrieve` answers, and the way there; it changes nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from bentos.retrieval.request_log import SCHEMA
from bentos.retrieval.runtime import Engine, Request
from bentos.retrieval.server import MAX_EXPLAINING, RetrievalServer
from monitoring.request_log import read_requests
from tests.bentos.serving import query, run
from tests.bentos.world import NOW_US, WorldReader
from tests.models.worlds import World

EVENT = {"ad_id": 50_001, "kind": "like", "surface": "feed", "timestamp_us": NOW_US - 10**6}
QUERIES: list[dict[str, Any]] = [
    query(),
    query(tier="lite", k=100, user_id=10_007),
    query(user_id=1),
    query(user_id=None, history=[EVENT], attributes={"categorical": {"country": 3}}),
    query(tier="full", k=20, rank_by="value", blocked_ad_ids=list(range(50_000, 50_020))),
    query(k=8, eligible_ad_ids=list(range(50_010, 50_040)), max_per={"group": "topic", "limit": 1}),
]


def test_explanations_name_what_is_answered(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        assert server.bundle is not None
        index, tiers = server.bundle.engine.index, server.bundle.engine.config.tiers
        for body in QUERIES:
            answer = (await client.post("/retrieve", json=body)).json()
            response = await client.post("/v1/explain", json=body)
            assert response.status_code == 200, response.text
            found = response.json()
            assert [ad["ad_id"] for ad in found["ads"]] == answer["ad_ids"] != []
            assert [ad["score"] for ad in found["ads"]] == pytest.approx(answer["scores"], rel=1e-5, abs=1e-6)
            shared = ("release", "release_source", "tier", "cost", "nodes_scored", "ads_scored", "cold")
            assert {name: found[name] for name in shared} == {name: answer[name] for name in shared}
            beams = [[node["node"] for node in level] for level in found["levels"]]
            assert [len(nodes) for nodes in beams] <= list(tiers[answer["tier"]].beams)
            for ad in found["ads"]:
                assert len(ad["path"]) == len(index.levels)
                assert (ad["source"], ad["path"][-1] in beams[-1]) == ("beam", True)
            for nodes, level in zip(found["levels"], index.levels, strict=True):
                assert [node["place"] for node in nodes] == list(range(len(nodes)))
                for node in nodes:
                    assert node["num_ads"] == int((level.node_S == node["node"]).sum())
                    assert set(node["values"]) == {"topic", "advertiser"}
                    assert all(0.0 < value["share"] <= 1.0 for value in node["values"]["topic"])
                    code = server.bundle.engine.code_of([node["representative_ad_id"]])
                    assert int(level.node_N[int(code[0])]) == node["node"]

    run(world, scenario)


def test_bad_input_names_the_field(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        for field, body in (
            ("tier", query(tier="exact")),
            ("tier", query(tier="huge")),
            ("k", query(k=101)),
            ("user_id", {"surface": "feed"}),
            ("max_per.group", query(max_per={"group": "colour", "limit": 1})),
            ("eligible_ad_ids", query(eligible_ad_ids=[])),
            ("colour", query(colour="red")),
        ):
            response = await client.post("/v1/explain", json=body)
            assert response.status_code == 422, (field, response.text)
            assert field in [f["field"] for f in response.json()["fields"]], (field, response.text)

    run(world, scenario)


def test_the_log_holds_retrievals_and_how_they_were_ranked(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        for number, body in enumerate(QUERIES):
            await client.post("/v1/explain", json=body | {"request_id": 100 + number})
            await client.post("/retrieve", json=body | {"request_id": number})

    run(world, scenario)
    now = datetime.fromtimestamp(NOW_US / 1e6, UTC)
    rows = read_requests(home / "logs" / "requests", now, now + timedelta(hours=1)).rows
    assert rows.schema == SCHEMA
    assert rows["request_id"].to_pylist() == list(range(len(QUERIES)))
    assert rows["rank_by"].to_pylist() == ["score"] * 4 + ["value", "score"]
    assert rows["restricted"].to_pylist() == [False] * 4 + [True, True]


def test_explanations_wait_for_the_slot_in_a_bounded_queue(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        done = threading.Event()
        server._executor.submit(done.wait, 10)
        late = asyncio.create_task(client.post("/v1/explain", json=query(deadline_ms=50)))
        await asyncio.sleep(0.02)
        waiting = [asyncio.create_task(client.post("/v1/explain", json=query())) for _ in range(MAX_EXPLAINING)]
        await asyncio.sleep(0.05)
        refused = await client.post("/v1/explain", json=query())
        assert (refused.status_code, refused.json()) == (503, {"error": "overloaded"})
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await client.get("/readyz")).status_code == 200  # the loop is free all the while
        assert (await late).status_code == 504
        done.set()
        assert {(await task).status_code for task in waiting} == {200}

    run(world, scenario)


def test_the_engine_explains_no_scan(engine: Engine, world: World) -> None:
    request = Request(WorldReader(world).read([10_003], NOW_US)[0], "feed", 5, NOW_US)
    with pytest.raises(ValueError, match="tier: 'exact' scans every ad"):
        engine.explain(replace(request, tier="exact"))
