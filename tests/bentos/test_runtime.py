from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bentos.retrieval.release import ReleaseConfig, copy_release, make_release, part_of
from bentos.retrieval.runtime import EVENT, Engine, InlineUser, Request, coverage
from models.artifact import Artifact, ArtifactStore
from models.schema import FeatureSchema
from tests.bentos.world import NOW_US, WorldReader
from tests.models.worlds import World


def requests(world: World, num: int = 12, k: int = 10, tier: str | None = None) -> list[Request]:
    ids = world.users.user_id_U[:num].tolist()
    users = WorldReader(world).read(ids, NOW_US)
    return [Request(u, ("feed", "stories")[i % 2], k, NOW_US, tier) for i, u in enumerate(users)]


def test_beam_of_everything_is_exact(engine: Engine, world: World) -> None:
    wide = replace(engine.config, tiers={**engine.config.tiers, "wide": type(engine.config.tier("lite"))((99, 99))})
    everything = Engine(engine.release, wide, engine.schema, engine.model, engine.index, engine.ads)
    found = everything.retrieve(requests(world, tier="wide"))
    exact = everything.exact(requests(world))
    assert [a.ad_ids for a in found] == [a.ad_ids for a in exact]
    np.testing.assert_allclose([a.scores for a in found], [a.scores for a in exact], rtol=1e-6)
    assert all(len(a.ad_ids) == 10 for a in exact)


def test_one_by_one_equals_batched_and_mixed_tiers(engine: Engine, world: World) -> None:
    mixed = [replace(r, tier=("lite", "standard", "full", "exact")[i % 4]) for i, r in enumerate(requests(world))]
    together = engine.retrieve(mixed)
    for request, answer in zip(mixed, together, strict=True):
        alone = engine.retrieve([request])[0]
        assert alone.ad_ids == answer.ad_ids
        assert answer.tier == request.tier
        np.testing.assert_allclose(alone.scores, answer.scores, rtol=1e-5)


def test_costs_rise_with_tiers_and_coverage_too(engine: Engine, world: World) -> None:
    exact = engine.exact(requests(world))
    cost, covered = [], []
    for tier in ("lite", "standard", "full"):
        answers = engine.retrieve(requests(world, tier=tier))
        cost.append(np.mean([a.cost for a in answers]))
        covered.append(np.mean([coverage(a, x) for a, x in zip(answers, exact, strict=True)]))
    assert cost == sorted(cost)
    assert covered == sorted(covered)
    assert 0 < cost[0] < 1


def test_blocked_ads_are_left_out_and_replaced(engine: Engine, world: World) -> None:
    plain = engine.exact(requests(world, num=1, k=12))[0]
    blocked = frozenset(plain.ad_ids[:2]) | {123456789}
    again = engine.exact([replace(requests(world, num=1)[0], blocked=blocked)])[0]
    assert again.ad_ids == plain.ad_ids[2:12]


def test_more_than_there_are(engine: Engine, world: World) -> None:
    answer = engine.exact(requests(world, num=1, k=2000))[0]
    assert len(answer.ad_ids) == engine.index.num_ads
    assert np.isfinite(answer.scores).all()


def test_history_hour_and_age(engine: Engine) -> None:
    history = np.array(
        [(5, NOW_US // 10**6 - 60, 1, 0), (10_000, 5, 0, 0), (7, NOW_US // 10**6 + 5, 2, 1)], dtype=EVENT
    )
    user = InlineUser(np.array([1, 2]), np.array([0.5], dtype=np.float32), history)
    batch = engine.user_batch([Request(user, "stories", 3, NOW_US), Request(engine.cold_user(), "feed", 3, NOW_US)])
    assert batch.history.start_B1.tolist() == [0, 2, 2]
    assert batch.history.item_E.tolist() == [5, 7]  # ad 10 000 is newer than the release
    assert batch.history.age_E.tolist() == [60.0, 0.0]
    assert batch.surface_B.tolist() == [1, 0]
    assert batch.hour_B.tolist() == [8, 8]  # midnight UTC in Shanghai


def test_a_release_holds_the_bids_of_its_ads(engine: Engine, world: World) -> None:
    assert engine.has_bids
    assert torch.equal(engine.ads.bid_N, world.ads.bid_N)
    assert engine.ads.bid_N.dtype == torch.float32


def test_codes_of_ids(engine: Engine) -> None:
    assert engine.code_of([50_003, 1, 50_089, 99_999]).tolist() == [3, -1, 89, -1]


def test_cold_user_is_answered_and_flagged(engine: Engine) -> None:
    answer = engine.retrieve([Request(engine.cold_user(), "feed", 5, NOW_US)])[0]
    assert answer.cold
    assert len(answer.ad_ids) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [({"surface": "moon"}, "surface: 'moon'"), ({"tier": "huge"}, "tier: 'huge'"), ({"k": 0}, "k: 0")],
)
def test_bad_requests_name_the_field(engine: Engine, world: World, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.retrieve([replace(requests(world, num=1)[0], **change)])  # type: ignore[arg-type]


def test_loading_refuses_damage_and_other_features(
    shared_home: Path, release: Artifact, world: World, tmp_path: Path
) -> None:
    copy_release(ArtifactStore(shared_home / "artifacts"), release.version, tmp_path)
    store = ArtifactStore(tmp_path)
    assert Engine.load(store, release.version).release == release.version
    other = replace(world.schema, history_length=7)
    with pytest.raises(ValueError, match="history_length: 100 against 7"):
        Engine.load(store, release.version, schema=other)
    index = part_of(store, release.manifest.config["index"]).path / "index.safetensors"
    index.write_bytes(index.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=r"index\.safetensors does not match its checksum"):
        Engine.load(store, release.version)
    shutil.rmtree(index.parent)
    with pytest.raises(ValueError, match="does not exist"):
        Engine.load(store, release.version)


def test_parts_of_another_format_are_refused(shared_home: Path, release: Artifact, world: World) -> None:
    store = ArtifactStore(shared_home / "artifacts")
    with store.create("hierarchical_index", schema=world.schema, code_version="0") as draft:
        (draft.path / "index.safetensors").write_bytes(b"something else")
    assert draft.result is not None
    model = part_of(store, release.manifest.config["model"])
    broken = make_release(
        store, schema=world.schema, model=model, index=draft.result, ads=world.ads, as_of="x", timezone="UTC",
        tiers={"standard": (1, 1)},
    )  # fmt: skip
    with pytest.raises(ValueError, match="this code can't read it"):
        Engine.load(store, broken.version)


def test_release_says_what_it_is(release: Artifact, world: World) -> None:
    config = ReleaseConfig.from_manifest(json.loads(json.dumps(release.manifest.config)))
    assert config.tier_names == ("lite", "standard", "full", "exact")
    assert config.watermark == 90
    assert config.feature_service == f"retrieval_{world.schema.fingerprint}"
    assert FeatureSchema.from_json(release.file("schema.json").read_text()) == world.schema
    with pytest.raises(ValueError, match="timezone missing"):
        ReleaseConfig.from_manifest({k: v for k, v in release.manifest.config.items() if k != "timezone"})


def test_release_refuses_parts_of_another_schema(shared_home: Path, release: Artifact, world: World) -> None:
    store = ArtifactStore(shared_home / "artifacts")
    config = ReleaseConfig.from_manifest(release.manifest.config)
    model, index = part_of(store, config.model), part_of(store, config.index)
    other = replace(world.schema, history_length=7)
    with pytest.raises(ValueError, match="is not the release's"):
        make_release(
            store, schema=other, model=model, index=index, ads=world.ads, as_of="x", timezone="UTC",
            tiers={"lite": (1, 1)},
        )  # fmt: skip
    with pytest.raises(ValueError, match="tier: 'standard' is unknown; known tiers: lite, exact"):
        make_release(
            store, schema=world.schema, model=model, index=index, ads=world.ads, as_of="x", timezone="UTC",
            tiers={"lite": (1, 1)},
        )  # fmt: skip
