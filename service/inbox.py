"""What came on a WebSocket and nobody has taken yet, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Protocol

from service.alarms import Alarm, alarms
from service.errors import Abandoned

LINE = "wane.line"
"""Where a WebSocket's scope has the protocol that carries it, for as long as its route runs."""

PATIENCE_S = 0.05
"""Time that an answer has before it is given up for a client that has left: most are there sooner."""

MOST_EARLY = 16
"""Messages that are read while one is being answered: the rest stay in the network, which slows their sender down."""


Message = MutableMapping[str, Any]  # ASGI's


class Left(Exception):
    """The client is gone, and takes no answer any more."""


class Beginner(Protocol):
    """Who is shown what comes before anybody is given it."""

    def begin(self, message: str) -> bool:
        """Whether it takes a text; then nothing is given to anybody until it calls `go_on`."""
        ...

    def give_up(self) -> None:
        """The client has left meanwhile."""
        ...


class Inbox:
    """Takes the place of uvicorn's queue, for one who takes what comes.

        with inbox:
            answer = await engine.step(...)

    cancels the body of the `with` when the client goes away, and raises Abandoned in its place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[Message] = deque()
        self._came: asyncio.Future[None] | None = None
        self._alarm: Alarm | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._has_left = False
        self._abandoned = False
        self._held = False
        self.beginner: Beginner | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def empty(self) -> bool:
        """As a queue's."""
        return not self._messages

    def put_nowait(self, message: Message) -> None:
        """As a queue's. Behind a disconnection nothing comes that matters."""
        self._messages.append(message)
        self._wake_up()
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            if self._task is not None or self._held:
                self._give_up_soon()

    def put_back(self, message: Message) -> None:
        """In front of all others."""
        self._messages.appendleft(message)

    def _wake_up(self) -> None:
        if self._came is not None and not self._held and not self._came.done():
            self._came.set_result(None)

    def begins(self, text: str) -> bool:
        """Whether a text was taken by the beginner: while nothing else is here, and somebody waits for it."""
        if self.beginner is None or self._messages or self._held or self._came is None or self._came.done():
            return False
        self._held = self.beginner.begin(text)
        return self._held

    def go_on(self) -> None:
        """What the beginner took is over."""
        self._held = False
        self._at_ease()
        if self._messages:
            self._wake_up()

    async def get(self) -> Message:
        """As a queue's."""
        while self._held or not self._messages:
            came = self._came = self._loop.create_future()
            try:
                await came
            finally:
                if self._came is came:
                    self._came = None
        return self._messages.popleft()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "this is a bug: a message is always answered by a task"
        self._task = task
        self._cancelled_before = task.cancelling()
        if self._has_left:
            self._give_up_soon()

    def _give_up_soon(self) -> None:
        if self._alarm is None:
            self._alarm = alarms().at(self._loop.time() + PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        if self._task is not None:
            self._abandoned = True
            self._task.cancel()
        elif self._held and self.beginner is not None:
            self.beginner.give_up()

    def _at_ease(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._at_ease()
        if self._abandoned and task is not None:
            self._abandoned = False
            if task.uncancel() <= self._cancelled_before and kind is asyncio.CancelledError:
                raise Abandoned("the client hung up before the answer") from error
