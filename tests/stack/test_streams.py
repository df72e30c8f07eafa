"""Tests of WebSockets through HAProxy. A killed replica breaks its WebSockets, a stopped replica closes its WebSockets,
and clients continue at another replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, MakeStack
from tests.stack.harness.history import Append, Outcome
from tests.stack.harness.load_generator import VOCABULARY, histories, open_clients
from tests.stack.harness.reference_run import ReferenceRun
from tests.stack.harness.session_client import SessionClient

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 12
RESTART = 1012
STEPS = 40


class Streaming:
    """A session's client over a WebSocket. Each message has an expected position. When a WebSocket ends, the client
    opens a new one."""

    def __init__(self, client: SessionClient) -> None:
        self.client = client
        self.random = Random(client.session)
        self.opened = 0
        self.socket: ClientConnection | None = None

    async def open(self) -> ClientConnection:
        """Returns the open WebSocket. Opens a new one if none is open."""
        while self.socket is None:
            try:
                self.socket = await connect(
                    f"ws://127.0.0.1:{self.client.port}/v1/sessions/{self.client.session}/stream",
                    additional_headers=self.client.headers,
                )
                self.opened += 1
            except (OSError, InvalidHandshake):
                await asyncio.sleep(0.05)
        return self.socket

    async def step(self) -> None:
        """Sends a step of one token, and repeats the step until the server answers."""
        client = self.client
        token = self.random.randrange(1, VOCABULARY)
        invoked = asyncio.get_running_loop().time()
        while True:
            socket = await self.open()
            try:
                await socket.send(json.dumps({"tokens": [token], "expected_position": client.position}))
                answer = json.loads(await socket.recv())
            except ConnectionClosed:
                self.socket = None
                continue
            if answer.get("error", {}).get("status") == 503:
                continue
            assert "error" not in answer, answer
            break
        ended = asyncio.get_running_loop().time()
        client.history.append(Append((token,), Outcome.ACKNOWLEDGED, client.position, invoked, ended))
        client.position = answer["position"]
        client.tokens.append(token)
        client.answers[client.position] = answer

    async def closed(self) -> int | None:
        """Returns the code with which the server closed the WebSocket, or None if the server still answers."""
        assert self.socket is not None
        try:
            await (await self.socket.ping())
        except ConnectionClosed:
            return self.socket.close_code
        return None

    async def close(self) -> None:
        """Closes the WebSocket and opens no new one."""
        if self.socket is not None:
            await self.socket.close()


async def test_streams_cut_off_by_a_killed_replica_continue_at_another(make_stack: MakeStack) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    async with open_clients(stack.port, [40] * SESSIONS) as clients:
        streams = [Streaming(client) for client in clients]
        await step_each(streams)
        assert [stream.opened for stream in streams] == [1] * SESSIONS

        await asyncio.to_thread(stack.replicas[0].kill)
        await step_each(streams)
        assert {stream.opened for stream in streams} == {1, 2}

        stack.replicas[1].terminate()
        assert await asyncio.to_thread(stack.replicas[1].wait) == 0
        closed = [code for stream in streams if (code := await stream.closed()) is not None]
        assert closed and set(closed) == {RESTART}
        await step_each(streams)
        for stream in streams:
            await stream.close()
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []
    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(client.tokens, client.answers) for client in clients]
    )
    assert compared.broken == () and compared.rebuilt > 0


async def step_each(streams: Sequence[Streaming]) -> None:
    """Sends STEPS steps of each client."""
    for _ in range(STEPS):
        await asyncio.gather(*(stream.step() for stream in streams))
