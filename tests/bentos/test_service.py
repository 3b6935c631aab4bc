"""The whole service in process: BentoML's application, the layers around it, and the mounted one."""

from __future__ import annotations

import asyncio
import json
import weakref
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from bentos.retrieval.runtime import Engine, Request
from bentos.retrieval.server import RetrievalServer
from models.artifact import ArtifactStore
from models.release import promote, read_pointer
from monitoring.request_log import read_requests
from tests.bentos.serving import AUTHORIZED, query, run
from tests.bentos.world import NOW_US, WorldReader, add_release
from tests.models.worlds import World


def test_answers_equal_the_engine(home: Path, world: World) -> None:
    pointer = read_pointer(home / "releases")
    assert pointer is not None
    engine = Engine.load(ArtifactStore(home / "artifacts"), pointer.version)

    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        for tier in ("lite", "full", "exact", None):
            body = query() if tier is None else query(tier=tier)
            response = await client.post("/retrieve", json=body)
            assert response.status_code == 200
            answer = response.json()
            user = WorldReader(world).read([10_003], NOW_US)[0]
            expected = engine.retrieve([Request(user, "feed", 5, NOW_US, tier)])[0]
            assert answer["ad_ids"] == expected.ad_ids
            assert answer["scores"] == pytest.approx(expected.scores, rel=1e-5)
            assert answer["release"] == pointer.version
            assert answer["release_source"] == "pointer"
            assert (answer["tier"], answer["cost"]) == (tier or "standard", pytest.approx(expected.cost))
            assert (answer["cold"], answer["feature_age_s"]) == (False, 3600.0)

    run(world, scenario)


def test_cold_inline_and_blocked(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        cold = (await client.post("/retrieve", json=query(user_id=1))).json()
        assert cold["cold"]
        assert cold["feature_age_s"] is None
        assert len(cold["ad_ids"]) == 5
        event = {"ad_id": 50_001, "kind": "like", "surface": "feed", "timestamp_us": NOW_US - 10**6}
        inline = {"surface": "feed", "k": 5, "timestamp_us": NOW_US, "tier": "exact"}
        inline |= {"history": [event], "attributes": {"categorical": {"country": 3}, "dense": {"activity": 1.5}}}
        warm = (await client.post("/retrieve", json=inline)).json()
        assert not warm["cold"]
        assert warm["scores"] != cold["scores"]
        rest = (await client.post("/retrieve", json=inline | {"blocked_ad_ids": warm["ad_ids"][:2], "k": 3})).json()
        assert rest["ad_ids"] == warm["ad_ids"][2:]

    run(world, scenario)


EVENT = {"ad_id": 50_001, "kind": "like", "surface": "feed", "timestamp_us": 1}
BAD_BODIES: list[tuple[str, Any]] = [
    ("user_id", query(user_id="7")),
    ("user_id", query(user_id=True)),
    ("user_id", query(user_id=2**63)),
    ("user_id", {"surface": "feed"}),
    ("user_id", query(history=[])),
    ("surface", query(surface="moon")),
    ("surface", query(surface=7)),
    ("k", query(k=0)),
    ("k", query(k=5000)),
    ("k", query(k=2.5)),
    ("tier", query(tier="huge")),
    ("deadline_ms", query(deadline_ms=0)),
    ("colour", query(colour="red")),
    ("blocked_ad_ids", query(blocked_ad_ids=list(range(2000)))),
    ("eligible_ad_ids", query(eligible_ad_ids=[])),
    ("eligible_ad_ids", query(eligible_ad_ids=[1] * 100_001)),
    ("eligible_ad_ids.1", query(eligible_ad_ids=[1, "2"])),
    ("rank_by", query(rank_by="price")),
    ("rank_by", query(rank_by=None)),
    ("max_per.group", query(max_per={"group": "colour", "limit": 1})),
    ("max_per.limit", query(max_per={"group": "advertiser", "limit": 0})),
    ("max_per.limit", query(max_per={"group": "advertiser"})),
    ("max_per.share", query(max_per={"group": "advertiser", "limit": 1, "share": 0.5})),
    ("max_per", query(max_per="advertiser")),
    ("timestamp_us", query(timestamp_us=-1)),
    ("history", query(user_id=None, history=[EVENT] * 101)),
    ("history.0.kind", query(user_id=None, history=[{"ad_id": 1, "surface": "feed", "timestamp_us": 1}])),
    ("history.kind", query(user_id=None, history=[{"ad_id": 1, "kind": "?", "surface": "feed", "timestamp_us": 1}])),
    ("attributes.dense.activity", '{"surface": "feed", "attributes": {"dense": {"activity": NaN}}}'),
    ("attributes.dense.activity", '{"surface": "feed", "attributes": {"dense": {"activity": 1e400}}}'),
    ("attributes.dense", '{"surface": "feed", "attributes": {"dense": {"activity": 1e300}}}'),
    ("attributes.categorical.planet", {"surface": "feed", "attributes": {"categorical": {"planet": 3}}}),
    ("body", '{"user_id": 7, '),
    ("body", ""),
    ("body", "[1, 2]"),
    ("body", b"\xff\xfe"),
    ("body", "[" * 100_000),
]  # fmt: skip


def test_bad_input_is_a_422_that_names_the_field_and_changes_nothing(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        before = (await client.post("/retrieve", json=query(tier="exact"))).json()
        for field, body in BAD_BODIES:
            content = body if isinstance(body, (str, bytes)) else json.dumps(body)
            response = await client.post("/retrieve", content=content)
            assert response.status_code == 422, (field, response.text)
            assert field in [f["field"] for f in response.json()["fields"]], (field, response.text)
        after = (await client.post("/retrieve", json=query(tier="exact"))).json()
        assert after["ad_ids"] == before["ad_ids"]
        assert (await client.post("/retrieve", data={"user_id": "7"})).status_code == 415
        assert (await client.post("/retrieve", content=b"x" * (5 << 20))).status_code == 413

    run(world, scenario)


def test_batch_fails_one_by_one(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        body = {"requests": [query(), query(k=0), query(user_id=10_004), query(surface="moon"), {}]}
        response = await client.post("/retrieve_batch", json=body)
        assert response.status_code == 200
        results = response.json()["results"]
        assert [r["status"] for r in results] == [200, 422, 200, 422, 422]
        assert results[1]["fields"][0]["field"] == "k"
        alone = (await client.post("/retrieve", json=query(user_id=10_004))).json()
        assert results[2]["answer"]["ad_ids"] == alone["ad_ids"]
        empty = await client.post("/retrieve_batch", json={"requests": []})
        assert (empty.status_code, empty.json()["fields"][0]["field"]) == (422, "requests")

    run(world, scenario)


def test_overload_and_deadline(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        blocked = loop.run_in_executor(
            server._executor, lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        )
        batcher = server.batcher
        object.__setattr__(batcher, "_max_queue", 4)
        first = asyncio.create_task(client.post("/retrieve", json=query(deadline_ms=50)))
        await asyncio.sleep(0.02)
        waiting = [asyncio.create_task(client.post("/retrieve", json=query())) for _ in range(4)]
        await asyncio.sleep(0.02)
        refused = await client.post("/retrieve", json=query())
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await first).status_code == 504
        release.set()
        await blocked
        answers = [(await task).json() for task in waiting]
        # Beyond half of the queue, requests without a tier of their own step down one.
        assert [a["tier"] for a in answers] == ["standard", "standard", "standard", "lite"]
        assert [a["stepped_down"] for a in answers] == [False, False, False, True]

    run(world, scenario)


EXPECTED_COUNTS = {
    'mirach_requests_total{method="POST",route="/retrieve",status="200"}': 1.0,
    'mirach_requests_total{method="POST",route="/retrieve",status="422"}': 1.0,
    'mirach_requests_total{method="POST",route="/v1/releases/{version}/activate",status="401"}': 20.0,
    'mirach_requests_total{method="GET",route="other",status="404"}': 20.0,
    'mirach_answers_total{surface="feed",tier="standard"}': 1.0,
    'mirach_cost_ratio_count{tier="standard"}': 1.0,
    'mirach_batch_size_sum{tier="standard"}': 1.0,
    "mirach_queue_wait_seconds_count": 1.0,
    "mirach_feature_age_seconds_count": 1.0,
    "mirach_empty_answers_total": 0.0,
}


def counts(text: str) -> dict[str, float]:
    """Series -> value of an exposition text."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_health_metrics_and_documents(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        ready = await client.get("/readyz")
        assert ready.status_code == 200
        assert server.bundle is not None
        assert ready.json()["release"] == server.bundle.engine.release
        assert ready.json()["release_source"] == "pointer"
        assert (await client.get("/livez")).status_code == 200
        before = counts((await client.get("/metrics")).text)
        await client.post("/retrieve", json=query())
        await client.post("/retrieve", json=query(k=0))
        for scanned in range(20):
            await client.get(f"/scan/{scanned}")
            await client.post(f"/v1/releases/{scanned}/activate")
        after = counts((await client.get("/metrics")).text)
        assert {name: after[name] - before.get(name, 0.0) for name in EXPECTED_COUNTS} == EXPECTED_COUNTS
        assert 'mirach_request_seconds_bucket{le="0.001",route="/retrieve"}' in after
        assert not [name for name in after if "scan" in name]
        assert (await client.get("/docs.json")).json()["paths"]["/retrieve"]
        document = (await client.get("/v1/openapi.json")).json()
        assert document["servers"] == [{"url": "/v1"}]
        assert set(document["paths"]) == {
            "/events",
            "/explain",
            "/releases",
            "/releases/{version}/activate",
            "/rollback",
        }

    run(world, scenario)


def test_releases_swap_roll_back_and_refuse(home: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    second = add_release(home, world, seed=1, as_of="2026-01-04")
    damaged = add_release(home, world, seed=2)
    (damaged.path / "ads.safetensors").write_bytes(b"damage")

    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        first = (await client.get("/readyz")).json()["release"]
        assert server.bundle is not None
        old = weakref.ref(server.bundle.engine)
        assert (await client.get("/v1/releases")).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert (await client.post(f"/v1/releases/{second.version}/activate", headers=wrong)).status_code == 401
        info = (await client.get("/v1/releases", headers=AUTHORIZED)).json()
        assert (info["active"], info["source"], info["previous"]) == (first, "pointer", None)
        assert set(info["versions"]) == {first, second.version, damaged.version}

        async def retrieve_all_the_while() -> list[dict[str, Any]]:
            return [(await client.post("/retrieve", json=query(tier="exact"))).json() for _ in range(100)]

        traffic = asyncio.create_task(retrieve_all_the_while())
        activated = await client.post(f"/v1/releases/{second.version}/activate", headers=AUTHORIZED)
        assert activated.json()["active"] == second.version
        answers = await traffic
        assert {a["release"] for a in answers} == {first, second.version}
        assert old() is None  # the memory of the old release is free again
        for version in (first, second.version):
            assert len({tuple(a["ad_ids"]) for a in answers if a["release"] == version}) == 1
        assert (await client.post("/v1/releases/none/activate", headers=AUTHORIZED)).status_code == 404
        refused = await client.post(f"/v1/releases/{damaged.version}/activate", headers=AUTHORIZED)
        assert refused.status_code == 409
        assert "ads.safetensors does not match its checksum" in refused.json()["detail"]
        assert (await client.get("/readyz")).json()["release"] == second.version
        back = await client.post("/v1/rollback", headers=AUTHORIZED)
        assert (back.json()["active"], back.json()["previous"]) == (first, second.version)
        server.settings = replace(server.settings, token="")
        assert (await client.get("/v1/releases", headers=AUTHORIZED)).status_code == 403

    run(world, scenario)


def test_the_pointer_is_followed(home: Path, world: World) -> None:
    second = add_release(home, world, seed=1)

    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        server.settings = replace(server.settings, poll_s=0.02)
        await asyncio.sleep(1.1)
        promote(home / "releases", second.version, "2026-01-04")
        for _ in range(100):
            if (await client.get("/readyz")).json()["release"] == second.version:
                break
            await asyncio.sleep(0.05)
        assert (await client.post("/retrieve", json=query())).json()["release"] == second.version
        (home / "releases" / "current.json").write_text("{")
        for _ in range(100):
            if (await client.get("/readyz")).json()["refusal"]:
                break
            await asyncio.sleep(0.05)
        assert "not a release pointer" in (await client.get("/readyz")).json()["refusal"]
        assert (await client.post("/retrieve", json=query())).json()["release"] == second.version

    run(world, scenario)


def test_events_reach_the_next_retrieval(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        before = (await client.post("/retrieve", json=query(tier="exact"))).json()
        event = {"kind": "click", "surface": "feed", "timestamp_us": NOW_US - 5_000_000}
        events = [{**event, "ad_id": 50_010 + i} for i in range(5)] + [{**event, "ad_id": 1}]
        pushed = await client.post("/v1/events", json={"user_id": 10_003, "events": events})
        assert pushed.json() == {"accepted": 5, "unknown_ads": 1}
        after = (await client.post("/retrieve", json=query(tier="exact"))).json()
        assert after["scores"] != before["scores"]
        bad = await client.post("/v1/events", json={"user_id": 10_003, "events": [{**event, "ad_id": 5, "kind": "?"}]})
        assert (bad.status_code, bad.json()["fields"][0]["field"]) == (422, "events.kind")
        bad = await client.post("/v1/events", json={"user_id": "x", "events": []})
        assert (bad.status_code, bad.json()["fields"][0]["field"]) == (422, "user_id")
        nan = '{"user_id": NaN, "events": []}'
        bad = await client.post("/v1/events", content=nan, headers={"content-type": "application/json"})
        assert bad.status_code == 422

    run(world, scenario)


def test_without_any_release_it_lives_but_is_not_ready(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRACH_HOME", str(tmp_path))

    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        refused = await client.post("/retrieve", json=query())
        assert refused.status_code == 503
        assert "no release is promoted" in refused.json()["error"]
        assert (await client.post("/v1/events", json={"user_id": 1, "events": []})).status_code == 422

    run(None, scenario)


def test_every_answer_is_in_the_log_after_a_clean_stop(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        server.settings = replace(server.settings, feature_share=1.0)
        for i in range(20):
            await client.post("/retrieve", json=query(request_id=i, user_id=10_000 + i))
        await client.post("/retrieve", json=query(k=0))

    run(world, scenario)
    now = datetime.fromtimestamp(NOW_US / 1e6, UTC)
    log = read_requests(home / "logs" / "requests", now, now + timedelta(hours=1))
    assert (log.num_broken, log.bad_files) == (0, {})
    assert log.rows.column("request_id").to_pylist() == list(range(20))
    assert log.rows.column("user_id").to_pylist() == [10_000 + i for i in range(20)]
    row = log.rows.to_pylist()[3]
    user = WorldReader(world).read([10_003], NOW_US)[0]
    assert row["categorical"] == user.categorical.tolist()
    assert row["history"] == user.history.tobytes()
    assert len(row["ad_ids"]) == len(row["scores"]) == 5
