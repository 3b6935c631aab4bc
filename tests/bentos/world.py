"""A small real release and an in-memory online reader for tests of the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bentos.retrieval.release import make_release
from bentos.retrieval.runtime import EVENT, InlineUser
from models.artifact import Artifact, ArtifactStore
from models.batch import AdTable
from models.index.config import RetrievalConfig
from models.index.monn import RetrievalModel
from models.index.publish import publish
from models.index.storage import save_index, save_model
from models.schema import FeatureSchema
from tests.models.worlds import FIRST_S, World, make_world

NOW_US = (FIRST_S + 3 * 86_400) * 1_000_000
CONFIG = RetrievalConfig(
    level_sizes=(6, 5), width=8, num_user_vectors=(2, 2, 2), hidden=(8, 8, 8), trunk_width=16, table_width=8,
    recent_length=8, history_length=50, num_attention_queries=2,
)  # fmt: skip
TIERS = {"lite": (1, 2), "standard": (2, 6), "full": (4, 16)}


def small_world() -> World:
    return make_world(seed=3, num_users=40, num_ads=90, num_days=1, rows_per_day=50)


def add_release(home: Path, world: World, *, seed: int = 0, as_of: str = "2026-01-03") -> Artifact:
    """Publish an untrained model over the world's ads as a release of a home."""
    return publish_release(home, world.schema, world.ads, timezone="Asia/Shanghai", seed=seed, as_of=as_of)


def publish_release(
    home: Path, schema: FeatureSchema, ads: AdTable, *, timezone: str, as_of: str, seed: int = 0
) -> Artifact:
    store = ArtifactStore(home / "artifacts")
    model = RetrievalModel(CONFIG, schema, seed=seed).eval()
    index = publish(model, ads)
    with store.create("retrieval_model", schema=schema, code_version="1") as draft:
        save_model(model, draft.path)
    with store.create("hierarchical_index", schema=schema, code_version="1") as index_draft:
        save_index(index, index_draft.path)
    assert draft.result is not None
    assert index_draft.result is not None
    return make_release(
        store, schema=schema, model=draft.result, index=index_draft.result, ads=ads, as_of=as_of,
        timezone=timezone, tiers=TIERS,
    )  # fmt: skip


@dataclass
class WorldReader:
    """Features of a world's users straight from its tables; what the online store would answer."""

    world: World
    tails: dict[int, NDArray[Any]] = field(default_factory=dict)

    @property
    def published_at_us(self) -> int:
        return NOW_US

    def read(self, user_ids: Sequence[int], now_us: int) -> list[InlineUser]:
        users, history, found = self.world.users, self.world.history, []
        known = {int(user_id): code for code, user_id in enumerate(users.user_id_U.tolist())}
        for user_id in user_ids:
            code = known.get(user_id)
            if code is None:
                schema = self.world.schema
                zeros = np.zeros(len(schema.categorical_of("user")), np.int64)
                dense = np.zeros(len(schema.dense_of("user")), np.float32)
                found.append(InlineUser(zeros, dense, np.empty(0, EVENT), known=False))
                continue
            rows = slice(int(history.offset_U1[code]), int(history.offset_U1[code + 1]))
            events = np.empty(rows.stop - rows.start, EVENT)
            events["item"], events["time"] = history.item_E[rows], history.time_E[rows]
            events["kind"], events["surface"] = history.kind_E[rows], history.surface_E[rows]
            events = np.concatenate([events, self.tails.get(user_id, np.empty(0, EVENT))])
            events = events[events["time"] < now_us // 1_000_000]
            found.append(
                InlineUser(
                    users.categorical_UC[code].numpy(), users.dense_UD[code].numpy(), events, feature_age_s=3600.0
                )
            )
        return found

    def push_events(self, user_id: int, events: NDArray[Any]) -> int:
        tail = np.empty(len(events), EVENT)
        for name in ("item", "kind", "surface"):
            tail[name] = events[name]
        tail["time"] = events["time_us"] // 1_000_000
        self.tails[user_id] = np.concatenate([self.tails.get(user_id, np.empty(0, EVENT)), tail])
        return len(self.tails[user_id])
