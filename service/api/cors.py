"""Allows pages of other origins to call the server from a browser (CORS, https://fetch.spec.whatwg.org).

Starlette's `CORSMiddleware` decides which requests are allowed. It does not wrap the application: `middleware.py` adds
its headers together with the other headers of every response.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wane.service.errors import Forbidden, truncate_repr

METHODS = ("DELETE", "GET", "HEAD", "POST")
EXPOSED = ("x-request-id", "retry-after", "location")
"""The response headers that a page of another origin may read, in addition to those that browsers always let a page
read."""


class CrossOrigin:
    """Decides which origins' pages may call the server. The server accepts no cookies. If the server has API keys, a
    page must therefore send a key."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins` are the allowed origins, such as `https://shop.example`. `*` allows every origin."""
        self._rules = CORSMiddleware(
            _nothing, allow_origins=origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED
        )
        self.headers = lru_cache(64)(self._headers)
        """Returns the CORS headers of the response to a request whose header `origin` is the argument."""

    def preflight(self, scope: Scope) -> Response | None:
        """Returns the response to a preflight request, with which a browser asks whether a page may send a request.
        Returns None for any other request. A preflight request has no API key."""
        headers = Headers(scope=scope)
        if scope["method"] != "OPTIONS" or "origin" not in headers or "access-control-request-method" not in headers:
            return None
        return self._rules.preflight_response(headers)

    def check_socket(self, headers: dict[bytes, bytes]) -> None:
        """Checks the origin of the page that opens a WebSocket. Raises Forbidden if the origin is not allowed. A client
        without the header `origin` is not a browser, and is allowed."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._rules.is_allowed_origin(origin):
            return
        # A page of this server may open a WebSocket, too. Its origin has the host of the header `host`.
        if urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
            raise Forbidden(f"pages of origin {truncate_repr(origin)} may not open a WebSocket of this server")

    def _headers(self, origin: bytes | None) -> Sequence[tuple[bytes, bytes]]:
        rules = self._rules
        if rules.allow_all_origins:
            allowed = b"*"
        elif origin is not None and rules.is_allowed_origin(origin.decode("latin-1")):
            allowed = origin
        else:
            return ((b"vary", b"origin"),)
        headers = (
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
        )
        return headers if rules.allow_all_origins else (*headers, (b"vary", b"origin"))


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
    raise AssertionError("the middleware is called as an application: this is a bug")
