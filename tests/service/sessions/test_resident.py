"""Tests of sessions whose steps the engine processes in columns, which are arrays with one row for each session. The
tests check what is written to the store, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.engine_harness import Clock, EngineHarness, MakeHarness
from tests.service.sessions.stores.append import append, present
from wane.models.architecture import StateTensor
from wane.service.runners.runner import HIDDEN, NEXT, Array
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.packed import SHARDS, entry_bytes
from wane.service.sessions.stores.store import LastStep, SessionRecord, TokenHistory, of_tokens
from wane.service.state.pool import CachedState, StatePool
from wane.service.types.common import Mode
from wane.service.types.request import StepRequest

TTL_S, HISTORY, BUDGET_BYTES = 64.0, 40, 2**20
CAPACITY = 16
WIDTH = 1  # the number of values in a state, and also in the output layer's input


def outputs(rows: int) -> Mapping[str, Array]:
    """Returns the outputs of a fake run with this number of rows."""
    return {HIDDEN: np.ones((rows, WIDTH), np.float32), f"{NEXT}h": np.ones((rows, WIDTH), np.float32)}


class Bench:
    """A store and the columns of its sessions, without an engine."""

    def __init__(self, file: Path | None = None, budget_bytes: int = BUDGET_BYTES) -> None:
        self.clock = Clock()
        self.store = MemoryStore(HISTORY, TTL_S, budget_bytes, self.clock, file=file)
        self.cache = StatePool([StateTensor(name="h", shape=(WIDTH,))], WIDTH, CAPACITY * 8)
        self.resident = ResidentSessions(self.cache, self.store, TTL_S, TokenHistory.start(0, 300), self.clock)
        self.written: list[tuple[str, int]] = []
        """Each session that was flushed to the store, and its position."""
        flush = self.resident.flush

        def note(session: str) -> tuple[TokenHistory, int, float]:
            flushed = flush(session)
            self.written.append((session, flushed[1]))
            return flushed

        self.resident._flush = note

    async def start(self, session: str) -> None:
        """Creates a session, and appends the token 5. From now on the session's steps are processed in columns."""
        await self.store.create(SessionRecord(session, "m", "1", Mode.AUTO, 0, TokenHistory.start(0, 300)))
        created = present(self.store.get_cached(session))
        record = await append(self.store, created, (5,))
        assert record is not None
        with self.cache.lease() as slot:
            self.cache.put(session, CachedState(slot, record.revision, 0, 1), self.clock())
        self.resident.add(record)

    def step(self, *sessions: str, token: int = 6) -> None:
        """Appends one token to each session, in one batch. The sessions must be different."""
        slots = [self.cache.slot_of(session) for session in sessions]
        tokens = np.full(len(sessions), token)
        self.resident.commit(np.array(slots, np.intp), sessions, tokens, outputs(len(sessions)))

    async def record(self, session: str) -> SessionRecord:
        """Returns the session's record in the store."""
        return present(await self.store.get(session))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_session_is_written_to_the_store_when_it_is_read(bench: Bench) -> None:
    await bench.start("a")
    for _ in range(2 * HISTORY):
        bench.step("a")
    assert not bench.written
    assert (await bench.record("a")).position == 2 * HISTORY + 1
    assert bench.written == [("a", 2 * HISTORY + 1)]
    assert bench.resident.slot("a") is None, "the read must take the session out of the columns"


async def test_a_buffered_session_counts_with_a_full_history_until_it_is_written(bench: Bench) -> None:
    await bench.start("a")
    assert bench.store.sessions.used_bytes == entry_bytes("a", 2 * HISTORY)
    bench.step("a")
    await bench.record("a")
    assert bench.store.sessions.used_bytes == entry_bytes("a", 6)
    await bench.store.delete("a")
    assert bench.store.sessions.used_bytes == 0


@pytest.mark.parametrize(
    ("known", "position"), [(3, 3), (3, HISTORY), (3, 100), (HISTORY, HISTORY), (HISTORY, 2 * HISTORY + 7)]
)
@pytest.mark.parametrize("steps", [0, 1, HISTORY - 3, HISTORY + 5])
async def test_any_history_is_the_same_after_it_was_buffered(
    bench: Bench, known: int, position: int, steps: int
) -> None:
    tail = TokenHistory.start(0, 300).ending([*range(100, 100 + known)], position, HISTORY)
    await bench.store.create(SessionRecord("a", "m", "1", Mode.AUTO, position, tail))
    record = await bench.record("a")
    with bench.cache.lease() as slot:
        bench.cache.put("a", CachedState(slot, record.revision, 0, position), bench.clock())
    bench.resident.add(record)
    for step in range(steps):
        bench.step("a", token=200 + step % 50)
        tail = tail.append([200 + step % 50], position + step + 1, HISTORY)
    there = bench.resident.slot("a")
    assert there is not None
    assert bench.resident.tail(there)[0].ids().tolist() == tail.ids().tolist()
    seen, count = bench.resident.seen(there), min(len(tail), position + steps)
    expected = sorted(tail.ids()[len(tail) - count :].tolist())
    assert sorted(seen.tolist()) == expected
    bench.step("a")
    assert sorted(seen.tolist()) == expected, "a commit changed the tokens that were read before it"
    bench.cache.drop("a")
    tail = tail.append([6], position + steps + 1, HISTORY)
    assert (await bench.record("a")).tail == tail


@given(
    st.lists(st.tuples(st.integers(0, 299), st.sampled_from([0.0, 0.5, 8.0])), min_size=1, max_size=3 * HISTORY),
    st.integers(0, 8),
)
async def test_a_buffered_session_reads_as_if_each_token_had_been_appended(
    steps: list[tuple[int, float]], idle_s: int
) -> None:
    bench, other = Bench(), Bench()
    await bench.start("a")
    await other.start("a")
    for token, seconds in steps:
        for one in (bench, other):
            one.clock.now_s += seconds
        bench.step("a", token=token)
        before = await other.record("a")
        assert await append(other.store, before, (token,)) is not None
    began, expected = (await other.record("a")).revision - len(steps), await other.record("a")
    for one in (bench, other):
        one.clock.now_s += idle_s
    found = await bench.record("a")
    cached = bench.cache.peek("a")
    assert cached is not None
    assert (cached.revision, cached.position) == (found.revision, found.position)
    assert found.revision % 2**32 == expected.revision % 2**32 == 1 + len(steps)
    assert began == expected.revision - len(steps)
    assert found._replace(revision=0) == expected._replace(revision=0, idle_s=float(idle_s))
    bench.cache.check_integrity()


async def test_a_session_is_written_to_the_store_before_its_state_is_evicted(bench: Bench) -> None:
    await bench.start("a")
    bench.step("a")
    bench.clock.now_s += 10
    bench.cache.drop("a")
    assert bench.written == [("a", 2)]
    record = await bench.record("a")
    assert (record.position, record.idle_s) == (2, 10)


async def test_reading_a_buffered_session_does_not_keep_it_alive(bench: Bench) -> None:
    await bench.start("a")
    bench.step("a")
    bench.clock.now_s += TTL_S - 1
    assert (await bench.record("a")).idle_s == TTL_S - 1
    bench.clock.now_s += 2
    assert await bench.store.get("a") is None


async def test_a_stepped_session_does_not_expire_before_its_write(bench: Bench) -> None:
    await bench.start("a")
    await bench.start("b")
    for _ in range(3):
        bench.clock.now_s += TTL_S - 1
        bench.step("a")
    assert bench.resident.alive(np.array([bench.cache.slot_of("a"), bench.cache.slot_of("b")])).tolist() == [
        True,
        False,
    ]
    assert await bench.store.count("m") == 1
    assert (await bench.record("a")).position == 4


@pytest.mark.parametrize("dropped", [False, True], ids=["buffered", "state dropped"])
async def test_an_expired_buffered_session_is_removed_although_a_session_of_its_shard_is_in_use(
    bench: Bench, dropped: bool
) -> None:
    other = next(name for name in map(str, range(10**6)) if hash(name) % SHARDS == hash("a") % SHARDS)
    await bench.start("a")
    bench.clock.now_s += TTL_S - 1
    await bench.start(other)
    bench.clock.now_s += 2
    if dropped:
        bench.cache.drop_idle(bench.clock() - TTL_S)
    assert await bench.store.count("m") == 1
    assert len(bench.store.sessions) == 1
    assert await bench.store.get("a") is None
    await bench.store.delete(other)
    assert bench.store.sessions.used_bytes == 0


async def test_a_full_store_evicts_any_number_of_buffered_sessions() -> None:
    clock = Clock()
    store = MemoryStore(HISTORY, TTL_S, BUDGET_BYTES, clock)
    slots = 2000
    cache = StatePool([StateTensor(name="h", shape=(WIDTH,))], WIDTH, slots * 8)
    resident = ResidentSessions(cache, store, TTL_S, TokenHistory.start(0, 300), clock)
    names = [f"s{index}" for index in range(slots - 2)]
    for name in names:
        await store.create(SessionRecord(name, "m", "1", Mode.AUTO, 1, TokenHistory.start(0, 300)))
        record = present(store.get_cached(name))
        with cache.lease() as slot:
            cache.put(name, CachedState(slot, record.revision, 0, 1), clock())
        resident.add(record)
        clock.now_s += 0.001
    for name in names:
        clock.now_s += 0.001
        resident.commit(np.array([cache.slot_of(name)]), [name], np.array([6]), outputs(1))
    store.sessions.budget_bytes = store.sessions.used_bytes // 2
    # The read writes this session to the store, and the store then evicts other sessions.
    assert await store.get(names[-1]) is not None
    assert len(store.sessions) < len(names)
    # The oldest session of a shard is evicted first. The shard of a name depends on the process's hash seed.
    assert any([await store.get(name) is None for name in names[: len(names) // 10]])
    assert store.sessions.used_bytes <= store.sessions.budget_bytes


async def test_close_writes_all_tokens(bench: Bench) -> None:
    for name in "abc":
        await bench.start(name)
    bench.step("a", "b")
    bench.step("b")
    await bench.resident.close()
    assert sorted(bench.written) == [("a", 2), ("b", 3), ("c", 1)]
    assert [bench.resident.slot(name) for name in "abc"] == [None] * 3
    await bench.resident.close()
    assert len(bench.written) == 3


async def test_a_dump_file_has_the_buffered_tokens(tmp_path: Path) -> None:
    file = tmp_path / "sessions"
    bench = Bench(file)
    await bench.store.open()
    await bench.start("a")
    bench.step("a", token=7)
    await bench.store.close()
    again = Bench(file)
    await again.store.open()
    record = await again.record("a")
    assert (record.position, record.tail.ids().tolist()) == (2, [0, 5, 7])
    assert record.last == LastStep(1, of_tokens((7,)), None)


async def test_another_engine_continues_exactly_where_a_buffered_session_is(make_harness: MakeHarness) -> None:
    old = make_harness()
    await old.engine.create_session("a")
    tokens = [5, 6, 7, 8, 9]
    for token in tokens:
        await old.engine.submit(StepRequest("a", (token,)))
    new = make_harness(store=old.store, clock=old.clock)
    answer = await new.engine.submit(StepRequest("a", (10,), expected_position=5))
    assert answer.position == 6
    assert answer.predictions[0].token_id == new.runner.logits([0, *tokens, 10]).argmax()
    # Like a request that began before the swap, this step uses the old engine.
    again = await old.engine.submit(StepRequest("a", (11,)))
    assert again.position == 7
    assert again.predictions[0].token_id == new.runner.logits([0, *tokens, 10, 11]).argmax()
    await old.engine.drain()
    await old.engine.close()
    assert (await new.engine.submit(StepRequest("a", (12,)))).position == 8


async def test_the_steps_of_a_closed_engine_are_in_the_store(harness: EngineHarness) -> None:
    await harness.engine.create_session("a")
    for token in (5, 6, 7):
        await harness.engine.submit(StepRequest("a", (token,)))
    await harness.engine.close()
    record = present(await harness.store.get("a"))
    assert record.tail.ids().tolist() == [0, 5, 6, 7]


async def test_a_buffered_session_that_makes_the_store_exceed_its_budget_keeps_its_tokens(bench: Bench) -> None:
    await bench.start("a")
    await bench.record("a")
    bench.store.sessions.budget_bytes = bench.store.sessions.used_bytes
    record = await bench.record("a")
    bench.resident.add(record)
    bench.step("a", token=7)
    there = bench.resident.slot("a")
    assert there is not None
    assert bench.resident.tail(there)[0].ids().tolist() == [0, 5, 7]
    assert await bench.store.get("a") is None, "the read takes the tokens, which do not fit, so the store must evict"
    bench.resident.add(record)
    assert bench.resident.slot("a") is None, "an evicted session must not be buffered"
