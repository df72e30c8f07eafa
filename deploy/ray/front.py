"""What stands in each of Ray's proxies, before its router: it says which session a request is of, and answers where
Ray does not.

Ray calls `middlewares` where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. `x-session-id` is the header that
Ray's router hashes by.
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
OF_MANY = "/v1/sessions/tokens"  # steps of many sessions are posted there
RESTART = 1012
UNANSWERED = "the replica ended before it answered: what was asked of it was done, or was not"


class Front:
    """Wraps Ray's proxy. A request for a path of one session is given that session's header, whatever header it had.

    A replica that is killed leaves its requests without an answer, and its WebSockets without an end. They are told:
    502, whose client may ask again where it has named a position or an `Idempotency-Key`; and 1012.
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
    """The headers with one of that name: Ray's proxy adds its own to the application's, and they are the same."""
    first = next((pair for pair in headers if pair[0].lower() == name), None)
    return [pair for pair in headers if pair[0].lower() != name or pair is first]


def unanswered(scope: Scope) -> JSONResponse:
    """A problem document, as the application's are."""
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
    """What Ray asks for."""
    return [Middleware(Front)]
