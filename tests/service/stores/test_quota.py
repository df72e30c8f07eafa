"""How many sessions an owner may have, wherever they are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.errors import QuotaExceeded
from service.stores.memory import MemoryStore
from service.stores.store import Record
from tests.service.engine.fakes import Clock
from tests.service.stores.conftest import MakeStore
from tests.service.stores.proxy import proxy
from tests.service.stores.redis_server import RedisServer
from tests.service.stores.test_degrading import degrading
from tests.service.stores.test_memory import record as in_memory
from tests.service.stores.test_redis import STEP, record

TTL_S = 0.5


def of_alice(number: int) -> Record:
    return in_memory(f"alice/{number}")


async def test_one_session_too_many_is_refused_and_others_have_their_own_number() -> None:
    store = MemoryStore(4, 10, 2**24, Clock())
    for number in range(3):
        assert await store.create(of_alice(number), 3)
    with pytest.raises(QuotaExceeded, match="alice has 3 sessions"):
        await store.create(of_alice(3), 3)
    assert not await store.create(of_alice(2), 3)  # it is there, which is no wish for one more
    assert await store.create(in_memory("bob/0"), 1)
    assert await store.create(in_memory("alice"))


async def test_a_session_that_was_deleted_or_has_ended_makes_room() -> None:
    clock = Clock()
    store = MemoryStore(4, 10, 2**24, clock)
    for number in range(2):
        await store.create(of_alice(number), 2)
    await store.delete("alice/0")
    assert await store.create(of_alice(2), 2)
    clock.now_s += 9
    await store.touch("alice/1")
    clock.now_s += 2
    assert await store.create(of_alice(3), 2)
    with pytest.raises(QuotaExceeded):
        await store.create(of_alice(4), 2)


async def test_sessions_of_a_file_count(tmp_path: Path) -> None:
    first = MemoryStore(4, 10, 2**24, file=tmp_path / "sessions")
    await first.open()
    await first.create(of_alice(0), 1)
    await first.close()
    second = MemoryStore(4, 10, 2**24, file=tmp_path / "sessions")
    await second.open()
    with pytest.raises(QuotaExceeded):
        await second.create(of_alice(1), 1)


@pytest.mark.stack
async def test_replicas_count_an_owner_s_sessions_together(common: RedisServer, make_store: MakeStore) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    made = await asyncio.gather(
        *(store.create(record(f"alice/{number}"), 10) for number in range(16) for store in (one, other)),
        return_exceptions=True,
    )
    assert made.count(True) == 10
    assert {type(outcome) for outcome in made} == {bool, QuotaExceeded}
    assert await other.create(record("bob/0"), 1)
    (kept,) = [number for number in range(16) if one.recall(f"alice/{number}") or other.recall(f"alice/{number}")][:1]
    assert await other.delete(f"alice/{kept}")
    assert await one.create(record("alice/new"), 10)
    with pytest.raises(QuotaExceeded, match="alice has 10 sessions"):
        await other.create(record("alice/newer"), 10)


@pytest.mark.stack
async def test_sessions_that_redis_has_ended_make_room_and_those_in_use_do_not(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url, ttl_s=TTL_S)
    for number in range(3):
        assert await store.create(record(f"alice/{number}"), 3)
    ended = asyncio.get_running_loop().time() + 2 * TTL_S
    while asyncio.get_running_loop().time() < ended:
        here = await store.get("alice/1")
        assert here is not None
        assert await store.append("alice/1", here.revision, (7,), STEP) is not None
    assert await store.create(record("alice/3"), 3)
    assert await store.create(record("alice/4"), 3)
    with pytest.raises(QuotaExceeded):
        await store.create(record("alice/5"), 3)
    assert await store.get("alice/1") is not None


@pytest.mark.stack
async def test_while_the_store_is_away_sessions_that_are_not_durable_count(server: RedisServer) -> None:
    async with proxy(server.port) as line, degrading(line.port) as store:
        assert await store.create(record("alice/0"), 2)
        line.cut()
        assert await store.create(record("alice/1"), 2)
        assert await store.create(record("alice/2"), 2)
        with pytest.raises(QuotaExceeded):
            await store.create(record("alice/3"), 2)
