"""The mounted application `/v1`: releases behind a token, events as they happen, and explanations of answers."""

import hmac
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bentos.retrieval.http import EXPECTED_ERRORS, error_response
from bentos.retrieval.schemas import (
    EventsRequest,
    EventsResponse,
    ExplainRequest,
    ExplainResponse,
    ReleaseInfo,
    describe_errors,
)
from bentos.retrieval.server import RetrievalServer
from models.release import read_pointer

Responses = dict[int | str, dict[str, Any]]
ADMIN: Responses = {401: {"description": "wrong token"}, 403: {"description": "no token is configured"}}
DEADLINE = {"description": "not explained by the deadline"}
CONFLICT: Responses = {409: {"description": "refused; the release that served goes on serving"}}


def live_server(request: Request) -> RetrievalServer:
    """The server behind the application that got the request."""
    server: RetrievalServer = request.app.state.get_server()
    return server


Server = Annotated[RetrievalServer, Depends(live_server)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def require_token(server: Server, credentials: Credentials) -> None:
    """Let only the configured token pass; compared in constant time."""
    token = server.settings.token
    if not token:
        raise HTTPException(403, "admin is off: no token is configured")
    if credentials is None or not hmac.compare_digest(credentials.credentials.encode(), token.encode()):
        raise HTTPException(401, "wrong token", {"WWW-Authenticate": "Bearer"})


admin = APIRouter(dependencies=[Depends(require_token)], responses=ADMIN, tags=["releases"])
public = APIRouter()


@admin.get("/releases")
async def releases(server: Server) -> ReleaseInfo:
    """Which release serves, which served before, and which could."""
    return _info(server)


@admin.post("/releases/{version}/activate", responses={404: {"description": "no such release"}, **CONFLICT})
async def activate(version: str, server: Server) -> ReleaseInfo:
    """Promote a release and serve it; it is loaded and warmed first."""
    if version not in server.store.versions("release"):
        raise HTTPException(404, f"release {version!r} does not exist")
    try:
        await server.activate(version)
    except ValueError as error:
        raise HTTPException(409, str(error)) from error
    return _info(server)


@admin.post("/rollback", responses=CONFLICT)
async def rollback(server: Server) -> ReleaseInfo:
    """Serve the previous release again."""
    try:
        await server.roll_back()
    except ValueError as error:
        raise HTTPException(409, str(error)) from error
    return _info(server)


@public.post("/events", tags=["events"], responses={503: {"description": "no online store"}})
async def events(body: EventsRequest, server: Server) -> EventsResponse:
    """Merge engagements into the user's tail; the next retrieval sees them."""
    accepted, unknown = await server.push_events(body.user_id, body.events)
    return EventsResponse(accepted=accepted, unknown_ads=unknown)


@public.post(
    "/explain", tags=["retrieval"], responses={503: {"description": "no release, or overloaded"}, 504: DEADLINE}
)
async def explain(body: ExplainRequest, server: Server) -> ExplainResponse:
    """Name the ads that `/retrieve` answers to the same request, where each came from, and the nodes visited."""
    return await server.explain(body)


def create_app(get_server: Callable[[], RetrievalServer]) -> FastAPI:
    """Build the application; `get_server` returns the live server at request time."""
    app = FastAPI(title="Mirach", version="1", servers=[{"url": "/v1"}])
    app.state.get_server = get_server
    app.include_router(admin)
    app.include_router(public)
    app.add_exception_handler(RequestValidationError, _invalid)
    for expected in EXPECTED_ERRORS:
        app.add_exception_handler(expected, _expected)
    return app


def _info(server: RetrievalServer) -> ReleaseInfo:
    bundle = server.bundle
    pointer = read_pointer(server.releases)
    return ReleaseInfo(
        active=bundle.engine.release if bundle else None,
        source=bundle.source if bundle else None,
        as_of=bundle.engine.config.as_of if bundle else None,
        previous=pointer.previous if pointer else None,
        versions=server.store.versions("release"),
    )


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"error": "invalid request", "fields": describe_errors(error.errors())}, 422)


async def _expected(_request: Request, error: Exception) -> Response:
    return error_response(error)
