"""What waits for a runner, and who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.engine.batch import Row, Work
from service.engine.ticket import Ticket
from service.errors import WaneError


class Waiter(Protocol):
    """Who waits for a row: an `asyncio.Future` of it is one."""

    def cancelled(self) -> bool:
        """Whether it has left, and its work may be skipped."""
        ...

    def done(self) -> bool:
        """Whether it wants to be told nothing any more."""
        ...

    def set_result(self, row: Row, /) -> None:
        """Its row is there. Raises nothing."""
        ...

    def set_exception(self, error: WaneError, /) -> None:
        """There will be none. Raises nothing."""
        ...


@dataclass(slots=True, eq=False)
class Item:
    """Work that waits, for whom, and since when."""

    work: Work
    ticket: Ticket
    future: Waiter
    queued_s: float


def enter(items: Sequence[Item]) -> None:
    """They are in a batch that begins."""
    for item in items:
        item.ticket.entered |= item.work.binding
