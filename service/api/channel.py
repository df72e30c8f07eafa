"""Sends and receives the messages of a WebSocket.

In the framework, every ASGI message passes through several layers of functions, which takes time. If the server's own
protocol (`service/net/websocket_protocol.py`) handles the WebSocket, the route uses that protocol directly as its
channel.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from wane.service.api.disconnect import until_hangup
from wane.service.net.receive_queue import CHANNEL, ClientDisconnected


class Channel(Protocol):
    """An accepted WebSocket."""

    async def receive(self) -> Message:
        """Returns the next ASGI message. It is a `websocket.receive`, or a `websocket.disconnect` as the last
        message."""
        ...

    async def send_text(self, text: bytes) -> None:
        """Sends a text message. Waits first until the client has read enough of the earlier messages. Raises
        ClientDisconnected."""
        ...

    async def send_close(self, code: int, reason: str) -> None:
        """Closes the WebSocket."""
        ...

    def until_hangup(self) -> AbstractContextManager[None]:
        """Cancels the body of the `with` when the client disconnects, and raises Abandoned."""
        ...


def channel_of(socket: WebSocket) -> Channel:
    """Returns the server's own protocol object if this object handles the WebSocket. Otherwise returns a channel that
    uses the framework."""
    native: Channel | None = socket.scope.get(CHANNEL)
    return AsgiChannel(socket) if native is None else native


class AsgiChannel:
    """A channel that works with any ASGI server."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._early: deque[Message] = deque()

    async def receive(self) -> Message:
        return self._early.popleft() if self._early else await self._socket.receive()

    async def send_text(self, text: bytes) -> None:
        try:
            await self._socket.send({"type": "websocket.send", "text": text.decode()})
        except WebSocketDisconnect as left:
            raise ClientDisconnected from left

    async def send_close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)

    def until_hangup(self) -> until_hangup:
        return until_hangup(self._socket, self._early)
