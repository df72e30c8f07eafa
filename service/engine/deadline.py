"""A time after which nobody waits for an answer any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import DeadlineExceeded


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Cancels the body of the `async with` at `deadline`, seconds on the event loop's clock, and raises
    DeadlineExceeded in its place. None is never."""
    timeout = asyncio.timeout_at(deadline)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if timeout.expired():
            raise DeadlineExceeded("the deadline passed before the answer was there") from error
        raise
