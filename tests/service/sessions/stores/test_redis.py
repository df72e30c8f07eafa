"""Tests of sessions in a real Redis: the contract of `Store`, two replicas, and restarts of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError  # noqa: A004  (of redis)

from tests.service.engine_harness import Clock, MakeHarness
from tests.service.sessions.stores.append import append, present
from tests.service.sessions.stores.conftest import MakeStore
from tests.service.sessions.stores.proxy import proxy
from tests.service.sessions.stores.redis_server import TIMEOUT_S, RedisServer, redis_server
from wane.service.errors import Overloaded, Unavailable, UnknownSession
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.redis import RedisStore
from wane.service.sessions.stores.redis_pipeline import PROBE_EVERY_S, Argument
from wane.service.sessions.stores.store import (
    DamagedSession,
    LastStep,
    SessionRecord,
    Snapshot,
    TokenHistory,
    follows,
    of_tokens,
)
from wane.service.types.common import Mode
from wane.service.types.request import StepRequest

pytestmark = pytest.mark.stack

SNAPSHOT = Snapshot(2, 0, b"maker", b"state")


def record(session: str = "s", **changes: Any) -> SessionRecord:
    return SessionRecord(session, "m", "1", Mode.AUTO, 0, TokenHistory.start(0, 300), vocabulary="v")._replace(
        **changes
    )


async def begin(store: RedisStore, session: str = "s") -> SessionRecord:
    """Creates a session. Returns its record."""
    assert await store.create(record(session))
    return present(store.get_cached(session))


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds. Fails the test after a timeout."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(PROBE_EVERY_S / 10)


async def test_a_session_round_trips_and_its_changes_are_durable(common: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(common.url)
    before = await begin(store)
    appended = present(await append(store, before, (7, 8)))
    assert (appended.position, appended.last, appended.durable) == (2, LastStep(0, of_tokens((7, 8)), None), True)
    assert appended.tail.ids().tolist() == [0, 7, 8]
    found = present(await store.get("s"))
    assert found._replace(idle_s=0.0) == appended
    assert (found.model, found.model_version, found.vocabulary, found.mode) == ("m", "1", "v", Mode.AUTO)


async def test_a_session_created_from_a_history_is_kept_and_continues(
    common: RedisServer, make_store: MakeStore
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    empty = TokenHistory.start(0, 300)
    for name, tokens, position in (("whole", (5, 6), 2), ("truncated", (5, 6), 3), ("long", (4, 5, 6, 7, 8), 9)):
        begun = record(name, position=position, tail=empty.ending(tokens, position, 4))
        assert await one.create(begun)
        found = present(await other.get(name))
        assert (found.position, found.tail, found.dropped_tokens) == (position, begun.tail, begun.dropped_tokens)
        grown = begun.tail
        for index in range(4):
            position += 1
            grown = grown.append((20 + index,), position, 4)
            found = await append(other, found, (20 + index,)) or found
            here = present(await one.get(name))
            assert (here.position, here.tail) == (found.position, found.tail) == (position, grown)


async def test_a_new_session_does_not_get_the_state_of_an_earlier_session(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url)
    here = await begin(store)
    await append(store, here, (5, 6), SNAPSHOT)
    async with Redis.from_url(common.url) as redis:
        await redis.delete(store.keys("s")[0])
    assert await store.create(record(position=9, tail=TokenHistory.start(0, 300).ending((7, 8), 9, 4)))
    found = present(await store.get("s"))
    assert (found.position, found.snapshot) == (9, None)


async def test_an_id_cannot_be_used_again_until_its_session_is_deleted(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url)
    await begin(store)
    assert not await store.create(record())
    assert await store.delete("s")
    assert not await store.delete("s")
    assert await store.get("s") is None
    assert await store.create(record())


async def test_namespaces_separate_sessions(common: RedisServer, make_store: MakeStore) -> None:
    one, other = (
        await make_store(common.url, store_namespace="one"),
        await make_store(common.url, store_namespace="other"),
    )
    await begin(one)
    assert await other.get("s") is None
    assert await other.create(record())
    async with Redis.from_url(common.url) as redis:
        assert set(await redis.keys("wane:o*")) == {b"wane:one:{s}", b"wane:other:{s}"}


async def test_the_loser_of_two_concurrent_appends_has_the_winners_session(
    common: RedisServer, make_store: MakeStore
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    here = await begin(one)
    results = await asyncio.gather(append(one, here, (7,)), append(other, here, (8,)))
    won = [result for result in results if result is not None]
    assert len(won) == 1
    assert one.get_cached("s") is not None
    for store in (one, other):
        recalled = present(store.get_cached("s"))
        assert recalled.tail == won[0].tail
        assert recalled.revision == won[0].revision


async def test_a_session_that_is_deleted_and_created_again_is_a_different_session(
    common: RedisServer, make_store: MakeStore
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    here = await begin(one)
    old = present(await append(one, here, (7,)))
    await other.delete("s")
    again = await begin(other)
    assert await append(other, again, (8,))
    assert await append(one, old, (9,)) is None
    recalled = present(one.get_cached("s"))
    assert recalled.tail.ids().tolist() == [0, 8]
    assert not follows(recalled.revision, old.revision)


async def test_an_append_to_a_deleted_session_fails_and_drops_the_session_from_the_cache(
    common: RedisServer, make_store: MakeStore
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    here = await begin(one)
    await other.delete("s")
    assert await append(one, here, (7,)) is None
    assert one.get_cached("s") is None


async def test_a_revision_follows_an_earlier_revision_after_appends_but_not_after_rewinds(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url)
    here = await begin(store)
    after = present(await append(store, here, (5, 6, 7)))
    assert follows(after.revision, here.revision)
    assert await store.rewind("s", here.revision, 2) is None
    rewound = present(await store.rewind("s", after.revision, 2))
    assert (rewound.position, rewound.tail.ids().tolist(), rewound.last) == (2, [0, 5, 6], None)
    assert not follows(rewound.revision, after.revision)
    found = present(await store.get("s"))
    assert found._replace(idle_s=0.0) == rewound


async def test_a_state_is_kept_until_the_session_is_rewound_to_before_the_state(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url)
    here = await begin(store)
    here = await append(store, here, (5, 6), SNAPSHOT) or here
    here = await append(store, here, (7,)) or here
    found = present(await store.get("s"))
    assert found.snapshot == SNAPSHOT
    here = await store.rewind("s", here.revision, 2) or here
    found = present(await store.get("s"))
    assert found.snapshot == SNAPSHOT
    await store.rewind("s", here.revision, 1)
    found = present(await store.get("s"))
    assert found.snapshot is None
    await store.delete("s")
    async with Redis.from_url(common.url) as redis:
        assert not await redis.keys(f"{store.prefix}*")


async def test_an_idle_session_expires_and_a_session_in_use_does_not(
    common: RedisServer, make_store: MakeStore
) -> None:
    # The time to live is so long that a delay of a minute does not affect this test.
    store = await make_store(common.url, session_ttl_s=30_000.0)
    here = await begin(store)
    await append(store, here, (5, 6), SNAPSHOT)
    keys = store.keys("s")
    async with Redis.from_url(common.url) as redis:
        for key in keys:
            await redis.pexpire(key, 10_000_000)
        found = present(await store.get("s"))
        assert found.idle_s == pytest.approx(20_000, abs=300)
        assert await redis.pttl(keys[0]) <= 10_000_000  # a read does not reset the time to live
        await store.touch("s")
        assert await store.get("s")  # Redis answers this read after the touch, so the touch has taken effect
        for key in keys:
            assert 29_000_000 < await redis.pttl(key) <= 30_000_000
        await redis.pexpire(keys[0], 1)
        await until_gone(redis, keys[0])
    assert await store.get("s") is None


async def test_a_touched_copy_lives_as_long_as_its_session(common: RedisServer, make_store: MakeStore) -> None:
    clock = Clock()
    store = await make_store(common.url, session_ttl_s=30_000.0, clock=clock)
    await begin(store)
    clock.now_s += 29_000
    await store.touch("s")
    clock.now_s += 29_000
    assert store.get_cached("s") is not None
    clock.now_s += 2_000
    assert store.get_cached("s") is None


async def until_gone(redis: Redis, key: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await redis.exists(key):
            pass


async def test_commits_of_one_event_loop_turn_are_one_round_trip(common: RedisServer, make_store: MakeStore) -> None:
    metrics = Metrics()
    store = await make_store(common.url, metrics=metrics)
    names = [str(index) for index in range(50)]
    begun = await asyncio.gather(*(begin(store, name) for name in names))
    appended = await asyncio.gather(*(append(store, one, (7,)) for one in begun))
    assert all(appended)
    count = metrics.registry.get_sample_value("wane_store_roundtrip_commands_count", {"store": "redis"})
    commands = metrics.registry.get_sample_value("wane_store_roundtrip_commands_sum", {"store": "redis"})
    assert (count, commands) == (2, 100)


async def test_scripts_that_redis_has_lost_are_sent_again(common: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(common.url)
    here = await begin(store)
    async with Redis.from_url(common.url) as redis:
        await redis.script_flush()
        assert await append(store, here, (7,))
        assert await store.get("s") is not None
        await redis.script_flush()
        others = await asyncio.gather(*(begin(store, str(index)) for index in range(20)), store.get("s"))
        assert all(others)


async def test_acknowledged_changes_survive_a_killed_redis(server: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(server.url)
    here = await begin(store)
    for token in range(5, 25):
        here = await append(store, here, (token,)) or here
    server.kill()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await append(store, here, (99,))
    assert not store.standing.reachable
    with pytest.raises(Unavailable):
        await store.get("s")
    server.start()
    await until(lambda: store.standing.reachable)
    found = present(await store.get("s"))
    assert (found.position, found.tail.ids().tolist()) == (20, [21, 22, 23, 24])
    # The restarted Redis does not have the store's script, so the store must send the script again.
    after = present(await append(store, here, (25,)))
    assert after.position == 21


async def test_the_first_change_after_a_restart_starts_a_new_branch_of_revisions(
    server: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(server.url)
    here = await begin(store)
    here = await append(store, here, (5,)) or here
    run = await last_save(server)
    # Restarts Redis until the time that `last_save` returns changes. Redis reports this time in whole seconds, so a
    # quick restart may not change it.
    while await last_save(server) == run:
        server.kill()
        server.start()
    await until(lambda: store.standing.reachable)
    after = present(await append(store, here, (6,)))
    assert not follows(after.revision, here.revision)
    later = present(await append(store, after, (7,)))
    assert follows(later.revision, after.revision)
    found = present(await store.get("s"))
    assert found.revision == later.revision


async def last_save(server: RedisServer) -> object:
    """Returns the time of the server's last save, or of its start if it has not saved since, in whole seconds."""
    async with Redis.from_url(server.url) as redis:
        return await redis.lastsave()


async def test_an_append_with_a_lost_answer_is_not_applied_twice(server: RedisServer, make_store: MakeStore) -> None:
    async with proxy(server.port) as between:
        store = await make_store(f"redis://127.0.0.1:{between.port}/0")
        direct = await make_store(server.url)
        here = await begin(store)
        here = await append(store, here, (5,)) or here  # after this append Redis has the store's script
        between.hold_answers()
        appending = asyncio.create_task(append(store, here, (7,)))

        async def arrived() -> bool:
            found = await direct.get("s")
            return found is not None and found.position == 2

        async with asyncio.timeout(TIMEOUT_S):
            while not await arrived():
                pass
        # `mend` closes the connection. The store then sends the append again, and finds that Redis has already applied
        # the append.
        between.mend()
        after = present(await appending)
        found = await direct.get("s")
        assert found is not None
        assert (found.position, found.revision) == (after.position, after.revision) == (2, after.revision)


async def test_a_cut_network_is_detected_and_then_commands_fail_immediately(
    server: RedisServer, make_store: MakeStore
) -> None:
    async with proxy(server.port) as between:
        store = await make_store(f"redis://127.0.0.1:{between.port}/0", store_timeout_ms=1000)
        here = await begin(store)
        between.sever()
        with pytest.raises(Unavailable):
            await append(store, here, (7,))
        assert not store.standing.reachable
        with pytest.raises(Unavailable):  # fails immediately, because the store sends nothing
            await append(store, here, (7,))
        await store.touch("s")  # a touch raises no error if Redis is unreachable
        between.mend()
        await until(lambda: store.standing.reachable)
        assert await append(store, here, (7,))


async def test_a_new_primary_is_used_although_the_earlier_one_keeps_its_connections(
    server: RedisServer, tmp_path: Path, make_store: MakeStore
) -> None:
    with redis_server(tmp_path / "new") as new:
        async with (
            proxy(server.port) as between,
            Redis.from_url(server.url) as earlier,
            Redis.from_url(new.url) as primary,
        ):
            store = await make_store(f"redis://127.0.0.1:{between.port}/0")
            await begin(store)
            await earlier.replicaof("127.0.0.1", str(new.port))
            between.target = new.port  # only new connections lead to the new primary
            with pytest.raises(Unavailable):
                await store.create(record("t"))
            await until(lambda: store.standing.reachable)
            assert await store.create(record("t"))
            assert await primary.exists(store.keys("t")[0])


async def test_a_hanging_redis_is_unreachable(server: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(server.url, store_timeout_ms=1000)
    here = await begin(store)
    server.pause()
    with pytest.raises(Unavailable):
        await append(store, here, (7,))
    server.resume()
    await until(lambda: store.standing.reachable)
    found = present(await store.get("s"))
    assert found.position in (0, 1)  # Redis may have applied the append


async def test_a_store_that_is_unreachable_at_start_is_used_once_it_is_reachable(
    server: RedisServer, make_store: MakeStore
) -> None:
    server.kill()
    store = await make_store(server.url)
    assert not store.standing.reachable
    with pytest.raises(Unavailable):
        await store.create(record())
    server.start()
    await until(lambda: store.standing.reachable)
    assert await store.create(record())


async def test_the_log_says_why_redis_is_unreachable_once_for_each_reason(
    server: RedisServer, make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("requirepass", "right")
    store = await make_store(server.url.replace("//", "//:wrong@"))
    await asyncio.sleep(3 * PROBE_EVERY_S)
    assert len(caplog.messages) == 1
    server.kill()
    await until(lambda: len(caplog.messages) > 1 and "connecting to" in caplog.messages[-1])
    server.start()  # without a password
    await until(lambda: "without any password" in caplog.messages[-1])
    await asyncio.sleep(3 * PROBE_EVERY_S)
    assert not store.standing.reachable
    first, *later = caplog.messages
    assert first.startswith("the session store is not reachable yet: ") and "password" in first
    assert all(message.startswith("the session store is still unreachable: ") for message in later)
    assert all(one != other for one, other in pairwise(caplog.messages))
    assert "wrong" not in caplog.text.replace("WRONGPASS", "")


async def test_connections_that_were_closed_while_idle_are_replaced(common: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(common.url)
    here = await begin(store)

    async def later() -> None:
        await asyncio.sleep(0)
        await store.trips.do("PING")

    await asyncio.gather(store.trips.do("BLPOP", "none", "0.1"), later())
    assert len(store.trips._idle) == 2
    async with Redis.from_url(common.url) as redis:
        await redis.client_kill_filter(_type="normal")
    assert await append(store, here, (7,))
    assert store.standing.reachable


async def test_a_full_redis_rejects_but_is_reachable(server: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(server.url)
    here = await begin(store)
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("maxmemory", 1)
        with pytest.raises(Overloaded, match="full"):
            await append(store, here, (7,))
        await redis.config_set("maxmemory", 0)
    assert store.standing.reachable
    assert await append(store, here, (7,))


async def test_a_session_written_by_another_version_is_not_changed(common: RedisServer, make_store: MakeStore) -> None:
    store = await make_store(common.url)
    await begin(store)
    async with Redis.from_url(common.url) as redis:
        key = store.keys("s")[0]
        await redis.setrange(key, 12, b"\x09")
        with pytest.raises(Unavailable, match=r"not written in format 2.*another version"):
            await store.get("s")


async def test_the_store_is_read_before_a_step_if_other_replicas_also_step_its_sessions(
    common: RedisServer, make_store: MakeStore
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    here = await begin(one)
    assert one.get_cached("s", to_step=True) is not None
    for _ in range(20):
        found = present(await other.get("s"))
        await append(other, found, (7,))
        await append(one, here, (8,))  # fails, because the other replica has appended first
        here = one.get_cached("s") or here
    assert one.get_cached("s", to_step=True) is None
    assert one.get_cached("s") is not None
    for _ in range(40):
        here = await append(one, here, (8,)) or await one.get("s") or here
    assert one.get_cached("s", to_step=True) is not None


@pytest.mark.parametrize("carried_out", [True, False])
async def test_an_append_sent_twice_has_an_unknown_outcome_if_a_later_append_was_applied(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    one, other = await make_store(common.url), await make_store(common.url)
    begun = await begin(one)
    here = present(await append(one, begun, (4,)))
    send = one.trips.send

    async def cut_off(commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        monkeypatch.setattr(one.trips, "send", send)
        if carried_out:
            await send(commands)
        there = present(await other.get("s"))
        assert await append(other, there, (9,))
        raise ConnectionError("gone")

    monkeypatch.setattr(one.trips, "send", cut_off)
    with pytest.raises(Unavailable, match="may have made the change"):
        await append(one, here, (5,))
    assert one.standing.reachable
    found = present(await one.get("s"))
    assert found.tail.ids().tolist() == ([0, 4, 5, 9] if carried_out else [0, 4, 9])


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_deletion_sent_twice_is_answered_as_made(
    common: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, carried_out: bool
) -> None:
    store = await make_store(common.url)
    await begin(store)
    send = store.trips.send

    async def cut_off(commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        monkeypatch.setattr(store.trips, "send", send)
        if carried_out:
            await send(commands)
        raise ConnectionError("gone")

    monkeypatch.setattr(store.trips, "send", cut_off)
    assert await store.delete("s")
    assert await store.get("s") is None
    assert not await store.delete("s")


@pytest.mark.parametrize("session", ["}", "a}b", "{", "%7D", "a b", "é"], ids=ascii)
async def test_both_keys_of_a_session_are_in_one_slot(common: RedisServer, make_store: MakeStore, session: str) -> None:
    store = await make_store(common.url)
    one, two = store.keys(session)
    assert key_slot(one.encode()) == key_slot(two.encode())
    assert len({store.keys(other)[0] for other in ("}", "%7D", "%257D")}) == 3
    assert await store.create(record(session)) is not None
    assert (await store.get(session)) is not None and await store.delete(session)


@pytest.mark.parametrize("stray", [b"x", b"xx"], ids=["half a token", "a token"])
@pytest.mark.parametrize("first", ["get", "step", "rewind"])
async def test_a_damaged_session_has_the_same_error_on_every_route(
    common: RedisServer, make_store: MakeStore, make_harness: MakeHarness, first: str, stray: bytes
) -> None:
    store = await make_store(common.url)
    harness = make_harness(store=store)
    engine = harness.engine
    await engine.create_session("s", None)
    await engine.submit(StepRequest("s", (1, 2, 3)))
    async with Redis.from_url(common.url) as redis:
        await redis.append(store.keys("s")[0], stray)
        damaged = await redis.get(store.keys("s")[0])
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: engine.get_session("s"),
            "step": lambda: engine.submit(StepRequest("s", (4,))),
            "rewind": lambda: engine.rewind("s", 1),
        }
        for name in (first, *calls):
            with pytest.raises(DamagedSession, match=f"'s' take {8 + len(stray)} bytes, but should take 8"):
                await calls[name]()
        assert await redis.get(store.keys("s")[0]) == damaged
    await engine.delete_session("s")
    with pytest.raises(UnknownSession):
        await engine.get_session("s")


async def test_a_token_outside_the_vocabulary_damages_only_its_own_session(
    common: RedisServer, make_store: MakeStore, make_harness: MakeHarness
) -> None:
    store = await make_store(common.url)
    harness = make_harness(store=store)
    engine = harness.engine
    for session in ("s", "sound"):
        await engine.create_session(session, None)
        await engine.submit(StepRequest(session, (1, 2, 3)))
    async with Redis.from_url(common.url) as redis:
        key = store.keys("s")[0]
        await redis.set(key, (await redis.get(key))[:-2] + b"\xff\xff", px=100_000)
    other = make_harness(store=await make_store(common.url)).engine  # has neither a copy nor a state of the session
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: other.get_session("s"),
        lambda: other.session_state("s"),
        lambda: other.submit(StepRequest("s", (4,))),
        lambda: other.rewind("s", 1),
        lambda: other.fork("s"),
    ]
    for call in calls:
        with pytest.raises(DamagedSession, match="'s' has the token 65535, but its vocabulary has 258 tokens"):
            await call()
    assert (await other.submit(StepRequest("sound", (4,)))).position == 4
    await other.delete_session("s")


async def test_a_damaged_session_can_be_deleted(
    common: RedisServer, make_store: MakeStore, make_harness: MakeHarness
) -> None:
    store = await make_store(common.url)
    harness = make_harness(store=store)
    await harness.engine.create_session("s", None)
    async with Redis.from_url(common.url) as redis:
        await redis.append(store.keys("s")[0], b"x" * 3)
    store._remembered.forget("s")
    with pytest.raises(DamagedSession, match="'s'"):
        await harness.engine.get_session("s")
    await harness.engine.delete_session("s")
    with pytest.raises(UnknownSession):
        await harness.engine.get_session("s")


async def test_a_step_reads_the_session_first_while_most_copies_are_out_of_date(
    common: RedisServer, make_store: MakeStore
) -> None:
    store = await make_store(common.url)
    await begin(store)
    for moved in (False, True, False):
        for _ in range(20):
            store._saw(moved=moved)
        assert (store.get_cached("s", to_step=True) is None) is moved
