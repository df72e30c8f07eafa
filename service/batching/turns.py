"""Spreads work that holds the event loop over several of its turns.

The requests of one batch are answered in one turn of the event loop. If each answer takes long, other sessions would
wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

HEAVY_TOKENS = 4096
"""The least number of tokens or events that are sorted or converted on another thread."""

TOKENS_A_TURN = 1 << 14
"""The number of tokens whose logits are read in one turn of the event loop, which takes about a millisecond. Work for
more tokens takes a turn of its own."""


T = TypeVar("T")


class Turns:
    """Limits the work of all callers together in one turn of the event loop. Work that takes a turn of its own waits
    only for other such work, and no other work waits for it."""

    def __init__(self) -> None:
        self._light, self._heavy = Queue(), Queue()

    async def take(self, tokens: int) -> None:
        """Returns in a turn that has room for work for so many tokens. Returns at once if there are no tokens."""
        if tokens:
            await (self._light if tokens <= TOKENS_A_TURN else self._heavy).take(tokens)

    async def run(self, tokens: int, function: Callable[[], T]) -> T:
        """Calls `function`, which reads the logits of so many tokens: in a turn that has room for it, or on another
        thread if they are many, because numpy then releases the interpreter lock."""
        if tokens >= HEAVY_TOKENS:
            return await asyncio.to_thread(function)
        await self.take(tokens)
        return function()


class Queue:
    """Callers that take room in the turns of the event loop, in the order of their calls."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._spent = 0

    async def take(self, tokens: int) -> None:
        """See `Turns.take`. Work that fits into the rest of a turn does not wait: callers that wait begin the next
        turn."""
        if not self._has_room(tokens) or (self._lock.locked() and not self._spent):
            async with self._lock:
                while not self._has_room(tokens):  # noqa: ASYNC110
                    await asyncio.sleep(0)
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._end)
        self._spent += tokens

    def _has_room(self, tokens: int) -> bool:
        return not self._spent or self._spent + tokens <= TOKENS_A_TURN

    def _end(self) -> None:
        self._spent = 0
