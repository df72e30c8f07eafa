"""A client that hangs up stops the work done for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from service.errors import Abandoned


@asynccontextmanager
async def until_hangup(request: Request) -> AsyncIterator[None]:
    """Cancels the body of the `async with` when the client goes away, and raises Abandoned in its place.

        async with until_hangup(request):
            answer = await engine.step(...)

    The request's body must have been read: after it the server has but one message to give, `http.disconnect`.
    What had entered a batch when the client left is finished by the engine, and can be replayed.
    """
    task = asyncio.current_task()
    assert task is not None, "this is a bug: a request is always served by a task"
    cancelled_before = task.cancelling()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError as error:
        if gone and task.uncancel() <= cancelled_before:
            raise Abandoned("the client hung up before the answer") from error
        raise
    finally:
        watcher.cancel()
