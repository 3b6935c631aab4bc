"""HTTP meaning of the server's answers and errors: handlers for the hot routes and for health and metrics."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from bentos.retrieval.batcher import DeadlineExceededError, OverloadedError
from bentos.retrieval.features import FieldError
from bentos.retrieval.middleware import Handler
from bentos.retrieval.schemas import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    RetrieveRequest,
    error_fields,
)
from bentos.retrieval.server import NotReadyError, RetrievalServer

logger = logging.getLogger(__name__)

EXPECTED_ERRORS = (ValidationError, FieldError, OverloadedError, DeadlineExceededError, NotReadyError)


def error_result(error: Exception) -> BatchResult:
    """Status, message and wrong fields of an expected error."""
    match error:
        case ValidationError():
            return BatchResult(error="invalid request", fields=error_fields(error), status=422)
        case FieldError():
            wrong = {"field": error.field, "error": error.message, "type": "unknown_value"}
            return BatchResult(error="invalid request", fields=[wrong], status=422)
        case OverloadedError():
            return BatchResult(error="overloaded", status=503)
        case DeadlineExceededError():
            return BatchResult(error="deadline exceeded", status=504)
        case NotReadyError():
            return BatchResult(error=f"not ready: {error}", status=503)
    raise error


def error_response(error: Exception) -> Response:
    """The HTTP answer to an expected error; other errors are raised again."""
    result = error_result(error)
    content: dict[str, Any] = {"error": result.error}
    if result.fields:
        content["fields"] = result.fields
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "5"
    return JSONResponse(content, result.status, headers)


async def retrieve_many(server: RetrievalServer, batch: BatchRequest) -> BatchResponse:
    """Answer many requests side by side; each fails or succeeds alone."""

    async def one(raw: dict[str, Any]) -> BatchResult:
        try:
            return BatchResult(answer=await server.answer(RetrieveRequest.model_validate(raw)))
        except EXPECTED_ERRORS as error:
            return error_result(error)

    return BatchResponse(results=list(await asyncio.gather(*(one(raw) for raw in batch.requests))))


def hot_routes(get_server: Callable[[], RetrievalServer]) -> dict[tuple[str, str], Handler]:
    """Handlers of the outermost layer by method and path."""

    async def retrieve(body: bytes) -> Response:
        server = get_server()
        try:
            server.batcher.check_capacity()
            return _json(await server.answer(RetrieveRequest.model_validate_json(body)))
        except EXPECTED_ERRORS as error:
            return error_response(error)
        except Exception:
            logger.exception("a retrieval failed")
            return JSONResponse({"error": "internal error"}, 500)

    async def retrieve_batch(body: bytes) -> Response:
        try:
            return _json(await retrieve_many(get_server(), BatchRequest.model_validate_json(body)))
        except EXPECTED_ERRORS as error:
            return error_response(error)
        except Exception:
            logger.exception("a batch of retrievals failed")
            return JSONResponse({"error": "internal error"}, 500)

    async def readyz(_body: bytes) -> Response:
        status = get_server().status()
        return JSONResponse(status, 200 if status["ready"] else 503)

    async def metrics(_body: bytes) -> Response:
        text, media_type = await asyncio.to_thread(get_server().metrics.render)
        return Response(text, media_type=media_type)

    return {
        ("POST", "/retrieve"): retrieve,
        ("POST", "/retrieve_batch"): retrieve_batch,
        ("GET", "/readyz"): readyz,
        ("GET", "/metrics"): metrics,
    }


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
