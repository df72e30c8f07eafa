"""Tests, for every store, of the quota that limits an owner's number of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.engine_harness import Clock
from tests.service.sessions.stores.append import append
from tests.service.sessions.stores.conftest import MakeStore
from tests.service.sessions.stores.redis_server import TIMEOUT_S, RedisServer
from tests.service.sessions.stores.test_memory import record as in_memory
from tests.service.sessions.stores.test_redis import record
from wane.service.errors import QuotaExceeded
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.redis import REPLACE, RedisStore
from wane.service.sessions.stores.redis_pipeline import Argument, RedisPipeline
from wane.service.sessions.stores.store import SessionRecord

TTL_S = 2.0


def of_alice(number: int) -> SessionRecord:
    return in_memory(f"alice/{number}")


async def test_each_owner_has_a_quota_and_one_session_over_it_is_rejected() -> None:
    store = MemoryStore(4, 10, 2**24, Clock())
    for number in range(3):
        assert await store.create(of_alice(number), 3)
    with pytest.raises(QuotaExceeded, match="alice has 3 sessions"):
        await store.create(of_alice(3), 3)
    assert not await store.create(of_alice(2), 3)  # the session already exists, so this creation does not count
    assert await store.create(in_memory("bob/0"), 1)
    assert await store.create(in_memory("alice"))


async def test_deleted_and_expired_sessions_do_not_count_against_the_quota() -> None:
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


async def test_sessions_loaded_from_a_file_count(tmp_path: Path) -> None:
    first = MemoryStore(4, 10, 2**24, file=tmp_path / "sessions")
    await first.open()
    await first.create(of_alice(0), 1)
    await first.close()
    second = MemoryStore(4, 10, 2**24, file=tmp_path / "sessions")
    await second.open()
    with pytest.raises(QuotaExceeded):
        await second.create(of_alice(1), 1)


@pytest.mark.stack
async def test_replicas_count_an_owners_sessions_together(common: RedisServer, make_store: MakeStore) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    made = await asyncio.gather(
        *(store.create(record(f"alice/{number}"), 10) for number in range(16) for store in (one, other)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, SessionRecord) for outcome in made) == 10
    assert {type(outcome) for outcome in made} == {SessionRecord, type(None), QuotaExceeded}
    assert await other.create(record("bob/0"), 1)
    (kept,) = [
        number for number in range(16) if one.get_cached(f"alice/{number}") or other.get_cached(f"alice/{number}")
    ][:1]
    assert await other.delete(f"alice/{kept}")
    assert await one.create(record("alice/new"), 10)
    with pytest.raises(QuotaExceeded, match="alice has 10 sessions"):
        await other.create(record("alice/newer"), 10)


@pytest.mark.stack
async def test_expired_sessions_in_redis_free_the_quota_and_sessions_in_use_do_not(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url, session_ttl_s=TTL_S)
    for number in range(3):
        assert await store.create(record(f"alice/{number}"), 3)
    ended = asyncio.get_running_loop().time() + 2 * TTL_S
    while asyncio.get_running_loop().time() < ended:
        here = await store.get("alice/1")
        assert here is not None
        assert await append(store, here, (7,)) is not None
    assert await store.create(record("alice/3"), 3)
    assert await store.create(record("alice/4"), 3)
    with pytest.raises(QuotaExceeded):
        await store.create(record("alice/5"), 3)
    assert await store.get("alice/1") is not None


async def counted(store: RedisStore, owner: str) -> set[str]:
    """Returns the names of the sessions that Redis counts for the owner."""
    key = store._owned(owner)
    return {name.decode() for name in await store.trips.do("ZRANGE", key, 0, -1)}


def withhold_commands(trips: RedisPipeline, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Argument, ...]]:
    """Replaces the method that sends a command without waiting for the answer. The replacement only appends the command
    to a list. Returns the list."""
    held: list[tuple[Argument, ...]] = []
    monkeypatch.setattr(trips, "tell", lambda *command: held.append(command))
    return held


def after_reading_ttl(
    store: RedisStore, then: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls `then` after the store has read a session's time to live and before the store uses the value."""
    do = store.trips.do

    async def look(*command: Argument) -> Any:
        left_ms = await do(*command)
        if command[0] == "PTTL":
            monkeypatch.setattr(store.trips, "do", do)
            await then()
        return left_ms

    monkeypatch.setattr(store.trips, "do", look)


def before_creating(store: RedisStore, then: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `then` after the store has counted a session and before it creates the session."""
    run = store.trips.run

    async def make(script: str, *arguments: Any, **options: Any) -> Any:
        if script is REPLACE:
            monkeypatch.setattr(store.trips, "run", run)
            await then()
        return await run(script, *arguments, **options)

    monkeypatch.setattr(store.trips, "run", make)


@pytest.mark.stack
async def test_a_session_created_while_its_id_is_deleted_counts(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    await one.create(record("alice/0"), 1)
    held = withhold_commands(one.trips, monkeypatch)
    assert await one.delete("alice/0")
    assert await other.create(record("alice/0"), 1)
    for command in held:
        await one.trips.do(*command)
    with pytest.raises(QuotaExceeded):
        await other.create(record("alice/1"), 1)


@pytest.mark.stack
async def test_a_session_created_while_its_id_is_found_expired_counts(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    await one.create(record("alice/0"), 1)
    await one.delete("alice/0")
    after_reading_ttl(one, lambda: other.create(record("alice/0"), 1), monkeypatch)
    with pytest.raises(QuotaExceeded):
        await one.create(record("alice/1"), 1)


@pytest.mark.stack
async def test_a_session_that_is_created_twice_while_it_is_found_expired_counts(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = [await make_store(common.url) for _ in range(3)]
    await one.create(record("alice/0"), 1)
    await one.delete("alice/0")
    held = withhold_commands(third.trips, monkeypatch)

    async def again() -> None:
        assert await third.create(record("alice/0"), 1)
        assert await third.delete("alice/0")
        assert await other.create(record("alice/0"), 1)
        for command in held:
            await other.trips.do(*command)

    after_reading_ttl(one, again, monkeypatch)
    with pytest.raises(QuotaExceeded):
        await one.create(record("alice/1"), 1)


@pytest.mark.stack
async def test_a_session_removed_as_expired_just_before_creation_counts(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    await one.create(record("alice/0"), 1)

    async def give_up() -> None:
        assert await one.delete("alice/0")
        assert await one.create(record("alice/1"), 1)

    before_creating(other, give_up, monkeypatch)
    assert await other.create(record("alice/0"), 1)  # one session over the quota, because the two creations overlap
    assert await one.delete("alice/1")
    with pytest.raises(QuotaExceeded):
        await one.create(record("alice/2"), 1)
    assert await counted(one, "alice") == {"alice/0"}


@pytest.mark.stack
async def test_a_failed_creation_does_not_count_after_the_existing_session_expires(
    common: RedisServer, make_store: MakeStore
) -> None:
    short, long = await make_store(common.url, session_ttl_s=TTL_S), await make_store(common.url)
    assert await short.create(record("alice/0"), 1)
    assert not await long.create(record("alice/0"), 1)
    async with asyncio.timeout(TIMEOUT_S):
        while await long.get("alice/0") is not None:
            pass
    assert await long.create(record("alice/1"), 1)


@pytest.mark.stack
async def test_every_session_counts_under_concurrent_creation_and_deletion(
    common: RedisServer, make_store: MakeStore
) -> None:
    stores = [await make_store(common.url) for _ in range(3)]

    async def create_and_delete(store: RedisStore, names: list[str]) -> None:
        for session in names:
            await asyncio.gather(
                store.delete(session),
                *(other.create(record(session), 2) for other in stores),
                store.delete(session),
                return_exceptions=True,
            )

    await asyncio.gather(
        *(create_and_delete(store, [f"alice/{number % 5}" for number in range(60)]) for store in stores)
    )
    alive = {f"alice/{number}" for number in range(5) if await stores[0].get(f"alice/{number}")}
    async with asyncio.timeout(TIMEOUT_S):  # the stores may have sent commands that Redis has not executed yet
        while not alive <= await counted(stores[0], "alice"):
            pass
