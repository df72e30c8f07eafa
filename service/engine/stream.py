"""Streams of results, such as a generation's tokens or a score's log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

from wane.service.deadline import until
from wane.service.engine.backlog import Share

T = TypeVar("T")


class Stream(Generic[T]):
    """An asynchronous iterator over results. The caller must close it (`contextlib.aclosing`)."""

    def __init__(
        self, items: AsyncGenerator[T, None], first: T, share: Share, deadline: float | None, end: Callable[[], None]
    ) -> None:
        self._items = items
        self._first: T | None = first
        self._share = share
        self._deadline = deadline
        self._end: Callable[[], None] | None = end

    @classmethod
    async def begin(cls, items: AsyncGenerator[T, None], share: Share, deadline: float | None, held: ExitStack) -> Self:
        """Waits for the first result. A request that cannot be served therefore fails before its response starts.

        The stream takes over the resources in `held`, and releases them when it ends or is closed. The backlog counts
        `share` only while the caller waits for a result. A wait that passes the deadline raises DeadlineExceeded.
        """
        async with until(deadline):
            first = await anext(items)
        share.pause()
        return cls(items, first, share, deadline, held.pop_all().close)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        first, self._first = self._first, None
        if first is not None:
            return first
        self._share.resume()
        try:
            async with until(self._deadline):
                return await anext(self._items)
        except BaseException:
            self._over()
            raise
        finally:
            self._share.pause()

    async def aclose(self) -> None:
        """Ends the stream and releases its resources, even if results remain."""
        await self._items.aclose()
        self._over()

    def _over(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()
