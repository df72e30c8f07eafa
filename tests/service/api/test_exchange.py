"""A request that was dispatched, when its answer cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.service.fake_engine import FakeEngine, FakeRegistry
from wane.service.app import Application


class FailingSink:
    """Cannot write a response."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        raise OSError(f"cannot write {status}")


def dispatch(app: Application) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/s/tokens", "headers": []}
    assert app.dispatcher.matches(scope)
    app.dispatcher.dispatch(scope, b'{"tokens": [1]}', FailingSink())


async def test_an_answer_that_cannot_be_written_at_once_is_an_error_of_the_connection(
    app: Application, engine: FakeEngine
) -> None:
    with pytest.raises(OSError, match="cannot write 200"):
        dispatch(app)


async def test_an_answer_that_cannot_be_written_later_is_an_error_of_the_event_loop(
    app: Application, registry: FakeRegistry, engine: FakeEngine
) -> None:
    loop = asyncio.get_running_loop()
    told: asyncio.Future[Exception] = loop.create_future()
    loop.set_exception_handler(lambda _, context: told.set_result(context["exception"]))
    engine.wait = asyncio.Event()
    dispatch(app)
    engine.wait.set()
    assert str(await told) == "cannot write 200"
