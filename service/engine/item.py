"""What waits for a runner, and who is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from service.engine.batch import Row, Work
from service.engine.ticket import Ticket
from service.errors import WaneError


class Item(Protocol):
    """Work that waits, and since when."""

    work: Work
    ticket: Ticket
    queued_s: float

    def left(self) -> bool:
        """Whether nobody waits any more, and the work may be skipped."""
        ...

    def fail(self, error: WaneError) -> None:
        """There will be no row. Raises nothing."""
        ...

    def give(self, row: Row) -> None:
        """Its row is there. Raises nothing."""
        ...


class Awaited:
    """An item of somebody who awaits its row."""

    __slots__ = ("_future", "queued_s", "ticket", "work")

    def __init__(self, work: Work, ticket: Ticket, future: asyncio.Future[Row]) -> None:
        self.work = work
        self.ticket = ticket
        self.queued_s = 0.0
        self._future = future

    def left(self) -> bool:
        """See `Item`."""
        return self._future.cancelled()

    def fail(self, error: WaneError) -> None:
        """See `Item`."""
        if not self._future.done():
            self._future.set_exception(error)

    def give(self, row: Row) -> None:
        """See `Item`."""
        if not self._future.done():
            self._future.set_result(row)


def enter(items: Sequence[Item]) -> None:
    """They are in a batch that begins."""
    for item in items:
        if item.work.binding:
            item.ticket.entered = True
