"""Tests of the local store that replaces Redis while Redis is unreachable. When Redis is reachable again, the sessions
in Redis replace conflicting local sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.service.engine_harness import Clock
from tests.service.sessions.stores.conftest import MakeStore, settings_of
from tests.service.sessions.stores.proxy import proxy
from tests.service.sessions.stores.redis_server import RedisServer
from tests.service.sessions.stores.test_redis import SNAPSHOT, STEP, begin, record, until
from wane.service.errors import PositionConflict, Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.sessions.record import TokenHistory
from wane.service.sessions.stores.fallback import FallbackStore
from wane.service.sessions.stores.redis import REPLACE, RedisStore
from wane.service.sessions.stores.redis_pipeline import Argument, Script
from wane.service.sessions.stores.store import SessionRecord, follows

pytestmark = pytest.mark.stack


class FallbackStoreHarness(FallbackStore):
    """A `FallbackStore` whose metrics, Redis store and clock are attributes that tests can read."""

    def __init__(self, url: str) -> None:
        self.metrics = Metrics()
        self.shared = RedisStore(url, **settings_of(timeout_s=1.0, metrics=self.metrics))
        self.clock = Clock()
        super().__init__(self.shared, 100.0, self.metrics, self.clock)

    async def until_settled(self) -> None:
        """Waits until Redis is reachable, and until every local session is written to Redis or discarded."""
        await until(lambda: self.standing.reachable and not self.standing.not_durable)

    async def until_written(self) -> None:
        """Waits until the task that started when Redis became reachable has written or discarded the local sessions."""
        assert self._settling is not None
        await self._settling

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)


@asynccontextmanager
async def fallback_store(port: int) -> AsyncIterator[FallbackStoreHarness]:
    store = FallbackStoreHarness(f"redis://127.0.0.1:{port}/0")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def step(store: FallbackStore | RedisStore, token: int, session: str = "s") -> SessionRecord:
    """Appends one token to the session. Reads the session from the store's cache or, if it is not cached, from the
    store."""
    here = store.get_cached(session, to_step=True) or await store.get(session)
    assert here is not None
    after = await store.append(here, (token,), STEP._replace(start=here.position))
    assert after is not None
    return after


async def test_a_session_continues_during_an_outage_and_is_durable_after_the_outage(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        assert (await step(store, 5)).durable is True
        server.kill()
        for token in (6, 7):
            after = await step(store, token)
            assert after.durable is False
        assert (after.position, after.tail.ids().tolist()) == (3, [0, 5, 6, 7])
        assert store.standing.ready
        assert (store.standing.reachable, store.standing.not_durable) == (False, 1)
        assert store.sample("wane_sessions_not_durable") == 1
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.durable) == (3, False)
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.durable, found.tail.ids().tolist()) == (3, True, [0, 5, 6, 7])
        assert (await step(store, 8)).durable is True
        assert store.sample("wane_sessions_conflict_discarded_total") == 0


async def test_the_tokens_in_the_store_replace_local_tokens_and_the_next_step_conflicts(
    server: RedisServer, make_store: MakeStore
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        await step(store, 5)
        between.sever()
        lost = await step(store, 6)
        theirs = await step(other, 7)
        assert (lost.position, theirs.position) == (2, 2)
        between.mend()
        await store.until_settled()
        with pytest.raises(PositionConflict, match="tokens that were acknowledged as not durable are lost") as caught:
            await step(store, 8)
        assert caught.value.position == 2
        after = await step(store, 8)  # the store raises the conflict only once
        assert (after.position, after.durable, after.tail.ids().tolist()) == (3, True, [0, 5, 7, 8])
        # `after` must not count as a continuation of `lost`. Otherwise the engine could use the state that contains the
        # lost tokens.
        assert not follows(after.revision, lost.revision)
        assert store.sample("wane_sessions_conflict_discarded_total") == 1


async def test_the_first_step_after_an_outage_raises_the_conflict_if_it_reconciles_the_session(
    server: RedisServer, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        monkeypatch.setattr(store.shared.trips, "on_back", lambda: None)
        await store.create(record())
        between.sever()
        await step(store, 6)
        await step(other, 7)
        between.mend()
        await until(lambda: store.standing.reachable)
        with pytest.raises(PositionConflict):
            await step(store, 8)
        after = await step(store, 8)
        assert after.tail.ids().tolist() == [0, 7, 8]


async def test_an_unacknowledged_step_is_not_applied_twice(server: RedisServer) -> None:
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        await step(store, 5)
        between.hold_answers()
        first = await step(store, 6)  # Redis applies the step, but its answer does not arrive
        assert first.durable is False
        assert (await step(store, 7)).durable is False
        between.mend()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.tail.ids().tolist()) == (3, [0, 5, 6, 7])
        assert store.sample("wane_sessions_conflict_discarded_total") == 0


async def test_a_step_of_another_replica_is_not_mistaken_for_the_unacknowledged_step(
    server: RedisServer, make_store: MakeStore
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        await step(store, 5)
        between.sever()
        await step(store, 6)
        await step(other, 6)  # a step of another replica is a different step, even if the token is the same
        between.mend()
        await store.until_settled()
        with pytest.raises(PositionConflict):
            await step(store, 7)


async def test_a_session_created_during_an_outage_is_written_to_the_store(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        server.kill()
        assert await store.create(record("new"))
        assert not await store.create(record("new"))
        assert (await step(store, 5, "new")).durable is False
        server.start()
        await store.until_settled()
        found = await store.get("new")
        assert found is not None
        assert (found.position, found.durable) == (1, True)


async def test_an_unseen_session_cannot_continue_during_an_outage(server: RedisServer, make_store: MakeStore) -> None:
    await begin(await make_store(server.url, namespace="n"))
    async with fallback_store(server.port) as store:
        server.kill()
        with pytest.raises(Unavailable):
            await store.get("s")
        with pytest.raises(Unavailable):
            await store.delete("s")
        server.start()
        await store.until_settled()
        assert await store.delete("s")


async def test_there_is_no_fallback_before_the_first_connection_to_the_store(server: RedisServer) -> None:
    server.kill()
    async with fallback_store(server.port) as store:
        assert not store.standing.ready
        with pytest.raises(Unavailable):
            await store.create(record())


async def test_a_session_is_rewound_and_continues_with_other_tokens(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        for token in (5, 6):
            await step(store, token)
        server.kill()
        here = await step(store, 7)
        rewound = await store.rewind("s", here.revision, 1)
        assert rewound is not None
        assert (rewound.position, rewound.durable) == (1, False)
        assert not follows(rewound.revision, here.revision)
        await step(store, 8)
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert found.tail.ids().tolist() == [0, 5, 8]


async def test_a_durable_session_is_rewound_during_an_outage(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        for token in (5, 6):
            here = await step(store, token)
        server.kill()
        rewound = await store.rewind("s", here.revision, 1)
        assert rewound is not None
        assert (rewound.position, rewound.durable) == (1, False)
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.durable) == (1, True)


async def test_a_stored_state_is_dropped_if_the_session_was_rewound_to_before_the_state(
    server: RedisServer,
) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        here = await step(store, 5)
        assert await store.append(here, (6,), STEP, SNAPSHOT)
        server.kill()
        here = await step(store, 7)
        assert await store.rewind("s", here.revision, 1)
        for token in (8, 9):  # the session reaches the same position with other tokens
            here = await step(store, token)
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.tail.ids().tolist()) == (3, [0, 5, 8, 9])
        assert found.snapshot is None


async def test_a_stored_state_stays_if_the_session_continued_from_it(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        here = await step(store, 5)
        assert await store.append(here, (6,), STEP, SNAPSHOT)
        server.kill()
        for token in (7, 8):
            here = await step(store, token)
        assert await store.rewind("s", here.revision, 3)
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.snapshot) == (3, SNAPSHOT)


async def test_a_session_with_an_unanswered_creation_continues(server: RedisServer) -> None:
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record("other"))
        between.hold_answers()
        assert await store.create(record())  # Redis creates the session, but its answer does not arrive
        assert (await step(store, 5)).durable is False
        between.mend()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert found.tail.ids().tolist() == [0, 5]
        assert store.sample("wane_sessions_conflict_discarded_total") == 0


async def test_a_session_created_from_a_history_during_an_outage_is_written(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        here = await step(store, 5)
        assert await store.append(here, (6,), STEP, SNAPSHOT)
        async with Redis.from_url(f"redis://127.0.0.1:{server.port}/0") as redis:
            # Deletes the session but not its state, as if the session had expired first.
            await redis.delete(store.shared.keys("s")[0])
        assert await store.get("s") is None
        server.kill()
        with suppress(Unavailable):
            await store.get("s")
        assert await store.create(record(position=9, tail=TokenHistory.start(0, 300).ending((7, 8), 9, 4)))
        assert (await step(store, 10)).durable is False
        server.start()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.tail.ids().tolist(), found.dropped_tokens) == (10, [7, 8, 10], 7)
        assert found.snapshot is None


async def test_a_session_with_an_unanswered_rewind_continues(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        for token in (5, 6):
            here = await step(store, token)
        run = store.shared.trips.run

        async def unanswered(script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
            if script is REPLACE:
                between.hold_answers()
            return await run(script, keys, *arguments)

        monkeypatch.setattr(store.shared.trips, "run", unanswered)
        assert await store.rewind("s", here.revision, 1)
        monkeypatch.undo()
        assert (await step(store, 7)).durable is False
        between.mend()
        await store.until_settled()
        found = await store.get("s")
        assert found is not None
        assert found.tail.ids().tolist() == [0, 5, 7]
        assert store.sample("wane_sessions_conflict_discarded_total") == 0


async def test_only_one_of_two_concurrent_steps_succeeds_when_the_outage_begins(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        here = await step(store, 5)
        server.kill()
        results = await asyncio.gather(*(store.append(here, (token,), STEP) for token in (6, 7)))
        (won,) = [result for result in results if result is not None]
        found = await store.get("s")
        assert found is not None
        assert found.tail == won.tail


async def test_a_new_session_gets_no_conflict_of_an_earlier_session_of_the_same_id(
    server: RedisServer, make_store: MakeStore
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        between.sever()
        await step(store, 6)
        await step(other, 7)
        between.mend()
        await store.until_settled()
        assert await store.delete("s")
        assert await store.create(record())
        assert (await step(store, 8)).position == 1


async def test_a_session_deleted_from_the_store_is_deleted_from_the_fallback(
    server: RedisServer, make_store: MakeStore
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        between.sever()
        await step(store, 5)
        await other.delete("s")
        between.mend()
        await store.until_settled()
        assert await store.get("s") is None


async def test_a_session_that_is_not_durable_expires_when_idle(server: RedisServer) -> None:
    async with fallback_store(server.port) as store:
        await store.create(record())
        server.kill()
        await step(store, 5)
        store.clock.now_s += 101
        await store.count("m")
        assert store.standing.not_durable == 0


async def test_a_closing_process_writes_its_sessions_to_the_store(server: RedisServer, make_store: MakeStore) -> None:
    async with fallback_store(server.port) as store:
        store.shared.trips.on_back = lambda: None
        await store.create(record())
        server.kill()
        await step(store, 5)
        server.start()
        await until(lambda: store.standing.reachable)
    found = await (await make_store(server.url, namespace="n")).get("s")
    assert found is not None
    assert found.position == 1


async def test_sessions_that_a_full_store_rejects_are_written_later(server: RedisServer, make_store: MakeStore) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        for session in ("s", "t"):
            await store.create(record(session))
        between.sever()
        for session in ("s", "t"):
            await step(store, 5, session)
        await other.trips.do("CONFIG", "SET", "maxmemory", "1")
        between.mend()
        await until(lambda: store.standing.reachable)
        await store.until_written()
        assert store.standing.not_durable == 2
        await other.trips.do("CONFIG", "SET", "maxmemory", "0")
        found = await store.get("s")
        assert found is not None
        assert (found.position, found.durable, store.standing.not_durable) == (1, True, 1)


async def test_a_session_rejected_by_a_full_store_continues_without_failed_steps(
    server: RedisServer, make_store: MakeStore
) -> None:
    other = await make_store(server.url, namespace="n")
    async with proxy(server.port) as between, fallback_store(between.port) as store:
        await store.create(record())
        between.sever()
        await step(store, 5)
        await other.trips.do("CONFIG", "SET", "maxmemory", "1")
        between.mend()
        await until(lambda: store.standing.reachable)
        await store.until_written()
        full = await step(store, 6)
        assert (full.position, full.durable) == (2, False)
        seen = await store.get("s")
        assert seen is not None and (seen.position, seen.durable) == (2, False)
        back = await store.rewind("s", seen.revision, 1)
        assert back is not None and (back.position, back.durable) == (1, False)
        await other.trips.do("CONFIG", "SET", "maxmemory", "0")
        again = await step(store, 7)
        assert (again.position, again.durable, store.standing.not_durable) == (2, True, 0)
    found = await other.get("s")
    assert found is not None and (found.position, found.tail.ids().tolist()) == (2, [0, 5, 7])
