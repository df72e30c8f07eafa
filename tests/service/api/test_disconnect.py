"""Tests that a disconnection cancels the request, with a real socket and a real uvicorn server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest

from tests.service.conftest import SocketServer, never
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import TIMEOUT_S
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings


async def leave(server: SocketServer, path: str, body: object, method: str = "POST") -> None:
    """Sends a request, closes the connection when the engine has the request, and waits until the engine's wait is
    cancelled."""
    engine = server.registry.engine
    engine.wait = asyncio.Event()
    _, writer = await asyncio.open_connection(*server.address)
    content = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: wane\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await engine.waiting.wait()
    writer.close()
    await writer.wait_closed()
    await engine.cancelled.wait()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/predict", {"tokens": [1]}),
        ("/v1/predict", {"inputs": [[1], [2]]}),
        ("/v1/predict", {"session": "s"}),
        ("/v1/compare", {"tokens": [1]}),
        ("/v1/score", {"tokens": [1]}),
        ("/v1/generate", {"tokens": [1]}),
        ("/v1/generate", {"tokens": [1], "stream": True}),
        ("/v1/sessions/s/tokens", {"tokens": [1]}),
        ("/v1/sessions/s/rewind", {"position": 0}),
        ("/v1/sessions/s", None),
    ],
    ids=str,
)
async def test_a_disconnection_cancels_the_wait_for_the_engine(server: SocketServer, path: str, body: object) -> None:
    await leave(server, path, body, "DELETE" if body is None else "POST")


@pytest.fixture
async def roomy() -> AsyncIterator[SocketServer]:
    """A server with the default limits."""
    app = create_app(Settings(), cast(ModelRegistry, FakeRegistry()), Metrics(), on_load_failure=never)
    app.state.registry = registry = FakeRegistry()
    server = SocketServer(app, registry)
    task = asyncio.create_task(server.serve())
    await server.listening.wait()
    yield server
    server.should_exit = True
    await task


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/sessions/s/tokens"])
async def test_a_disconnection_after_a_large_body_is_noticed(roomy: SocketServer, path: str) -> None:
    """uvicorn pauses reading when it has 64 KiB of a body."""
    await leave(roomy, path, {"tokens": [1] * 40_000})


async def test_the_access_log_has_499_for_a_disconnection(
    server: SocketServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await leave(server, "/v1/predict", {"tokens": [1]})
    server.should_exit = True  # the server then ends after the last request in flight
    while server.server_state.tasks:
        await asyncio.gather(*server.server_state.tasks)
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert (fields["status"], fields["error"]) == (499, "abandoned")


async def test_a_disconnection_closes_a_streamed_generation(server: SocketServer, engine: FakeEngine) -> None:
    engine.wait_after_first_token = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/generate", json={"tokens": [1], "stream": True}) as response,
    ):
        first = await anext(response.aiter_lines())
        assert first == "event: token"
    await engine.closed.wait()
