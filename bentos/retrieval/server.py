"""The service without its framework: releases, batching, admission, logging, metrics, on one event loop.

The serving bundle (engine, reader, where it came from) hangs on one attribute. A batch reads that attribute
once, so no answer mixes two releases; a swap loads and warms the new bundle beside the old one, assigns the
attribute, and the old one goes when its last batch ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bentos.retrieval import features, request_log
from bentos.retrieval.batcher import MicroBatcher
from bentos.retrieval.explanations import to_response
from bentos.retrieval.features import Job, Reader
from bentos.retrieval.metrics import ServiceMetrics
from bentos.retrieval.runtime import Answer, Engine, UserFeatures
from bentos.retrieval.schemas import EventIn, ExplainRequest, ExplainResponse, RetrieveRequest, RetrieveResponse
from models.artifact import ArtifactStore
from models.release import promote, read_pointer, roll_back

logger = logging.getLogger(__name__)

Source = Literal["pointer", "bento"]
Clock = Literal["wall", "log"]
STEP_DOWN_LOAD = 0.5
"""Share of the queue in use from which requests without a tier of their own get the next cheaper one."""


MAX_EXPLAINING = 8
"""Explanations that may wait for the compute slot."""


class NotReadyError(Exception):
    """No release could be loaded yet."""


@dataclass(frozen=True)
class Settings:
    """Where things are and how much may wait."""

    home: Path
    bento_copy: Path | None = None
    """Artefact root inside the Bento, with `release.json` beside the artefacts."""
    token: str = ""
    """Bearer token of the admin routes; empty turns them off."""
    max_batch: int = 32
    max_queue: int = 256
    poll_s: float = 1.0
    feature_share: float = 0.01
    follow_pointer: bool = True
    """False: serve the Bento's own copy whatever is promoted (how a candidate is tested before promotion)."""
    clock: Clock = "wall"
    """`log`: a replayed log ended long ago, so time starts at the newest published cut when the service does."""


@dataclass(frozen=True)
class Bundle:
    """What serves."""

    engine: Engine
    reader: Reader | None
    source: Source


@dataclass(frozen=True)
class Outcome:
    """An answer with what the log wants to know besides."""

    answer: Answer
    source: Source
    user: UserFeatures


class RetrievalServer:
    """Answers queries; `load_initial`, then `start` inside the event loop, `stop` at the end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = ServiceMetrics()
        self.bundle: Bundle | None = None
        self.refusal: str | None = None
        """Why the last release that should have served does not."""
        self._pointer_mtime = 0
        self._clock_shift_us = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrieval")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._batcher: MicroBatcher[Job, Outcome] | None = None
        self._explainer = MicroBatcher(self._explain, self._executor, max_batch=1, max_queue=MAX_EXPLAINING)
        self._swap = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        log = request_log.LogSettings(settings.home / "logs" / "requests")
        self._log = request_log.RequestLogWriter(log, on_drop=self.metrics.log_dropped.inc)

    @property
    def store(self) -> ArtifactStore:
        """The home's artefacts."""
        return ArtifactStore(self.settings.home / "artifacts")

    @property
    def releases(self) -> Path:
        """Folder of the release pointer."""
        return self.settings.home / "releases"

    @property
    def batcher(self) -> MicroBatcher[Job, Outcome]:
        """The batcher; raises NotReadyError before `start`."""
        if self._batcher is None:
            raise NotReadyError("the service has not started")
        return self._batcher

    def load_initial(self) -> None:
        """Load the promoted release, or the Bento's own copy when no pointer can be read and loaded."""
        self._pointer_mtime = self._read_mtime()
        try:
            pointer = read_pointer(self.releases) if self.settings.follow_pointer else None
            if pointer is not None:
                self._install(self._load(pointer.version, "pointer"))
                return
        except ValueError as error:
            self._note_refusal(error)
        copied = self._bento_version()
        if copied is not None:
            try:
                self._install(self._load(copied, "bento"))
            except ValueError as error:
                self._note_refusal(error)

    async def start(self) -> None:
        """Start batching, logging, and watching the pointer."""
        self._batcher = MicroBatcher(
            self._run, self._executor, max_batch=self.settings.max_batch,
            max_queue=self.settings.max_queue, on_batch=self.metrics.observe_batch,
        )  # fmt: skip
        self._log.start()
        if self.settings.follow_pointer:
            self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Answer what is queued, write the log, end the threads."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._batcher is not None:
            await self._batcher.close()
        await self._explainer.close()
        await asyncio.to_thread(self._log.close)
        self._executor.shutdown(wait=True)
        self._writer.shutdown(wait=True)

    async def answer(self, query: RetrieveRequest) -> RetrieveResponse:
        """Answer one query.

        Raises:
            NotReadyError: no release. FieldError: a value this release does not know.
            OverloadedError, DeadlineExceededError: see the batcher.
        """
        started = time.perf_counter()
        engine = self._check(query)
        tier, stepped_down = self._choose_tier(engine, query)
        job = self._job(query)
        outcome = await self.batcher.submit(tier, job, query.deadline_ms / 1000)
        answer = outcome.answer
        request_id = secrets.randbits(62) if query.request_id is None else query.request_id
        self.metrics.observe_answer(answer, query.surface, stepped_down)
        self._log.put(self._log_row(request_id, job, outcome, (time.perf_counter() - started) * 1e3))
        return RetrieveResponse(
            request_id=request_id, ad_ids=answer.ad_ids, scores=answer.scores, release=answer.release,
            release_source=outcome.source, tier=answer.tier, stepped_down=stepped_down, cost=answer.cost,
            nodes_scored=answer.nodes_scored, ads_scored=answer.ads_scored, cold=answer.cold,
            feature_age_s=answer.feature_age_s,
        )  # fmt: skip

    async def explain(self, query: ExplainRequest) -> ExplainResponse:
        """Explain what `answer` gives, in the tier of an idle service; nothing is logged.

        Explanations wait for the compute slot one by one, and give way when the queue of retrievals is full.

        Raises:
            NotReadyError, FieldError, OverloadedError, DeadlineExceededError: as `answer`; a FieldError also for a
                tier without a path.
        """
        engine = self._check(query)
        features.check_explainable(engine, query)
        self.batcher.check_capacity()
        tier = query.tier or engine.config.default_tier
        return await self._explainer.submit(tier, self._job(query), query.deadline_ms / 1000)

    async def push_events(self, user_id: int, events: Sequence[EventIn]) -> tuple[int, int]:
        """Merge events into the user's tail; returns how many were taken and how many named unknown ads.

        Raises:
            NotReadyError: no release or no online store. FieldError: unknown kind or surface.
        """
        bundle = self.bundle
        if bundle is None or bundle.reader is None:
            raise NotReadyError("no release or no online store to push events into")
        rows = features.pushed_events(bundle.engine, user_id, events)
        if len(rows):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._writer, bundle.reader.push_events, user_id, rows)
        self.metrics.events.inc(len(rows))
        return len(rows), len(events) - len(rows)

    async def activate(self, version: str) -> None:
        """Load a release, then promote it and serve it; raises ValueError when it can't be served."""
        async with self._swap:
            bundle = await asyncio.to_thread(self._load, version, "pointer")
            promote(self.releases, version, bundle.engine.config.as_of)
            self._pointer_mtime = self._read_mtime()
            self._install(bundle)

    async def roll_back(self) -> str:
        """Serve the previous release again; returns its version, raises ValueError when there is none."""
        async with self._swap:
            pointer = read_pointer(self.releases)
            if pointer is None or pointer.previous is None:
                raise ValueError("there is no previous release to roll back to")
            bundle = await asyncio.to_thread(self._load, pointer.previous, "pointer")
            roll_back(self.releases)
            self._pointer_mtime = self._read_mtime()
            self._install(bundle)
            return bundle.engine.release

    def status(self) -> dict[str, Any]:
        """Readiness in words: which release serves, where it came from, and why another was refused."""
        bundle = self.bundle
        ready = bundle is not None and self._batcher is not None
        found: dict[str, Any] = {"ready": ready, "refusal": self.refusal}
        if bundle is not None:
            found |= {
                "release": bundle.engine.release,
                "release_source": bundle.source,
                "as_of": bundle.engine.config.as_of,
                "schema_fingerprint": bundle.engine.schema.fingerprint,
                "tiers": list(bundle.engine.config.tier_names),
                "online_store": bundle.reader is not None,
            }
        return found

    def _check(self, query: RetrieveRequest) -> Engine:
        if self.bundle is None:
            raise NotReadyError(self.refusal or "no release is promoted and the Bento holds none")
        features.check(self.bundle.engine, query)
        return self.bundle.engine

    def _job(self, query: RetrieveRequest) -> Job:
        return Job(query, arrived_us=time.time_ns() // 1000 + self._clock_shift_us)

    def _explain(self, tier: str, jobs: Sequence[Job]) -> list[ExplainResponse]:
        bundle = self.bundle
        assert bundle is not None
        requests = features.to_requests(bundle.engine, bundle.reader, jobs, tier)
        return [to_response(bundle.engine.explain(request), bundle.source) for request in requests]

    def _run(self, tier: str, jobs: Sequence[Job]) -> list[Outcome]:
        bundle = self.bundle
        assert bundle is not None
        requests = features.to_requests(bundle.engine, bundle.reader, jobs, tier)
        answers = bundle.engine.retrieve(requests)
        return [Outcome(a, bundle.source, r.user) for a, r in zip(answers, requests, strict=True)]

    def _choose_tier(self, engine: Engine, query: RetrieveRequest) -> tuple[str, bool]:
        if query.tier is not None:
            return query.tier, False
        names = engine.config.tier_names
        place = names.index(engine.config.default_tier)
        if place and self.batcher.load > STEP_DOWN_LOAD:
            return names[place - 1], True
        return engine.config.default_tier, False

    def _log_row(self, request_id: int, job: Job, outcome: Outcome, latency_ms: float) -> dict[str, Any]:
        answer, query = outcome.answer, job.query
        row: dict[str, Any] = {
            "request_id": request_id, "timestamp_us": job.timestamp_us, "user_id": query.user_id,
            "surface": query.surface, "k": query.k, "release": answer.release, "tier": answer.tier,
            "cost": answer.cost, "latency_ms": latency_ms, "ad_ids": answer.ad_ids, "scores": answer.scores,
            "feature_age_s": answer.feature_age_s, "cold": answer.cold, "nodes_scored": answer.nodes_scored,
            "ads_scored": answer.ads_scored, "rank_by": query.rank_by, "restricted": query.restricted,
        }  # fmt: skip
        if request_log.sampled(request_id, self.settings.feature_share):
            row["categorical"] = outcome.user.categorical.tolist()
            row["dense"] = outcome.user.dense.tolist()
            row["history"] = outcome.user.history.tobytes()
        return row

    def _load(self, version: str, source: Source) -> Bundle:
        root = self.settings.home / "artifacts" if source == "pointer" else self.settings.bento_copy
        assert root is not None
        engine = Engine.load(ArtifactStore(root), version)
        reader = self._reader_for(engine)
        seconds = engine.warm_up()
        logger.info("release %s loaded from %s, warm after %.0f ms", version, source, seconds * 1e3)
        return Bundle(engine, reader, source)

    def _reader_for(self, engine: Engine) -> Reader | None:
        current = self.bundle
        if current is not None and current.engine.schema.fingerprint == engine.schema.fingerprint and current.reader:
            return current.reader
        if not (self.settings.home / "feast").exists():
            logger.warning("%s has no online store: users are served as cold ones", self.settings.home)
            return None
        from feature_repo.online import OnlineReader

        return OnlineReader(self.settings.home, engine.schema)

    def _install(self, bundle: Bundle) -> None:
        if self.bundle is None and self.settings.clock == "log" and bundle.reader is not None:
            self._clock_shift_us = bundle.reader.published_at_us - time.time_ns() // 1000
        self.bundle = bundle
        self.metrics.swaps.labels("loaded").inc()
        self.metrics.release.set_to_current_time()
        if bundle.source == "pointer":
            self.refusal = None

    def _note_refusal(self, error: Exception) -> None:
        self.refusal = str(error)
        self.metrics.swaps.labels("refused").inc()
        logger.error("a release is refused: %s", error)

    def _read_mtime(self) -> int:
        try:
            return (self.releases / "current.json").stat().st_mtime_ns
        except OSError:
            return 0

    def _bento_version(self) -> str | None:
        copied = self.settings.bento_copy
        if copied is None or not (copied / "release.json").exists():
            return None
        version: str = json.loads((copied / "release.json").read_text())["version"]
        return version

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll_s)
            modified = self._read_mtime()
            if modified not in (0, self._pointer_mtime):
                await self._follow_pointer(modified)

    async def _follow_pointer(self, modified: int) -> None:
        async with self._swap:
            if modified == self._pointer_mtime:
                return
            self._pointer_mtime = modified
            try:
                pointer = read_pointer(self.releases)
                current = self.bundle
                if pointer is None or (
                    current is not None and current.source == "pointer" and current.engine.release == pointer.version
                ):
                    return
                self._install(await asyncio.to_thread(self._load, pointer.version, "pointer"))
            except Exception as error:
                self._note_refusal(error)
