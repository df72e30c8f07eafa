"""A WebSocket as its route sees it: messages come, answers go, and the client may leave.

What comes to the application by ASGI passes the framework, layer by layer, in and out again for every message. Where
the server's own protocol carries the WebSocket (`service/net/websocket_protocol.py`), that protocol is the channel.
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
    """One WebSocket that was accepted."""

    async def receive(self) -> Message:
        """The next message: `websocket.receive`, or the last, `websocket.disconnect`."""
        ...

    async def send_text(self, text: bytes) -> None:
        """Sends a text, once the client reads what it was sent before. Raises ClientDisconnected."""
        ...

    async def send_close(self, code: int, reason: str) -> None:
        """Closes it."""
        ...

    def until_hangup(self) -> AbstractContextManager[None]:
        """Ends the body of the `with` when the client goes away, and raises Abandoned in its place."""
        ...


def channel_of(socket: WebSocket) -> Channel:
    """The server's own protocol, where it carries the WebSocket; else one that goes by way of the framework."""
    native: Channel | None = socket.scope.get(CHANNEL)
    return AsgiChannel(socket) if native is None else native


class AsgiChannel:
    """A channel on any server."""

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
