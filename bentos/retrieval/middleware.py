"""ASGI layers around BentoML's application.

`Front` is the outermost: it answers the hot routes itself and measures everything. `Gate` guards the rest:
body size and content type, before anything parses. `CancellingTimeout` replaces BentoML's timeout, which keeps
every request's objects alive until its timer fires (a second of garbage collection at a few thousand requests).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[bytes], Awaitable[Response]]
Observer = Callable[[str, str, int, float], None]


class BodyError(Exception):
    """A body that is refused before it is parsed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> Response:
        """The refusal; the connection closes, because the rest of the body was not read."""
        return JSONResponse({"error": str(self)}, self.status, {"Connection": "close"})


def check_headers(scope: Scope, max_bytes: int) -> None:
    """Refuse a wrong content type or a declared length over the limit.

    Raises:
        BodyError: 415, 413 or 400.
    """
    headers = dict(scope["headers"])
    media = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if media != b"application/json":
        raise BodyError(415, "content type must be application/json")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise BodyError(400, "content-length is not a number")
    if int(length) > max_bytes:
        raise BodyError(413, f"body over {max_bytes} bytes")


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Read a body of at most `max_bytes`; None when the client went away. Raises BodyError 413."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise BodyError(413, f"body over {max_bytes} bytes")
    return body


class Gate:
    """Refuses bodies by size and content type, and hands the others on."""

    def __init__(self, app: App, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on with the body replayed."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
            return await self.app(scope, receive, send)
        try:
            check_headers(scope, self.max_bytes)
            body = await read_body(receive, self.max_bytes)
        except BodyError as error:
            return await error.response()(scope, receive, send)
        if body is None:
            return None
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, replay, send)


class CancellingTimeout:
    """Answers 504 after `timeout` seconds, and forgets the timer as soon as an answer starts."""

    def __init__(self, app: App, timeout: float) -> None:
        self.app = app
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application under the timer."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = expired = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            timer.cancel()
            await send(message)

        def expire() -> None:
            nonlocal expired
            expired = True
            task.cancel()

        task = asyncio.ensure_future(self.app(scope, receive, note_start))
        timer = asyncio.get_running_loop().call_later(self.timeout, expire)
        try:
            await task
        except asyncio.CancelledError:
            if started or not expired:
                raise
            await JSONResponse({"error": f"no answer within {self.timeout} s"}, 504)(scope, receive, send)
        finally:
            timer.cancel()


class Front:
    """Outermost layer: hot routes by exact method and path, everything else by `app`; counts both.

    A rejection inside a BentoML API costs as much as an answer, so under overload goodput falls to a tenth;
    here it costs a few microseconds.
    """

    def __init__(
        self, app: App, routes: dict[tuple[str, str], Handler], observe: Observer, max_bytes: int = 1 << 20
    ) -> None:
        self.app = app
        self.routes = routes
        self.observe = observe
        self.max_bytes = max_bytes
        self.router = getattr(app, "router", None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a hot route, or hand on; then count."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = time.perf_counter()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        handler = self.routes.get((scope["method"], scope["path"]))
        try:
            if handler is None:
                await self.app(scope, receive, note_status)
            else:
                await self._answer(handler, scope, receive, note_status)
        finally:
            route = scope["path"] if handler is not None else _template(scope)
            self.observe(route, _method(scope), status, time.perf_counter() - started)
        return None

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body: bytes | None = b""
            if scope["method"] == "POST":
                check_headers(scope, self.max_bytes)
                body = await read_body(receive, self.max_bytes)
            response = await handler(body) if body is not None else None
        except BodyError as error:
            response = error.response()
        if response is not None:
            await response(scope, receive, send)


def _template(scope: Scope) -> str:
    """The route's template (`/v1/releases/{version}/activate`), so that ids never become metric labels."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    return f"{scope.get('root_path', '')}{path}" if path else "other"


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in ("GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS") else "other"
