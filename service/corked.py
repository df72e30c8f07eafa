"""One write for one answer.

uvicorn writes an answer's head and its body one after the other, and its WebSockets a frame's likewise; uvloop hands
each to the system at once. A system call, and a packet to wake the other side for, takes as long as a good part of
what an answer takes otherwise. Here what is written in one turn of the event loop is written together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LINGER_S = 30  # for the other side to take what is left to it when a connection is closed


def _never() -> bool:
    return False


class Corked:
    """A transport that holds back what is written until the event loop's next turn, or until there is a good deal."""

    MOST_BYTES = 1 << 16

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._bytes = 0
        self._has_ended = False
        self.delays_closing: Callable[[], bool] = _never  # whether whoever is asked will close it later

    def write(self, data: bytes) -> None:
        """As a transport's."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes >= self.MOST_BYTES:
            self.flush()

    def write_whole(self, data: bytes) -> None:
        """As `write`, of what nothing follows: it need not wait for that."""
        if self._held:
            self.write(data)
        else:
            self._write(data)

    def flush(self) -> None:
        """Writes what is held back."""
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._bytes = 0
            self._write(data)

    def _write(self, data: bytes) -> None:
        if not self._has_ended and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        """As a transport's: what was written before it still goes out, and nothing that is written later."""
        self.flush()
        self._has_ended = True
        self._transport.write_eof()

    def close(self) -> None:
        """As a transport's: what was written before it still goes out."""
        self.flush()
        if self.delays_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(LINGER_S, self._transport.abort)

    def let_go(self) -> None:
        """The connection is over. Whoever would be asked holds this, and would wait for the garbage collector."""
        self.delays_closing = _never

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)


class CorkedProtocol(HttpToolsProtocol):
    """uvicorn's, on such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Corked(transport, self.loop)))
