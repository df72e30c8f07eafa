"""Tests that a disconnection cancels the request, with a real socket and a real uvicorn server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest

from tests.service.conftest import SocketServer, never
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.live_server import TIMEOUT_S, LiveServer
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings


def request_bytes(path: str, body: object, method: str = "POST") -> bytes:
    """Returns the bytes of a whole HTTP request."""
    content = json.dumps(body).encode()
    return f"{method} {path} HTTP/1.1\r\nhost: wane\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def send(server: tuple[str, int], path: str, body: object, method: str = "POST") -> asyncio.StreamWriter:
    """Sends a request without reading its answer."""
    _, writer = await asyncio.open_connection(*server)
    writer.write(request_bytes(path, body, method))
    await writer.drain()
    return writer


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
    ],
    ids=str,
)
async def test_a_disconnection_cancels_the_wait_for_the_engine(
    server: SocketServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture, path: str, body: object
) -> None:
    engine.wait = asyncio.Event()
    writer = await send(server.address, path, body)
    await engine.waiting.wait()
    writer.close()
    await writer.wait_closed()
    await engine.cancelled.wait()


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
    engine = roomy.registry.engine
    engine.wait = asyncio.Event()
    writer = await send(roomy.address, path, {"tokens": [1] * 40_000})
    await engine.waiting.wait()
    writer.close()
    await writer.wait_closed()
    await engine.cancelled.wait()


async def test_a_disconnection_cancels_the_deletion_of_a_session(
    server: SocketServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.wait = asyncio.Event()
    writer = await send(server.address, "/v1/sessions/s", {}, "DELETE")
    await engine.waiting.wait()
    writer.close()
    await writer.wait_closed()
    await engine.cancelled.wait()


async def test_the_access_log_has_499_for_a_disconnection(
    server: SocketServer, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine.wait = asyncio.Event()
    writer = await send(server.address, "/v1/predict", {"tokens": [1]})
    await engine.waiting.wait()
    writer.close()
    await writer.wait_closed()
    await engine.cancelled.wait()
    server.should_exit = True  # the server then ends after the last request in flight
    while server.server_state.tasks:
        await asyncio.gather(*server.server_state.tasks)
    (fields,) = [vars(record)["fields"] for record in caplog.records if record.name == "wane.access"]
    assert (fields["status"], fields["error"]) == (499, "abandoned")


async def test_a_connected_client_receives_its_answer(server: SocketServer, engine: FakeEngine) -> None:
    engine.wait = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        asking = asyncio.create_task(client.post("/v1/predict", json={"tokens": [1]}))
        await engine.waiting.wait()
        engine.wait.set()
        assert (await asking).status_code == 200
    assert not engine.cancelled.is_set()


async def test_a_disconnection_closes_a_streamed_generation(server: SocketServer, engine: FakeEngine) -> None:
    engine.wait_after_first_token = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/generate", json={"tokens": [1], "stream": True}) as response,
    ):
        first = await anext(response.aiter_lines())
        assert first == "event: token"
    await engine.closed.wait()


def test_a_step_retried_after_a_disconnection_is_appended_once(live: LiveServer, http: httpx.Client) -> None:
    session = http.post("/v1/sessions", json={}).json()["session"]
    path = f"/v1/sessions/{session}/tokens"
    step = {"tokens": [5, 6, 7], "expected_position": 0}
    url = httpx.URL(live.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(request_bytes(path, step))
    again = http.post(path, json=step).json()
    assert again["position"] == 3
    assert http.get(f"/v1/sessions/{session}").json()["position"] == 3
