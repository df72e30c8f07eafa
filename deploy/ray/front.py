"""Middleware in each of Ray's proxies, before the proxy's router. The middleware sets the session header of a request,
and answers a request that Ray leaves unanswered. Ray calls the function `middlewares`, whose import path is the value
of the environment variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH. Ray's router hashes the header `x-session-id`.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CALLBACK = "deploy.ray.front:middlewares"
SESSION_HEADER = b"x-session-id"
REQUEST_ID = b"x-request-id"
OF_SESSION = re.compile("/v1/sessions/([^/]+)(?:/.*)?")
OF_MANY = "/v1/sessions/tokens"  # the path for steps of many sessions
RESTART = 1012
UNANSWERED = "the replica ended before it answered: the request may or may not have been processed"


class Front:
    """Wraps Ray's proxy. Sets the session header of a request whose path has a session. A header with this name that
    the client has sent is replaced.

    A killed replica leaves its requests unanswered and its WebSockets open. The middleware answers these requests with
    502, and closes these WebSockets with 1012. A client may retry a request that has a position or an
    `Idempotency-Key`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        session = OF_SESSION.fullmatch(scope["path"])
        if session is not None and scope["path"] != OF_MANY:
            others = [pair for pair in scope["headers"] if pair[0] != SESSION_HEADER]
            scope = {**scope, "headers": [*others, (SESSION_HEADER, session[1].encode())]}
        begun = ended = False

        async def send_on(message: Message) -> None:
            nonlocal begun, ended
            if message["type"] == "http.response.start":
                message = {**message, "headers": once(message["headers"], REQUEST_ID)}
            begun = True
            ended = message["type"] == "websocket.close"
            await send(message)

        await self.app(scope, receive, send_on)
        if scope["type"] == "websocket":
            if not ended:
                await send({"type": "websocket.close", "code": RESTART})
        elif not begun:
            await unanswered(scope)(scope, receive, send)


def once(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    """Removes all headers of this name except the first, and returns the remaining headers. Ray's proxy adds a second
    header with the same name and value."""
    first = next((pair for pair in headers if pair[0].lower() == name), None)
    return [pair for pair in headers if pair[0].lower() != name or pair is first]


def unanswered(scope: Scope) -> JSONResponse:
    """Returns a problem document in the format of the application's problem documents."""
    document = {
        "type": "urn:wane:error:unanswered",
        "title": "Unanswered",
        "status": 502,
        "detail": UNANSWERED,
        "code": "unanswered",
        "retryable": False,
        "request_id": Headers(scope=scope).get(REQUEST_ID.decode()),
    }
    return JSONResponse(document, 502, media_type="application/problem+json")


def middlewares() -> list[Middleware]:
    """Returns the middlewares that Ray installs."""
    return [Middleware(Front)]
