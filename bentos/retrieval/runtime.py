"""The retrieval engine: an immutable bundle of model, index and ads that turns user features into ads.

Knows no server and no feature store: a request carries features that somebody has read already. A release is
loaded with its checksums and its schema fingerprint verified; a running engine never changes, so that a
service swaps releases by swapping one reference.

Shape legend: B requests, E history events of all requests, K ads an answer asks for, N ads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, Protocol
from zoneinfo import ZoneInfo

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from bentos.retrieval.release import EXACT, ReleaseConfig, part_of, read_ads
from models.artifact import ArtifactStore
from models.batch import AdTable, HistorySlice, UserBatch
from models.index.explain import FoundAd, Visit, found_ads, visited
from models.index.monn import RetrievalModel
from models.index.publish import Index
from models.index.search import SearchResult, beam_search, exact_search
from models.index.storage import load_index, load_model
from models.index.terms import Auction, Cap, Terms, auction
from models.schema import FeatureSchema

EVENT = np.dtype([("item", "<i4"), ("time", "<u4"), ("kind", "u1"), ("surface", "u1")])
"""One history event, 10 bytes: ad code, seconds since the epoch, kind and surface codes of the schema."""
RankBy = Literal["score", "value"]
"""Ads are ranked by their score, or by log(click probability x bid)."""


class UserFeatures(Protocol):
    """What the engine needs to know about a user; `feature_repo.online.OnlineUser` has this shape."""

    @property
    def known(self) -> bool:
        """False for a user that the feature store has never seen."""

    @property
    def categorical(self) -> NDArray[np.int64]:
        """User-side categorical values in schema order, shape [C]."""

    @property
    def dense(self) -> NDArray[np.float32]:
        """User-side dense values in schema order, shape [D]."""

    @property
    def history(self) -> NDArray[Any]:
        """Events of dtype `EVENT`, oldest first."""

    @property
    def feature_age_s(self) -> float | None:
        """Seconds since the features were published; None or NaN for a cold user."""


@dataclass(frozen=True)
class InlineUser:
    """A user whose features came with the request instead of from the store."""

    categorical: NDArray[np.int64]
    dense: NDArray[np.float32]
    history: NDArray[Any]
    known: bool = True
    feature_age_s: float | None = None


@dataclass(frozen=True)
class Request:
    """One retrieval: who, where, when, how many, and how hard to search."""

    user: UserFeatures
    surface: str
    k: int
    timestamp_us: int
    tier: str | None = None
    blocked: frozenset[int] = frozenset()
    """Ad ids that must not be answered."""
    eligible: Sequence[int] | None = None
    """Ad ids that alone may be answered; all may when None."""
    rank_by: RankBy = "score"
    cap: Cap | None = None


@dataclass(frozen=True)
class Answer:
    """Ads in falling order of what they were ranked by, with what it took to find them."""

    ad_ids: list[int]
    scores: list[float]
    """What the ads were ranked by."""
    release: str
    tier: str
    cost: float
    """FLOPs relative to a full scan of the ads by the ad scorer."""
    nodes_scored: int
    ads_scored: int
    cold: bool
    feature_age_s: float | None


@dataclass(frozen=True)
class Explanation:
    """An answer and the way there."""

    answer: Answer
    ads: list[FoundAd]
    levels: list[list[Visit]]
    """Nodes visited, from the root down, best first."""


class Engine:
    """A loaded release. Thread-safe: nothing is written after construction."""

    def __init__(
        self,
        release: str,
        config: ReleaseConfig,
        schema: FeatureSchema,
        model: RetrievalModel,
        index: Index,
        ads: AdTable,
    ) -> None:
        self.release = release
        self.config = config
        self.schema = schema
        self.model = model
        self.index = index
        self.ads = ads
        self.zone = ZoneInfo(config.timezone)
        self._auction: Auction | None = None
        if bool((ads.bid_N[index.ad_code_S] > 0.0).any()):
            self._auction = auction(index, ads.bid_N)
        self._ad_id_N: NDArray[np.int64] = ads.ad_id_N.numpy().astype(np.int64)
        self._order_N = np.argsort(self._ad_id_N, kind="stable")
        self._sorted_id_N = self._ad_id_N[self._order_N]

    @classmethod
    def load(cls, store: ArtifactStore, version: str, schema: FeatureSchema | None = None) -> Engine:
        """Load and verify release `version`.

        Raises:
            ValueError: an artefact is missing, damaged or of another format, or its features are not those of
                `schema`.
        """
        release = store.open("release", version, schema=schema)
        config = ReleaseConfig.from_manifest(release.manifest.config)
        own = FeatureSchema.from_json(release.file("schema.json").read_text())
        if not own.fingerprint == config.schema_fingerprint == release.manifest.schema_fingerprint:
            raise ValueError(f"release {version}: schema.json ({own.fingerprint}) is not the schema it was made for")
        model_path, index_path = (part_of(store, part, own).path for part in (config.model, config.index))
        try:
            model, index = load_model(model_path), load_index(index_path)
            ads = read_ads(release.file("ads.safetensors"))
        except (KeyError, TypeError, RuntimeError, OSError, SafetensorError) as error:
            raise ValueError(f"release {version}: this code can't read it: {error!r}") from error
        return cls(version, config, own, model, index, ads)

    @property
    def num_ads(self) -> int:
        """N, retired ads included."""
        return int(self._ad_id_N.shape[0])

    @property
    def has_bids(self) -> bool:
        """Whether any live ad has a positive bid, without which ads can't be ranked by value."""
        return self._auction is not None

    def code_of(self, ad_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Codes of ad ids, -1 where this release does not know the ad."""
        wanted = np.asarray(ad_ids, dtype=np.int64)
        place = np.searchsorted(self._sorted_id_N, wanted).clip(max=max(self.num_ads - 1, 0))
        return np.where(self._sorted_id_N[place] == wanted, self._order_N[place], -1).astype(np.int64)

    def cold_user(self) -> InlineUser:
        """A user about whom nothing is known: unknown attributes, zero statistics, no history."""
        return InlineUser(
            categorical=np.zeros(len(self.schema.categorical_of("user")), dtype=np.int64),
            dense=np.zeros(len(self.schema.dense_of("user")), dtype=np.float32),
            history=np.empty(0, dtype=EVENT),
            known=False,
        )

    def retrieve(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer requests in order; those of one tier, ranking and cap are searched in one batch.

        Raises:
            ValueError: unknown surface or tier, k below 1, or ranking by value without any bid; names the field.
        """
        groups: dict[tuple[str, RankBy, Cap | None], list[int]] = {}
        for row, request in enumerate(requests):
            key = request.tier or self.config.default_tier, request.rank_by, request.cap
            groups.setdefault(key, []).append(row)
        answers: dict[int, Answer] = {}
        for (tier, _, _), rows in groups.items():
            chosen = [requests[i] for i in rows]
            answers.update(zip(rows, self._answers(chosen, tier, self._search(chosen, tier)), strict=True))
        return [answers[row] for row in range(len(requests))]

    def exact(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer by the full scan of the serving score, on the same terms, whatever tier the requests name."""
        return self.retrieve([replace(request, tier=EXACT) for request in requests])

    @torch.inference_mode()
    def explain(self, request: Request) -> Explanation:
        """The answer that `retrieve` gives, and which nodes and related ads led there.

        Raises:
            ValueError: as `retrieve`, or the tier scans every ad, so that there is no path.
        """
        tier = request.tier or self.config.default_tier
        if self.config.tier(tier).exact:
            raise ValueError(f"tier: {tier!r} scans every ad, there is no path to explain")
        result = self._search([request], tier)
        groups = [group.name for group in self.schema.groups]
        (answer,), (ads,) = self._answers([request], tier, result), found_ads(self.index, result)
        return Explanation(answer, ads, visited(self.index, result, groups)[0])

    def warm_up(self) -> float:
        """Answer one cold request per tier; returns the seconds it took."""
        started = time.perf_counter()
        now_us = int(time.time() * 1e6)
        for tier in self.config.tier_names:
            self.retrieve([Request(self.cold_user(), self.schema.surfaces[0], 1, now_us, tier)])
        return time.perf_counter() - started

    @torch.inference_mode()
    def _search(self, requests: Sequence[Request], tier: str) -> SearchResult:
        plan = self.config.tier(tier)
        user = self.user_batch(requests)
        for request in requests:
            if request.k < 1:
                raise ValueError(f"k: {request.k} is not at least 1")
        fetch = min(max(r.k for r in requests), self.index.num_ads)
        state = self.model.user_state(user, self.ads)
        terms = self._terms(requests)
        if plan.exact:
            return exact_search(self.model, self.index, state, fetch, terms=terms)
        return beam_search(self.model, self.index, state, beams=plan.beams, k=fetch, terms=terms)

    def _answers(self, requests: Sequence[Request], tier: str, result: SearchResult) -> list[Answer]:
        code_BK = result.ad_code_BK.numpy()
        score_BK = result.score_BK.numpy()
        cost_B, nodes_B, ads_B = result.cost_B.tolist(), result.nodes_scored_B.tolist(), result.ads_scored_B.tolist()
        answers = []
        for b, request in enumerate(requests):
            code_K = code_BK[b, : request.k]
            found_K = code_K >= 0
            answers.append(
                Answer(
                    ad_ids=self._ad_id_N[code_K[found_K]].tolist(),
                    scores=score_BK[b, : request.k][found_K].tolist(),
                    release=self.release,
                    tier=tier,
                    cost=float(cost_B[b]),
                    nodes_scored=int(nodes_B[b]),
                    ads_scored=int(ads_B[b]),
                    cold=not request.user.known,
                    feature_age_s=_finite(request.user.feature_age_s),
                )
            )
        return answers

    def _terms(self, requests: Sequence[Request]) -> Terms:
        """Terms of requests that agree on ranking and cap."""
        first = requests[0]
        if first.rank_by == "score":
            return Terms(self._excluded(requests), None, first.cap)
        if self._auction is None:
            raise ValueError("rank_by: no live ad of the release has a positive bid")
        return Terms(self._excluded(requests), self._auction, first.cap)

    def _excluded(self, requests: Sequence[Request]) -> Tensor | None:
        """Bitmap [B, N] of ads that must not be answered, None when every request may be answered with all."""
        if not any(r.blocked or r.eligible is not None for r in requests):
            return None
        excluded_BN = torch.zeros((len(requests), self.num_ads), dtype=torch.bool)
        for b, request in enumerate(requests):
            if request.eligible is not None:
                excluded_BN[b] = True
                excluded_BN[b, self._known(request.eligible)] = False
            excluded_BN[b, self._known(sorted(request.blocked))] = True
        return excluded_BN

    def _known(self, ad_ids: Sequence[int]) -> Tensor:
        code = self.code_of(ad_ids)
        return torch.from_numpy(code[code >= 0])

    def user_batch(self, requests: Sequence[Request]) -> UserBatch:
        """Features of requests as tensors; events of ads that this release does not know are left out."""
        return UserBatch(
            categorical_BC=torch.from_numpy(np.stack([np.asarray(r.user.categorical, np.int64) for r in requests])),
            dense_BD=torch.from_numpy(np.stack([np.asarray(r.user.dense, np.float32) for r in requests])),
            history=self._history([r.user.history for r in requests], [r.timestamp_us for r in requests]),
            surface_B=torch.tensor([self.schema.surface_code(r.surface) for r in requests], dtype=torch.int64),
            hour_B=torch.tensor([self._hour(r.timestamp_us) for r in requests], dtype=torch.int64),
        )

    def _hour(self, timestamp_us: int) -> int:
        return datetime.fromtimestamp(timestamp_us / 1e6, self.zone).hour

    def _history(self, histories: Sequence[NDArray[Any]], timestamps_us: Sequence[int]) -> HistorySlice:
        known = [h[(h["item"] >= 0) & (h["item"] < self.num_ads)][-self.schema.history_length :] for h in histories]
        length_B = np.array([len(h) for h in known], dtype=np.int64)
        events = np.concatenate(known) if len(known) else np.empty(0, dtype=EVENT)
        now_E = np.repeat(np.asarray(timestamps_us, dtype=np.int64) // 1_000_000, length_B)
        age_E = np.clip(now_E - events["time"].astype(np.int64), 0, None).astype(np.float32)
        start_B1 = np.zeros(len(known) + 1, dtype=np.int64)
        np.cumsum(length_B, out=start_B1[1:])
        return HistorySlice(
            start_B1=torch.from_numpy(start_B1),
            item_E=_int64(events["item"]),
            kind_E=_int64(events["kind"]),
            surface_E=_int64(events["surface"]),
            age_E=torch.from_numpy(age_E),
        )


def coverage(answer: Answer, exact: Answer) -> float:
    """Share of the exact answer's ads that the answer holds; 1.0 when there is nothing to find."""
    if not exact.ad_ids:
        return 1.0
    return len(set(answer.ad_ids) & set(exact.ad_ids)) / len(exact.ad_ids)


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _int64(column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column.astype(np.int64))
