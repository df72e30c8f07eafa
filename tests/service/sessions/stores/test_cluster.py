"""Tests of sessions in a Redis Cluster. The store writes each session of a batch to the session's node. The store sends
to all nodes at the same time, so a batch takes one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.service.sessions.stores.append import append
from tests.service.sessions.stores.conftest import MakeStore
from tests.service.sessions.stores.redis_server import DURABLE, TIMEOUT_S, RedisServer, free_port, redis_server
from tests.service.sessions.stores.test_redis import SNAPSHOT, begin, record
from wane.service.errors import Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.redis import RedisStore
from wane.service.sessions.stores.redis_pipeline import PROBE_EVERY_S

pytestmark = pytest.mark.stack

HALVES = ((0, 8191), (8192, 16383))


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[RedisServer]]:
    """A cluster of two nodes. Each node has half of the hash slots."""
    with ExitStack() as stack:
        buses = [free_port() for _ in HALVES]
        servers = [
            stack.enter_context(
                redis_server(tmp_path / str(bus), (*DURABLE, "--cluster-enabled", "yes", "--cluster-port", str(bus)))
            )
            for bus in buses
        ]
        clients = [Redis.from_url(server.url) for server in servers]
        for client, (first, last) in zip(clients, HALVES, strict=True):
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        await clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port, buses[1])
        async with asyncio.timeout(TIMEOUT_S):
            for client in clients:
                while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                while len(await client.execute_command("CLUSTER NODES")) < len(HALVES):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield servers
        for client in clients:
            await client.aclose()


async def test_a_batch_of_many_sessions_is_one_round_trip_to_all_nodes(
    nodes: list[RedisServer], make_store: MakeStore
) -> None:
    metrics = Metrics()
    store = await make_store(f"redis+cluster://127.0.0.1:{nodes[0].port}", store_namespace="n", metrics=metrics)
    names = [str(index) for index in range(40)]
    begun = await asyncio.gather(*(begin(store, name) for name in names))
    appended = await asyncio.gather(*(append(store, one, (5, 6), SNAPSHOT) for one in begun))
    assert all(appended)
    held = []
    for server in nodes:
        async with Redis.from_url(server.url) as client:
            held.append({key.decode() for key in await client.keys("wane:n:*")})
            await client.script_flush()
    assert all(held)
    assert held[0] | held[1] == {f"wane:n:{{{name}}}{end}" for name in names for end in ("", ":state")}
    after = await asyncio.gather(*(append(store, one, (7,)) for one in appended if one))
    assert [one.position for one in after if one] == [3] * 40
    found = await store.get("7")
    assert found is not None
    assert (found.position, found.snapshot) == (3, SNAPSHOT)
    assert await store.delete("7")
    assert await store.get("7") is None
    assert metrics.registry.get_sample_value("wane_store_roundtrip_commands_count", {"store": "redis"}) == 6


async def test_a_cluster_that_is_down_at_start_is_used_once_it_is_up(
    nodes: list[RedisServer], make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    for node in nodes:
        node.kill()
    store = await make_store(f"redis+cluster://127.0.0.1:{nodes[0].port}")
    assert not store.standing.reachable
    assert "the session store is not reachable yet: Redis Cluster cannot be connected" in caplog.text
    with pytest.raises(Unavailable):
        await store.create(record())
    for node in nodes:
        node.start()
    await created(store, "s")


async def test_a_cluster_with_a_dead_node_is_unreachable_until_another_node_has_its_slots(
    nodes: list[RedisServer], make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(nodes[0].url) as client:
        await client.config_set("cluster-require-full-coverage", "no")
        store = await make_store(f"redis+cluster://127.0.0.1:{nodes[1].port}")
        for name in ("s", "a"):  # of the first and of the second node
            assert await store.create(record(name))
        assert await client.dbsize() == 1
        nodes[1].kill()
        with pytest.raises(Unavailable):
            await store.get("a")
        await asyncio.sleep(4 * PROBE_EVERY_S)
        assert not store.standing.reachable
        assert all("unreachable" in message for message in caplog.messages)
        assert len(caplog.messages) <= 2
        await client.execute_command("CLUSTER", "DELSLOTSRANGE", *HALVES[1])
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", *HALVES[1])
        await created(store, "a")
        assert await client.dbsize() == 2
    assert caplog.messages[-1] == "the session store is reachable"


async def created(store: RedisStore, session: str) -> None:
    """Creates a session as soon as the store accepts it."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                assert await store.create(record(session))
                return
            except Unavailable:
                await asyncio.sleep(0.05)
