"""Tests of Ray Serve, which scripts/ray starts. Sessions continue when replicas are killed, added and removed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, Figures
from tests.stack.harness.command import WAIT_S
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepping
from tests.stack.harness.ray_command import OTHERS, OWN, OWNER, RayCommand
from tests.stack.harness.reference_run import ReferenceRun
from tests.stack.harness.session_client import SessionClient
from tests.stack.test_streams import RESTART, Streaming, step_each
from wane.service.api.middleware import POLICY
from wane.service.api.routes.stream import NO_SESSION

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 100
LONG = 10
STREAMS = 16
RATE = 0.5
SPOOFED = {"x-forwarded-for": "6.6.6.6", "x-request-id": "a-client-that-says-it-is-another"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder. Its path is so short that Unix sockets in it have paths of a valid length."""
    made = Path(tempfile.mkdtemp(prefix="wane-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def command(folder: Path) -> Iterator[RayCommand]:
    """The running command scripts/ray. The fixture stops the command at the end of the test."""
    started = RayCommand(folder)
    try:
        yield started
    finally:
        started.end()


async def a_step_each(clients: list[SessionClient]) -> None:
    await asyncio.gather(*(client.step((client.random.randrange(1, client.vocabulary),)) for client in clients))


async def asks_for_a_key(client: SessionClient) -> None:
    """Checks that requests without a key or with another client's key are rejected and do not change the session."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{client.port}", timeout=WAIT_S) as http:
        path = f"/v1/sessions/{client.session}"
        for keys, status in (({}, 401), ({"authorization": "Bearer none"}, 401), (OTHERS, 404), (OWN, 200)):
            answer = await http.get(path, headers=keys | SPOOFED)
            assert answer.status_code == status, answer.text
    assert answer.json()["position"] == client.position
    for keys, code in (({}, POLICY), (OTHERS, NO_SESSION)):
        async with connect(f"ws://127.0.0.1:{client.port}{path}/stream", additional_headers=keys) as socket:
            if code == NO_SESSION:  # the server waits for the first message, which may create the session
                await socket.send('{"tokens": [5]}')
            assert "error" in json.loads(await socket.recv())
            await socket.wait_closed()
        assert socket.close_code == code


async def test_a_hundred_sessions_continue_when_replicas_are_killed_added_and_removed(
    command: RayCommand, figures: Figures
) -> None:
    store = await asyncio.to_thread(command.until_store)
    pids = await asyncio.to_thread(command.until_ready, 2)
    first = [SESSION_HISTORY_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with (
        open_clients(command.port, first, headers=OWN) as clients,
        open_clients(command.port, [40] * STREAMS, name="stream", headers=OWN) as others,
    ):
        await asks_for_a_key(clients[0])
        streams = [Streaming(client) for client in others]
        await step_each(streams)
        sockets = [await stream.open() for stream in streams]

        positions = [client.position for client in clients]
        async with stepping(clients, RATE):
            os.kill(pids[0], signal.SIGKILL)
            await step_each(streams)
            after = await asyncio.to_thread(command.until_ready, 2, [pids[0]])
        await a_step_each(clients)
        assert all(client.position > before for client, before in zip(clients, positions, strict=True))
        killed_gap_s = longest_gap_s(clients)
        assert {stream.opened for stream in streams} == {1, 2}
        assert {socket.close_code for socket in sockets} == {None, RESTART}

        for client in clients:
            client.retries = False
            client.timed.clear()
        async with stepping(clients, RATE):
            await asyncio.to_thread(command.scale, 1)
            for stream in streams:  # a replica does not exit before its WebSockets are closed
                await stream.close()
            remaining = await asyncio.to_thread(command.until_ready, 1)
            await asyncio.to_thread(command.scale, 2)
            grown = await asyncio.to_thread(command.until_ready, 2)
        await a_step_each(clients)
        assert set(remaining) < set(after) and set(remaining) < set(grown)

        figures(
            repeated_by_clients=sum(client.repeated for client in clients),
            longest_gap_of_the_killed_s=killed_gap_s,
            longest_gap_while_scaled_s=longest_gap_s(clients),
        )
        assert failures(clients) == []
        assert await histories([*clients, *others], store, SESSION_HISTORY_TOKENS, OWNER) == []
    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(one.tokens, one.answers) for one in (*clients, *others)]
    )
    figures(compared=compared)
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0

    command.process.send_signal(signal.SIGINT)
    await asyncio.to_thread(command.until, "stopped\n".__eq__)
    assert command.process.wait(WAIT_S) == 0
    assert command.processes() == []
    assert command.logged(SPOOFED["x-request-id"])["client"] == "127.0.0.1"
