"""The BentoML service `retrieval`: wires the server to BentoML and replaces the defaults that spoil latency.

Tracing, access log and BentoML's metrics are off (each costs more than the framework itself), the timeout
middleware is replaced, and `Front` answers the hot routes before BentoML sees them. The APIs of the same paths
stay, so that BentoML's documentation and clients know them. This module alone reads the environment:

- `MIRACH_HOME`: home of releases, artefacts, online store and logs (default `./data`).
- `MIRACH_TOKEN`: bearer token of the admin routes; unset turns them off.
- `MIRACH_POINTER`: `ignore` serves the Bento's own release whatever is promoted (default `follow`).
- `MIRACH_CLOCK`: `log` starts the clock at the newest published cut (a replayed log), default `wall`.
- `MIRACH_TORCH_THREADS`: threads of a search (default 1; one compute slot shares the machine with the loop).
"""

import gc
import logging
import os
from pathlib import Path
from typing import Any, cast, get_args

import bentoml
import torch
from _bentoml_sdk.service.factory import Service  # type: ignore[import-untyped]
from bentoml._internal.server.http import traffic
from pydantic import ValidationError

from bentos.retrieval.admin import create_app
from bentos.retrieval.http import EXPECTED_ERRORS, error_response, hot_routes, retrieve_many
from bentos.retrieval.middleware import CancellingTimeout, Front, Gate
from bentos.retrieval.schemas import BatchRequest, BatchResponse, RetrieveRequest, RetrieveResponse
from bentos.retrieval.server import Clock, RetrievalServer, Settings

traffic.TimeoutMiddleware = CancellingTimeout  # type: ignore[misc, assignment]

MAX_BODY_BYTES = 4 << 20
"""A list of eligible ads with the longest ids fits."""
BENTO_COPY = Path(__file__).resolve().parents[2] / "release"
"""Artefacts that `bentos.build` put beside the code; absent when served from a checkout."""


def settings_from_environment() -> Settings:
    """Read the environment; raises ValueError for an unknown clock."""
    clock = os.environ.get("MIRACH_CLOCK", "wall")
    if clock not in get_args(Clock):
        raise ValueError(f"MIRACH_CLOCK: {clock!r} is unknown; known: {', '.join(get_args(Clock))}")
    return Settings(
        home=Path(os.environ.get("MIRACH_HOME", "data")).resolve(),
        bento_copy=BENTO_COPY if BENTO_COPY.exists() else None,
        token=os.environ.get("MIRACH_TOKEN", ""),
        follow_pointer=os.environ.get("MIRACH_POINTER", "follow") != "ignore",
        clock=cast(Clock, clock),
    )


def current_server() -> RetrievalServer:
    """The server of the live service instance."""
    server: RetrievalServer = bentoml.get_current_service().server
    return server


class _QuietValidation(logging.Filter):
    """Drops the traceback that BentoML logs for every invalid request."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], ValidationError))


@bentoml.asgi_app(create_app(current_server), path="/v1")
@bentoml.service(
    name="retrieval",
    workers=1,
    traffic={"timeout": 60.0},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": ".*"},
)
class Retrieval:
    """Retrieval of ads over a jointly learned hierarchical index."""

    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ.get("MIRACH_TORCH_THREADS", "1")))
        logging.getLogger("bentoml._internal.server.http_app").addFilter(_QuietValidation())
        self.server = RetrievalServer(settings_from_environment())
        self.server.load_initial()

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Start the server, then keep what was loaded out of the garbage collector's way."""
        await self.server.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Drain the queue and write the request log."""
        await self.server.stop()

    @bentoml.api  # type: ignore[untyped-decorator]
    async def retrieve(self, query: RetrieveRequest, /) -> RetrieveResponse:
        """Retrieve ads for one user on one surface."""
        try:
            return await self.server.answer(query)
        except EXPECTED_ERRORS as error:
            refusal: Any = error_response(error)  # BentoML passes a ready response through
            return refusal  # type: ignore[no-any-return]

    @bentoml.api  # type: ignore[untyped-decorator]
    async def retrieve_batch(self, batch: BatchRequest, /) -> BatchResponse:
        """Answer many requests; a bad one does not fail the others."""
        return await retrieve_many(self.server, batch)

    async def __is_ready__(self) -> bool:
        return bool(self.server.status()["ready"])


class FrontedService(Service[Any]):  # type: ignore[misc]
    """A BentoML service whose ASGI application stands behind `Front`."""

    __slots__ = ()

    def to_asgi(self, is_main: bool = True) -> Any:
        """BentoML's application with the hot routes in front."""
        app = super().to_asgi(is_main=is_main)
        return Front(app, hot_routes(current_server), _observe, MAX_BODY_BYTES)


def _observe(route: str, method: str, status: int, seconds: float) -> None:
    current_server().metrics.observe_http(route, method, status, seconds)


def _put_behind_front(service: Any) -> None:
    """Guard the service's own routes, and make its ASGI application the fronted one."""
    service.add_asgi_middleware(Gate, max_bytes=MAX_BODY_BYTES)
    service.__class__ = FrontedService


_put_behind_front(Retrieval)
