"""Tests of a dispatched request whose response cannot be written to the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.service.fake_engine import FakeEngine, FakeRegistry
from wane.service.app import Application


class FailingSink:
    """A connection that raises an error when a response is written."""

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        raise OSError(f"cannot write {status}")


def dispatch(app: Application) -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/s/tokens", "headers": []}
    assert app.dispatcher.matches(scope)
    app.dispatcher.dispatch(scope, b'{"tokens": [1]}', FailingSink())


async def test_an_immediate_write_error_is_raised_to_the_connection(app: Application, engine: FakeEngine) -> None:
    with pytest.raises(OSError, match="cannot write 200"):
        dispatch(app)


async def test_a_later_write_error_is_raised_to_the_event_loop(
    app: Application, registry: FakeRegistry, engine: FakeEngine
) -> None:
    loop = asyncio.get_running_loop()
    raised: asyncio.Future[Exception] = loop.create_future()
    loop.set_exception_handler(lambda _, context: raised.set_result(context["exception"]))
    engine.wait = asyncio.Event()
    dispatch(app)
    engine.wait.set()
    assert str(await raised) == "cannot write 200"
