"""HTTP whose requests that come whole, and are for the fast path, do not go by way of the application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from wane.service.api.exchange import InFlight
from wane.service.api.fast_path import FastPath
from wane.service.net.http_protocol import BufferedTransport, HttpProtocol

CLOSE = (b"connection", b"close")


class ProxyHeaders:
    """Notes in a request's scope what trusted proxies say of who is at their other end; as uvicorn's middleware, which
    is what does it, on the way to the application. Twice is as good as once."""

    def __init__(self, trusted: str) -> None:
        """`trusted`: as uvicorn takes them."""
        self._middleware = ProxyHeadersMiddleware(_nobody, trusted)

    def __call__(self, scope: Any) -> None:
        waiting = self._middleware(scope, _nothing, _nothing)
        try:
            waiting.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits for the application only")


async def _nobody(*_: Any) -> None:
    """An application."""


async def _nothing(*_: Any) -> Any:
    """What the application would be given."""


class InlineHttpProtocol(HttpProtocol):
    """HTTP with a fast path, if one is given."""

    def __init__(
        self, *given: Any, fast_path: FastPath | None = None, proxy_headers: ProxyHeaders | None = None, **named: Any
    ) -> None:
        """`proxy_headers`: what proxies say, where there are any."""
        super().__init__(*given, **named)
        self.fast_path = fast_path
        self.proxy_headers = proxy_headers
        self.reads = False  # something that came is being looked at
        self.held: tuple[RequestResponseCycle, ASGI3Application] | None = None  # until it is seen what has come of it
        self.underway: InFlight | None = None

    def data_received(self, data: bytes) -> None:
        self.reads = True
        try:
            super().data_received(data)
        finally:
            self.reads = False
            if self.held is not None:
                self.begin(*self.held)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self.reads and self.fast_path is not None and self.fast_path.leads_to(cast(dict[str, Any], cycle.scope)):
            self.held = cycle, app
            self.running = cycle
        else:
            super()._start_asgi_task(cycle, app)

    def begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Takes a request to where it is answered."""
        self.held = None
        if self.fast_path is not None and self.may_be_fast(cycle):
            scope = cast(dict[str, Any], cycle.scope)
            if self.proxy_headers is not None:
                self.proxy_headers(scope)
            underway = self.fast_path.begin(scope, bytes(cycle.body), HttpResponder(self, cycle))
            if underway is not None:
                if not underway.over:
                    self.underway = underway
                return
        super()._start_asgi_task(cycle, app)

    def may_be_fast(self, cycle: RequestResponseCycle) -> bool:
        """Whether a request is all there, and whoever sent it reads what is answered."""
        return not (cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue or self.flow.write_paused)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        underway, self.underway = self.underway, None
        if underway is not None:
            underway.hang_up()


def _told() -> None:
    """The protocol knows that the response is over."""


class HttpResponder:
    """Writes the answer to one request."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: InlineHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes it, whole; nothing where the client has gone."""
        cycle, protocol = self._cycle, self._protocol
        protocol.underway = None
        on_response, cycle.on_response = cycle.on_response, _told  # it holds the protocol, which holds the cycle
        cycle.response_started = cycle.response_complete = True
        if cycle.disconnected:
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if CLOSE in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        cast(BufferedTransport, protocol.transport).write_whole(b"".join(parts))
        if not cycle.keep_alive:
            protocol.transport.close()
        on_response()
