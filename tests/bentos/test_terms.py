"""The terms of requests reach the search: answers equal their definition, however requests are mixed in a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bentos.retrieval.release import Tier
from bentos.retrieval.runtime import Answer, Engine, Request
from bentos.retrieval.schemas import MAX_ELIGIBLE
from bentos.retrieval.server import RetrievalServer
from models.index.terms import Cap
from models.release import promote
from tests.bentos.serving import query, run
from tests.bentos.world import NOW_US, WorldReader, add_release
from tests.models.worlds import World

FIRST_AD = 50_000
WIDE = Tier((99, 99))


def with_wide_tier(engine: Engine, **changed: torch.Tensor) -> Engine:
    """The engine with a tier whose beam holds every node, and perhaps with other columns of ads."""
    config = replace(engine.config, tiers={**engine.config.tiers, "wide": WIDE})
    return Engine(engine.release, config, engine.schema, engine.model, engine.index, replace(engine.ads, **changed))


def base_request(world: World, user: int) -> Request:
    return Request(WorldReader(world).read([10_000 + user], NOW_US)[0], ("feed", "stories")[user % 2], 10, NOW_US)


def by_definition(engine: Engine, request: Request) -> list[tuple[int, float]]:
    """Ads and values: one after the other by falling value, while eligible and under the cap."""
    plain = replace(request, k=engine.num_ads, blocked=frozenset(), eligible=None, rank_by="score", cap=None)
    (scan,) = engine.exact([plain])
    value_K = torch.tensor(scan.scores)
    code_K = torch.from_numpy(engine.code_of(scan.ad_ids))
    if request.rank_by == "value":
        value_K = functional.logsigmoid(value_K) + engine.ads.bid_N[code_K].double().log().float()
    found: list[tuple[int, float]] = []
    taken: dict[int, int] = {}
    ranked = sorted(zip(value_K.tolist(), scan.ad_ids, code_K.tolist(), strict=True), key=lambda r: (-r[0], r[1]))
    for value, ad_id, code in ranked:
        of = int(engine.ads.group_NG[code, request.cap.group]) if request.cap else 0
        out = ad_id in request.blocked or (request.eligible is not None and ad_id not in request.eligible)
        full = request.cap is not None and of > 0 and taken.get(of, 0) >= request.cap.limit
        if out or full or value == float("-inf"):
            continue
        taken[of] = taken.get(of, 0) + 1
        found.append((ad_id, value))
    return found[: request.k]


def pairs(answers: Iterable[Answer]) -> list[list[tuple[int, float]]]:
    return [list(zip(a.ad_ids, a.scores, strict=True)) for a in answers]


ids = st.integers(FIRST_AD - 2, FIRST_AD + 95)  # the first and last few are unknown
terms = st.fixed_dictionaries(
    {
        "k": st.sampled_from([1, 5, 200]),
        "tier": st.sampled_from(["wide", "exact"]),
        "blocked": st.frozensets(ids, max_size=30),
        "eligible": st.none() | st.lists(ids, min_size=1, max_size=60).map(tuple),
        "rank_by": st.sampled_from(["score", "value"]),
        "cap": st.none() | st.builds(Cap, st.integers(0, 1), st.integers(1, 3)),
    }
)


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(terms, min_size=1, max_size=6))
def test_answers_to_mixed_requests_are_those_of_the_definition(
    engine: Engine, world: World, drawn: list[dict[str, object]]
) -> None:
    everything = with_wide_tier(engine)
    requests = [replace(base_request(world, i), **change) for i, change in enumerate(drawn)]  # type: ignore[arg-type]
    found, exact = pairs(everything.retrieve(requests)), pairs(everything.exact(requests))
    for request, ads, scanned in zip(requests, found, exact, strict=True):
        wanted = by_definition(everything, request)
        assert [ad for ad, _ in ads] == [ad for ad, _ in wanted]
        assert [ad for ad, _ in scanned] == [ad for ad, _ in wanted]
        assert [value for _, value in ads] == pytest.approx([value for _, value in wanted], rel=1e-5, abs=1e-6)


def test_a_narrow_tier_keeps_the_terms(engine: Engine, world: World) -> None:
    eligible = tuple(range(FIRST_AD, FIRST_AD + 60))
    request = replace(
        base_request(world, 1), k=20, tier="lite", eligible=eligible, blocked=frozenset(eligible[:5]),
        rank_by="value", cap=Cap(0, 2),
    )  # fmt: skip
    (answer,) = engine.retrieve([request])
    assert answer.ad_ids
    assert set(answer.ad_ids) <= set(eligible[5:])
    code_K = torch.from_numpy(engine.code_of(answer.ad_ids))
    assert bool((engine.ads.bid_N[code_K] > 0.0).all())
    assert int(torch.bincount(engine.ads.group_NG[code_K, 0])[1:].max()) <= 2
    assert answer.scores == sorted(answer.scores, reverse=True)


def test_without_any_bid_value_is_refused_and_scores_go_on(engine: Engine, world: World) -> None:
    free = with_wide_tier(engine, bid_N=torch.zeros(engine.num_ads))
    assert not free.has_bids
    with pytest.raises(ValueError, match="rank_by: no live ad of the release has a positive bid"):
        free.retrieve([replace(base_request(world, 1), rank_by="value")])
    request = base_request(world, 1)
    assert pairs(free.exact([request])) == pairs(engine.exact([request]))


def test_a_wrong_bid_is_refused_when_the_release_is_loaded(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"bid: -1\.0 of ad 50003 is not"):
        with_wide_tier(engine, bid_N=engine.ads.bid_N.index_fill(0, torch.tensor(3), -1.0))


def test_terms_of_requests_reach_the_engine(home: Path, world: World) -> None:
    eligible = list(range(FIRST_AD, FIRST_AD + 40))
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"eligible_ad_ids": [1, *eligible], "blocked_ad_ids": eligible[:3]},
         {"eligible": eligible, "blocked": frozenset(eligible[:3])}),
        ({"rank_by": "value"}, {"rank_by": "value"}),
        ({"max_per": {"group": "advertiser", "limit": 1}}, {"cap": Cap(1, 1)}),
        ({"rank_by": "value", "max_per": {"group": "topic", "limit": 2}}, {"rank_by": "value", "cap": Cap(0, 2)}),
        ({}, {}),
    ]  # fmt: skip

    async def scenario(client: httpx.AsyncClient, server: RetrievalServer) -> None:
        assert server.bundle is not None
        bodies = [query(k=30, tier="exact", user_id=10_002, **fields) for fields, _ in cases]
        wanted = [
            by_definition(server.bundle.engine, replace(base_request(world, 2), k=30, **change)) for _, change in cases
        ]
        alone = [(await client.post("/retrieve", json=body)).json() for body in bodies]
        batch = (await client.post("/retrieve_batch", json={"requests": bodies})).json()["results"]
        assert len({str(ads) for ads in wanted}) == len(cases)
        for answers in (alone, [result["answer"] for result in batch]):
            assert [a["ad_ids"] for a in answers] == [[ad for ad, _ in ads] for ads in wanted]
            for answer, ads in zip(answers, wanted, strict=True):
                assert answer["scores"] == pytest.approx([value for _, value in ads], rel=1e-5, abs=1e-6)

    run(world, scenario)


def test_the_longest_list_of_eligible_ads_fits_and_unknown_ones_are_ignored(home: Path, world: World) -> None:
    unknown = list(range(-(2**63), -(2**63) + MAX_ELIGIBLE - 1))

    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        body = query(eligible_ad_ids=[*unknown, FIRST_AD + 7], deadline_ms=10_000)
        answer = await client.post("/retrieve", json=body)
        assert (answer.status_code, answer.json()["ad_ids"]) == (200, [FIRST_AD + 7])
        nothing = await client.post("/retrieve", json=query(eligible_ad_ids=[1, 2]))
        assert (nothing.status_code, nothing.json()["ad_ids"]) == (200, [])

    run(world, scenario)


def test_ranking_by_value_needs_bids(home: Path, world: World) -> None:
    free = replace(world, ads=replace(world.ads, bid_N=torch.zeros(len(world.ads.bid_N))))
    release = add_release(home, free, seed=1)
    promote(home / "releases", release.version, "2026-01-04")

    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        refused = await client.post("/retrieve", json=query(rank_by="value"))
        assert refused.status_code == 422
        (wrong,) = refused.json()["fields"]
        assert (wrong["field"], wrong["error"]) == (
            "rank_by", f"no live ad of release {release.version} has a positive bid",
        )  # fmt: skip
        assert (await client.post("/retrieve", json=query(rank_by="score"))).status_code == 200

    run(world, scenario)


def test_unknown_groups_are_answered_with_the_known_ones(home: Path, world: World) -> None:
    async def scenario(client: httpx.AsyncClient, _server: RetrievalServer) -> None:
        refused = await client.post("/retrieve", json=query(max_per={"group": "brand", "limit": 1}))
        (wrong,) = refused.json()["fields"]
        assert (wrong["field"], wrong["error"]) == ("max_per.group", "'brand' is unknown; known: topic, advertiser")

    run(world, scenario)
