"""Tests of routing and retries of the real HAProxy with its real configuration, in front of fake replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from deploy.stack.local import PROXIES, ROOT
from tests.service.live_server import live_server
from tests.service.sessions.stores.redis_server import free_port, program
from tests.stack.conftest import BUNDLE
from tests.stack.harness.connection import Connection, Reply
from tests.stack.harness.replicas import Replica, three_replicas
from tests.stack.harness.states import WAIT_S, until

pytestmark = pytest.mark.stack

CONFIGURATION = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
SESSIONS = [f"session-{number}" for number in range(60)]


class Balanced:
    """A running HAProxy and the fake replicas to which it routes."""

    def __init__(self, replicas: list[Replica], port: int, operations: int) -> None:
        self.replicas = replicas
        self.port = port
        self.operations = operations

    async def ask(self, path: str, **headers: str) -> Reply:
        """Sends a request over a new connection."""
        connection = Connection(self.port)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await connection.ask("POST", path, {"tokens": [1]}, named)
        finally:
            connection.close()

    async def replica_of(self, path: str, **headers: str) -> int:
        reply = await self.ask(path, **headers)
        assert reply.status == 200
        return int(reply.document["replica"])

    async def replica_of_each(self) -> dict[str, int]:
        """Returns, for each session, the number of the replica that answers the session's requests."""
        return {session: await self.replica_of(f"/v1/sessions/{session}/tokens") for session in SESSIONS}

    def asked(self) -> int:
        """Returns the number of requests that have reached a replica."""
        return sum(len(replica.asked) for replica in self.replicas)


@asynccontextmanager
async def haproxy(replicas: list[Replica], **variables: str) -> AsyncIterator[Balanced]:
    balanced = Balanced(replicas, free_port(), free_port())
    addresses = {f"REPLICA_{replica.number + 1}": f"127.0.0.1:{replica.port}" for replica in replicas}
    listening = {"LISTEN": f"127.0.0.1:{balanced.port}", "OPERATIONS": f"127.0.0.1:{balanced.operations}"}
    process = await asyncio.create_subprocess_exec(
        program("haproxy"), "-db", "-f", str(CONFIGURATION), env={**os.environ, **addresses, **listening, **variables},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        async with asyncio.timeout(WAIT_S):
            while True:
                assert process.returncode is None, (await process.stderr.read()).decode()
                try:
                    await until(balanced.operations, wane_1="UP", wane_2="UP", wane_3="UP")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
        yield balanced
    finally:
        process.terminate()
        await process.communicate()


@pytest.fixture
async def balanced() -> AsyncIterator[Balanced]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(haproxy(await stack.enter_async_context(three_replicas())))


async def test_a_session_stays_with_one_replica_and_sessions_are_spread(balanced: Balanced) -> None:
    homes = await balanced.replica_of_each()
    assert await balanced.replica_of_each() == homes
    shares = [list(homes.values()).count(number) for number in range(3)]
    assert min(shares) >= len(SESSIONS) / 6


@pytest.mark.parametrize("path", ["/v1/sessions/{}", "/v1/sessions/{}/stream", "/v1/sessions/{}/rewind?x=1"])
async def test_a_session_has_one_replica_for_every_route(balanced: Balanced, path: str) -> None:
    homes = await balanced.replica_of_each()
    assert {session: await balanced.replica_of(path.format(session)) for session in SESSIONS} == homes


async def test_a_session_named_in_a_header_or_with_percent_encoding_has_the_same_replica(
    balanced: Balanced,
) -> None:
    homes = await balanced.replica_of_each()
    for session, home in homes.items():
        assert await balanced.replica_of("/v1/completions", x_session_id=session) == home
        assert await balanced.replica_of(f"/v1/sessions/{session.replace('-', '%2d')}/tokens") == home


async def test_the_session_in_the_path_overrides_the_header(balanced: Balanced) -> None:
    homes = await balanced.replica_of_each()
    other = next(session for session in SESSIONS if homes[session] != homes[SESSIONS[0]])
    assert await balanced.replica_of(f"/v1/sessions/{SESSIONS[0]}/tokens", x_session_id=other) == homes[SESSIONS[0]]


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/sessions", "/v1/sessions/tokens"])
async def test_requests_without_a_session_are_balanced_by_round_robin(balanced: Balanced, path: str) -> None:
    assert {await balanced.replica_of(path) for _ in range(12)} == {0, 1, 2}


async def test_round_robin_does_not_bind_sessions_to_replicas() -> None:
    async with three_replicas() as replicas, haproxy(replicas, BALANCE="roundrobin") as balanced:
        assert {await balanced.replica_of("/v1/sessions/one/tokens") for _ in range(12)} == {0, 1, 2}


@pytest.mark.parametrize("header", ["x_wane_position", "idempotency_key"])
@pytest.mark.parametrize("answers", ["nothing", "503"])
async def test_an_idempotent_step_is_retried_at_another_replica(balanced: Balanced, header: str, answers: str) -> None:
    session = SESSIONS[0]
    path = f"/v1/sessions/{session}/tokens"
    home = balanced.replicas[await balanced.replica_of(path)]
    home.answers = answers
    reply = await balanced.ask(path, **{header: "7"})
    assert reply.status == 200 and reply.document["replica"] != home.number
    assert balanced.asked() == 3


@pytest.mark.parametrize(("answers", "status"), [("nothing", 502), ("503", 503)])
async def test_a_step_that_is_not_idempotent_is_sent_once(balanced: Balanced, answers: str, status: int) -> None:
    for replica in balanced.replicas:
        replica.answers = answers
    assert (await balanced.ask("/v1/sessions/one/tokens")).status == status
    assert balanced.asked() == 1


async def test_each_replica_is_tried_once_and_the_last_answer_is_returned(balanced: Balanced) -> None:
    for replica in balanced.replicas:
        replica.answers = "503"
    assert (await balanced.ask("/v1/sessions/one/tokens", x_wane_position="7")).status == 503
    assert balanced.asked() == 3


@pytest.mark.parametrize("status", ["409", "500", "504", "429"])
async def test_an_answered_request_is_not_retried(balanced: Balanced, status: str) -> None:
    for replica in balanced.replicas:
        replica.answers = status
    assert (await balanced.ask("/v1/sessions/one/tokens", x_wane_position="7")).status == int(status)
    assert balanced.asked() == 1


async def test_a_request_that_its_replica_did_not_receive_goes_to_another_replica(balanced: Balanced) -> None:
    homes = await balanced.replica_of_each()
    balanced.replicas[0].stop()
    after = await balanced.replica_of_each()
    assert all(after[session] == home for session, home in homes.items() if home != 0)
    assert 0 not in after.values()


async def test_an_unready_replica_gets_no_requests_and_only_its_sessions_move_to_others(balanced: Balanced) -> None:
    homes = await balanced.replica_of_each()
    balanced.replicas[1].ready = False
    await until(balanced.operations, wane_2="DOWN")
    after = await balanced.replica_of_each()
    assert all(after[session] == home for session, home in homes.items() if home != 1)
    assert 1 not in after.values()
    balanced.replicas[1].ready = True
    await until(balanced.operations, wane_2="UP")


async def test_if_no_replica_is_ready_the_request_goes_to_any_replica(balanced: Balanced) -> None:
    for replica in balanced.replicas:
        replica.ready, replica.answers = False, "503"
    await until(balanced.operations, wane_1="DOWN", wane_2="DOWN", wane_3="DOWN")
    reply = await balanced.ask("/v1/sessions/one/tokens", x_wane_position="7")
    assert reply.status == 503 and "replica" in reply.document


async def test_a_replica_logs_the_clients_real_address() -> None:
    settings = {"WANE_BUNDLES": str(BUNDLE), PROXIES: "127.0.0.1"}
    with live_server(**settings) as server:
        port = int(server.url.rpartition(":")[2])
        async with (
            haproxy([Replica(number, port=port) for number in range(3)]) as balanced,
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2"), timeout=WAIT_S) as client,
        ):
            headers = {"x-forwarded-for": "6.6.6.6", "x-request-id": "through"}
            answer = await client.get(f"http://127.0.0.1:{balanced.port}/v1/models", headers=headers)
        assert answer.status_code == 200
        line = await asyncio.to_thread(server.read_until, "request", request_id="through")
    assert line["client"] == "127.0.0.2"


async def test_haproxy_has_metrics(balanced: Balanced) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{balanced.operations}", timeout=WAIT_S) as client:
        assert (
            'haproxy_server_status{proxy="replicas",server="wane-1",state="UP"} 1'
            in (await client.get("/metrics")).text
        )
