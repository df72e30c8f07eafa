"""Tests of requests for a model that the server is loading. A request waits until the model is loaded or the request's
deadline passes."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.service.api.test_problem import CATALOG_ROUTES
from tests.service.conftest import SocketServer, never
from tests.service.fake_engine import FakeEngine, FakeRegistry
from tests.service.problems import assert_members, assert_problem
from wane.service.app import create_app
from wane.service.errors import DeadlineExceeded
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

STEPS = {"steps": [{"session": "a", "tokens": [1]}, {"session": "b", "tokens": [1]}]}
SOON = {"x-request-timeout-ms": "1"}
KEY = "alice-0123456789abcdefgh"


# The fake engine has no answer to continuations.
@pytest.mark.parametrize(
    ("method", "path", "body"), [route for route in CATALOG_ROUTES if "continuations" not in route[1]], ids=str
)
async def test_a_request_is_answered_once_the_model_is_loaded(
    client: httpx.AsyncClient, registry: FakeRegistry, method: str, path: str, body: object
) -> None:
    loaded = registry.begin_loading()
    asking = asyncio.create_task(client.request(method, path, json=body))
    await registry.waiting.wait()
    assert registry.engine.asked == []
    loaded.set()
    assert (await asking).is_success


@pytest.mark.parametrize(("method", "path", "body"), CATALOG_ROUTES, ids=str)
async def test_a_request_that_waits_past_its_deadline_is_answered_504(
    client: httpx.AsyncClient, registry: FakeRegistry, method: str, path: str, body: object
) -> None:
    registry.begin_loading()
    response = await client.request(method, path, json=body, headers=SOON)
    assert_problem(response, 504, "deadline_exceeded")
    assert registry.engine.asked == []


async def test_a_step_that_waits_past_its_deadline_fails_alone(
    client: httpx.AsyncClient, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has loaded the default model, and is loading another model."""
    registry.begin_loading()
    monkeypatch.setattr(registry, "is_coming", lambda name=None: False)
    engine_for = registry.engine_for

    async def one_is_loaded(session: str, model: str | None = None, deadline: float | None = None) -> FakeEngine:
        return registry.engine if session == "a" else await engine_for(session, model, deadline)

    monkeypatch.setattr(registry, "engine_for", one_is_loaded)
    response = await client.post("/v1/sessions/tokens", json=STEPS, headers=SOON)
    failed = response.json()["results"][1]["error"]
    assert_members(failed, 504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/predict", {"tokens": [1]}), ("/v1/sessions/s/tokens", {"tokens": [1]})], ids=str
)
async def test_a_disconnection_cancels_the_wait_for_a_model(
    server: SocketServer, registry: FakeRegistry, caplog: pytest.LogCaptureFixture, path: str, body: object
) -> None:
    caplog.set_level("INFO")
    loaded = registry.begin_loading()
    content = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(*server.address)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: wane\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    await registry.waiting.wait()
    writer.close()
    await writer.wait_closed()
    while not (lines := [record for record in caplog.records if record.name == "wane.access"]):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert vars(lines[0])["fields"]["error"] == "abandoned"
    loaded.set()
    assert registry.engine.asked == []


async def test_a_request_without_a_key_does_not_wait() -> None:
    settings = Settings.read({"WANE_API_KEYS": f"alice:{KEY}"})
    registry = FakeRegistry()
    registry.begin_loading()
    app = create_app(settings, cast(ModelRegistry, registry), Metrics(), on_load_failure=never)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wane") as client:
        for method, path, body in CATALOG_ROUTES:
            response = await client.request(method, path, json=body)
            assert response.status_code == 401, path
        assert (await client.get("/v2/models/fake/ready")).status_code == 401
        response = await client.get("/v2/models/fake/ready", headers={"authorization": f"Bearer {KEY}"})
        assert (response.status_code, response.json()["code"]) == (503, "unavailable")
    assert not registry.waiting.is_set()


def stream_of(server: SocketServer) -> connect:
    return connect(server.url.replace("http", "ws", 1) + "/v1/sessions/s/stream", proxy=None)


async def test_a_websocket_waits_for_its_model(server: SocketServer, registry: FakeRegistry) -> None:
    loaded = registry.begin_loading()
    async with stream_of(server) as socket:
        await socket.send('{"tokens": [1]}')
        await registry.waiting.wait()
        assert registry.engine.asked == []
        loaded.set()
        assert json.loads(await socket.recv())["predictions"]


async def test_a_websocket_that_waits_past_its_deadline_is_closed_with_1012() -> None:
    registry = FakeRegistry()
    registry.begin_loading()
    settings = Settings(request_timeout_ms=1)
    app = create_app(settings, cast(ModelRegistry, registry), Metrics(), on_load_failure=never)
    server = SocketServer(app, registry)
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    async with stream_of(server) as socket:
        assert_members(json.loads(await socket.recv())["error"], 504, "deadline_exceeded")
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (1012, "deadline_exceeded")
    server.should_exit = True
    await serving


async def test_a_websocket_that_is_closed_during_the_wait_logs_no_error(
    server: SocketServer, registry: FakeRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    waiting, closed = asyncio.Event(), asyncio.Event()

    async def engine_for(session: str, model: str | None = None, deadline: float | None = None) -> FakeEngine:
        waiting.set()
        await closed.wait()
        raise DeadlineExceeded("the deadline passed while the server was loading the model")

    monkeypatch.setattr(registry, "engine_for", engine_for)
    async with stream_of(server):
        await waiting.wait()
    closed.set()
    while not any(record.name == "wane.access" for record in caplog.records):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await server.shutdown()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
