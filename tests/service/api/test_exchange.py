"""Tests of a request whose response cannot be written to the connection."""

from __future__ import annotations

import pytest
from starlette.types import Message, Scope

from tests.service.fake_engine import FakeEngine
from wane.service.app import Application


@pytest.mark.parametrize("path", ["/v1/sessions/s/tokens", "/v1/score"], ids=["hot", "framework"])
async def test_an_error_of_the_connection_is_raised_to_the_server(
    app: Application, engine: FakeEngine, path: str
) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"tokens": [1]}', "more_body": False}

    async def send(message: Message) -> None:
        raise OSError(f"cannot write {message['status']}")

    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    with pytest.raises(OSError, match="cannot write 200"):
        await app(scope, receive, send)
    assert len(engine.asked) == 1
