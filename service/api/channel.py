"""A WebSocket as its route sees it: messages come, answers go, and somebody is there or not.

What comes to the application by ASGI passes the framework, layer by layer, in and out again for every message. Where
the server's own protocol carries the WebSocket (`service/net/websocket_protocol.py`), the route speaks with that.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from wane.service.api.disconnect import until_hangup
from wane.service.net.websocket_protocol import LINE, ClientDisconnected, ReceiveQueue


class Channel(Protocol):
    """One WebSocket that was accepted, for one who speaks on it."""

    async def receive(self) -> Message:
        """The next message: `websocket.receive`, or the last, `websocket.disconnect`."""
        ...

    async def say(self, text: bytes) -> None:
        """Sends a text. Raises ClientDisconnected where nobody is there any more."""
        ...

    async def hang_up(self, code: int, reason: str) -> None:
        """Closes it."""
        ...

    def until_hangup(self) -> AbstractContextManager[None]:
        """Cancels the body of the `with` when the client goes away, and raises Abandoned in its place."""
        ...


class NativeChannel(Channel, Protocol):
    """A line of the server's own."""

    receive_queue: ReceiveQueue

    def may_say(self) -> bool:
        """Whether its client reads what it is told."""
        ...

    def say_now(self, text: bytes) -> bool:
        """As `say`, at once; False where nobody is there any more."""
        ...


def wire_of(socket: WebSocket) -> NativeChannel | None:
    """The server's own, where it has one."""
    wire: NativeChannel | None = socket.scope.get(LINE)
    return wire


class AsgiChannel:
    """By way of the framework, whatever server there is."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._early: deque[Message] = deque()

    async def receive(self) -> Message:
        return self._early.popleft() if self._early else await self._socket.receive()

    async def say(self, text: bytes) -> None:
        try:
            await self._socket.send({"type": "websocket.send", "text": text.decode()})
        except WebSocketDisconnect as left:
            raise ClientDisconnected from left

    async def hang_up(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)

    def until_hangup(self) -> until_hangup:
        return until_hangup(self._socket, self._early)
