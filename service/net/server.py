"""uvicorn's server with limits for its connections. It calls a drain function before it stops listening. This module
does not depend on the application."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import FrameType

import uvicorn

from wane.service.net.connection import Answering, Connection
from wane.service.net.limits import Limits


def is_about_the_server(record: logging.LogRecord) -> bool:
    """Returns False for uvicorn's messages about invalid requests and frames, which a `Connection` counts and logs."""
    return not str(record.msg).startswith("Invalid ")


def limit_connections(config: uvicorn.Config, limits: Limits) -> None:
    """Loads uvicorn's configuration, and puts a `Connection` in front of uvicorn's protocol class."""
    config.load()
    logging.getLogger("uvicorn.error").addFilter(is_about_the_server)
    config.loaded_app = Answering(config.loaded_app)
    config.http_protocol_class = partial(Connection, config.http_protocol_class, limits)  # type: ignore[assignment]


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a drain before shutdown.

    On the first SIGTERM or SIGINT the server calls `drain`, and continues to serve until `drain` returns. Then it stops
    listening, and closes WebSockets with 1012. A second SIGINT stops the server immediately.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], Awaitable[None]],
        on_listening: Callable[[Sequence[tuple[str, int]]], None],
    ) -> None:
        """`on_listening` is called once, on the event loop's thread, with the host and the port of each listening
        socket."""
        super().__init__(config)
        self.draining: asyncio.Task[None] | None = None
        self._drain = drain
        self._on_listening = on_listening

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        listeners = [listener for server in self.servers for listener in server.sockets]
        self._on_listening([listener.getsockname()[:2] for listener in listeners])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started:
            super().handle_exit(sig, frame)
        elif self.draining is None:
            self.loop.call_soon_threadsafe(self._start_draining)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _start_draining(self) -> None:
        if self.draining is None:
            self.draining = self.loop.create_task(self._stop_drained())

    async def _stop_drained(self) -> None:
        try:
            await self._drain()
        finally:
            self.should_exit = True
