"""Tests that finished requests and connections leave no garbage. Each test runs in a new process."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Scope

from tests.service.alone import alone, live_objects
from tests.service.engine_harness import EngineHarness
from tests.service.server_harness import served
from tests.service.slow_client import GET, HANDSHAKE, frame, serving
from wane.service.api.disconnect import DISCONNECT_GRACE_S, until_hangup
from wane.service.errors import WaneError
from wane.service.net.connection import CONNECTION, Connection

TURNS = 100  # the number of event loop iterations that the server has for its cleanup


class OpenConnection:
    """A stand-in for the `Connection` of a request."""

    has_ended = False
    on_lost: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()


async def watch_a_request() -> None:
    """Makes a request whose client disconnects, and ends the request before it is cancelled."""
    connection = OpenConnection()
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {CONNECTION: connection}}
    with until_hangup(Request(scope)):
        assert connection.on_lost is not None
        connection.on_lost()
    await asyncio.sleep(DISCONNECT_GRACE_S)  # a cancelled timer is freed when its time has come
    assert not live_objects(until_hangup)


async def connect_and_leave() -> None:
    """Opens three connections. On each connection, sends one request, reads the answer, and closes the connection."""
    async with serving() as server:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(GET)
            assert (await reader.readline()).endswith(b" 200 OK\r\n")
            writer.write_eof()
            await reader.read()  # waits until the server has closed the connection
            writer.close()
            await writer.wait_closed()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not live_objects(Connection)


async def leave_within_a_message(first: bytes) -> None:
    """Opens three WebSockets. On each WebSocket, sends the bytes `first`, which are the start of a message, and closes
    the connection."""
    async with serving() as server:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(HANDSHAKE)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            writer.write_eof()
            await reader.read()
            writer.close()
            await writer.wait_closed()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not live_objects(Connection)


async def leave_within_a_frame() -> None:
    await leave_within_a_message(frame(0x81, b"{" * 100)[:50])


async def leave_behind_a_fragment() -> None:
    await leave_within_a_message(frame(0x01, b"{" * 100))


REFUSED: dict[str, Any] = {
    "/v1/sessions/tokens": {
        "steps": [
            {"session": "unknown", "tokens": [1]},
            {"session": "a", "tokens": [], "create": True},
            {"session": "b", "tokens": [10**6], "create": True},
            {"session": "c", "tokens": [1], "create": True},
            {"session": "c", "tokens": [1], "expected_position": 5},
            {"session": "c", "tokens": [1]},
            {"session": "d", "tokens": [1], "create": True, "candidates": [7], "exclude": [7]},
        ]
    },
    "/v1/predict": {"inputs": [[], [1], [10**6], "x" * 9, [1] * 9]},
}
"""Calls of many requests, most of which fail."""


async def refuse_rows() -> None:
    """Sends calls of many requests that fail."""
    harness = EngineHarness(settings_max_input_tokens=8)
    async with served(harness) as server:
        gc.collect()
        gc.disable()
        for _ in range(3):
            for path, body in REFUSED.items():
                answer = await asyncio.to_thread(httpx.post, server.url + path, json=body, trust_env=False)
                assert answer.status_code == 200
                assert answer.text.count('"error"') >= 3
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not live_objects(WaneError)
    await harness.engine.close()


async def start_a_server() -> None:
    """Starts a server. It has then imported what the first streamed answer would import."""
    harness = EngineHarness()
    async with served(harness):
        assert "anyio._backends._asyncio" in sys.modules
    await harness.engine.close()


def test_the_server_imports_the_backend_of_anyio_when_it_starts() -> None:
    alone(start_a_server)


@pytest.mark.parametrize(
    "what", [watch_a_request, connect_and_leave, leave_within_a_frame, leave_behind_a_fragment, refuse_rows]
)
def test_finished_requests_and_connections_leave_no_garbage(what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    alone(what)
