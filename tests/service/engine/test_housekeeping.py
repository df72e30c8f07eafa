from __future__ import annotations

import asyncio

import pytest

from tests.service.engine.test_step import expected, start
from tests.service.engine_harness import EngineHarness, MakeHarness, host_arrays, listed
from wane.service.engine import housekeeping
from wane.service.engine.housekeeping import SLOTS_AT_ONCE
from wane.service.errors import Unavailable
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.state.pool import RESERVED
from wane.service.types import StateSource, StepRequest


async def integrity(harness: EngineHarness) -> tuple[int, int]:
    """Returns two numbers from the report: how often all states have been checked, and how many faults were found."""
    found = (await harness.engine.report())["integrity"]
    assert isinstance(found, dict)
    assert harness.sample("wane_state_faults_total") == found["faults"]
    return found["rounds"], found["faults"]


def slot_of(harness: EngineHarness, session: str) -> int:
    """Returns the slot of the session's state."""
    state = harness.engine.state_cache.peek(session)
    assert state is not None
    return state.slot


async def test_each_inspection_checks_some_states_and_counts_full_rounds(harness: EngineHarness) -> None:
    sessions = [await start(harness, 5) for _ in range(SLOTS_AT_ONCE + 3)]
    assert await integrity(harness) == (0, 0)
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (0, 0)
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (1, 0)
    slot = slot_of(harness, sessions[-1])
    assert slot >= RESERVED + SLOTS_AT_ONCE
    host_arrays(harness.engine.state_cache)["hidden"][slot] = 7.0
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (1, 0)
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (2, 1)


async def test_a_corrupt_state_is_rebuilt_by_the_next_token(
    harness: EngineHarness, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt, other = await start(harness, 5, 6), await start(harness, 5, 7)
    await harness.engine.housekeeper.look()
    host_arrays(harness.engine.state_cache)["layers.0.c"][slot_of(harness, spoilt)] += 1.0
    await harness.engine.housekeeper.look()
    assert "a resident state changed without a write" in caplog.text
    for session, token, origin in ((spoilt, 6, StateSource.REBUILT), (other, 7, StateSource.RESIDENT)):
        answer = await harness.engine.submit(StepRequest(session, (8,)))
        assert answer.state is origin
        assert listed(answer) == expected(harness, [5, token, 8])
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (3, 1)


async def test_a_leaked_slot_is_found_and_freed(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    harness.engine.state_cache.acquire()  # the test never releases this slot
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (1, 1)
    assert harness.engine.state_cache.used_bytes == 0
    answer = await harness.engine.submit(StepRequest(session, (6,)))
    assert [(one.token_id, one.logprob) for one in answer.predictions] == expected(harness, [5, 6])


async def test_the_slots_of_a_request_in_flight_are_not_reported_as_leaked(harness: EngineHarness) -> None:
    session = await start(harness, 5)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    step = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (6,))))
    await harness.runner.until_busy()
    await harness.engine.housekeeper.look()
    assert await integrity(harness) == (1, 0)
    harness.runner.gate.set()
    assert (await step).position == 2


async def test_states_that_are_idle_for_longer_than_their_ttl_are_dropped_and_their_sessions_stay(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(state_ttl_s=60)
    idle, used = await start(harness, 5), await start(harness, 5)
    harness.clock.now_s += 40
    await harness.engine.submit(StepRequest(used, (6,)))
    harness.clock.now_s += 40
    await harness.engine.housekeeper.look()
    assert harness.engine.state_cache.peek(idle) is None
    assert harness.engine.state_cache.peek(used) is not None
    answer = await harness.engine.submit(StepRequest(idle, (6,)))
    assert (answer.state, answer.position) == (StateSource.REBUILT, 2)
    assert listed(answer) == expected(harness, [5, 6])


async def test_expired_sessions_are_removed_without_a_request(harness: EngineHarness) -> None:
    await start(harness, 5)
    harness.clock.now_s += 3601
    await harness.engine.housekeeper.look()
    assert isinstance(harness.store, MemoryStore)
    assert harness.store.used_bytes == 0
    assert harness.engine.state_cache.used_bytes == 0


async def test_an_unreachable_store_does_not_stop_the_housekeeping(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = asyncio.Semaphore(0)

    async def away(model: str) -> int:
        looks.release()
        raise Unavailable("the store is lost")

    monkeypatch.setattr(housekeeping, "EVERY_S", 0)
    monkeypatch.setattr(harness.store, "count", away)
    harness.engine.keep()
    for _ in range(3):
        await looks.acquire()
    assert "the housekeeping of model fake failed" in caplog.text
