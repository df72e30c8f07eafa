"""A queue of the messages that a WebSocket has received and its route has not read yet. This module does not depend on
uvicorn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

from wane.service.aio.eager import Waiter
from wane.service.aio.interrupt import Interrupt
from wane.service.aio.timers import Timer, timers
from wane.service.errors import Abandoned

CHANNEL = "wane.channel"
"""The key under which a WebSocket's ASGI scope holds its protocol object while its route runs."""

DISCONNECT_GRACE_S = 0.05
"""The time in seconds between a client's disconnection and the cancellation of its request. Most answers are ready
before this time has passed."""

MOST_EARLY = 16
"""When this number of messages is queued, the server pauses reading from the connection. Later messages stay in the
kernel's buffers, and TCP then slows the sender down."""

Message = MutableMapping[str, Any]  # an ASGI message


class ClientDisconnected(Exception):
    """The client has disconnected."""


class ReceiveQueue:
    """A queue for one reader, in place of uvicorn's asyncio.Queue. `with receive_queue:` cancels the body of the `with`
    when the client disconnects, and raises Abandoned.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Message] = deque()
        self._reader: Waiter[None] | None = None
        self._timer: Timer | None = None
        self._interrupt: Interrupt | None = None
        self._has_left = False

    def __len__(self) -> int:
        return len(self._messages)

    def empty(self) -> bool:
        return not self._messages

    def put_nowait(self, message: Message) -> None:
        """Adds a message. The reader resumes in the event loop's next iteration."""
        self._messages.append(message)
        if self._reader is not None:
            self._loop.call_soon(self._wake)
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            if self._interrupt is not None:
                self._interrupt_soon()

    def put_now(self, message: Message) -> None:
        """Adds a message like `put_nowait`, but the reader resumes before this method returns."""
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.resolve(None)

    async def get(self) -> Message:
        """Waits for a message, removes it from the queue, and returns it."""
        while not self._messages:
            reader: Waiter[None] = Waiter()
            self._reader = reader
            try:
                await reader
            finally:
                if self._reader is reader:
                    self._reader = None
        return self._messages.popleft()

    def __enter__(self) -> None:
        self._interrupt = Interrupt()
        if self._has_left:
            self._interrupt_soon()

    def _interrupt_soon(self) -> None:
        if self._timer is None and self._interrupt is not None:
            self._timer = timers().at(self._loop.time() + DISCONNECT_GRACE_S, self._interrupt.fire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if interrupt is not None and interrupt.ended(kind):
            raise Abandoned("the client disconnected before the answer was ready") from error
