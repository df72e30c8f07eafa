from __future__ import annotations

import asyncio

import pytest

from tests.service.engine.test_step import expected, start
from tests.service.engine_harness import EngineHarness, MakeHarness, listed
from wane.service.engine import engine
from wane.service.errors import Unavailable
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.types.common import StateSource
from wane.service.types.request import StepRequest


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets an entry in place of the end of the process."""
    aborts: list[None] = []
    monkeypatch.setattr("os.abort", lambda: aborts.append(None))
    return aborts


async def test_a_leaked_slot_ends_the_process(
    harness: EngineHarness, aborted: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    await start(harness, 5)
    harness.engine.check_states()
    assert aborted == []
    leaked = harness.engine.state_cache.acquire()
    harness.engine.check_states()
    assert aborted == [None]
    assert "2 slots are in use for 1 sessions, but no request is in flight" in caplog.text
    harness.engine.state_cache.release(leaked)


async def test_the_slots_of_a_request_in_flight_are_not_leaked(harness: EngineHarness, aborted: list[None]) -> None:
    session = await start(harness, 5)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    step = asyncio.ensure_future(harness.engine.submit(StepRequest(session, (6,))))
    await harness.runner.until_busy()
    harness.engine.check_states()
    assert aborted == []
    harness.runner.gate.set()
    assert (await step).position == 2


@pytest.mark.parametrize("checks", [True, False])
async def test_the_invariants_are_checked_only_with_the_setting(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    harness = make_harness(settings_check_invariants=checks)
    looks = asyncio.Semaphore(0)
    checked: list[bool] = []

    async def look() -> None:
        looks.release()

    monkeypatch.setattr(engine, "HOUSEKEEPING_S", 0)
    monkeypatch.setattr(harness.engine, "expire", look)
    monkeypatch.setattr(harness.engine.state_cache, "check_integrity", lambda *, idle: checked.append(idle))
    harness.engine.keep()
    for _ in range(3):
        await looks.acquire()
    assert bool(checked) is checks
    monkeypatch.undo()


async def test_states_that_are_idle_for_longer_than_their_ttl_are_dropped_and_their_sessions_stay(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(state_ttl_s=60)
    idle, used = await start(harness, 5), await start(harness, 5)
    harness.clock.now_s += 40
    await harness.engine.submit(StepRequest(used, (6,)))
    harness.clock.now_s += 40
    await harness.engine.expire()
    assert harness.engine.state_cache.peek(idle) is None
    assert harness.engine.state_cache.peek(used) is not None
    answer = await harness.engine.submit(StepRequest(idle, (6,)))
    assert (answer.state, answer.position) == (StateSource.REBUILT, 2)
    assert listed(answer) == expected(harness, [5, 6])


async def test_expired_sessions_are_removed_without_a_request(harness: EngineHarness) -> None:
    await start(harness, 5)
    harness.clock.now_s += 3601
    await harness.engine.expire()
    assert isinstance(harness.store, MemoryStore)
    assert harness.store.sessions.used_bytes == 0
    assert harness.engine.state_cache.used_bytes == 0


async def test_an_unreachable_store_does_not_stop_the_housekeeping(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = asyncio.Semaphore(0)

    async def away(model: str) -> int:
        looks.release()
        raise Unavailable("the store is lost")

    monkeypatch.setattr(engine, "HOUSEKEEPING_S", 0)
    monkeypatch.setattr(harness.store, "count", away)
    harness.engine.keep()
    for _ in range(3):
        await looks.acquire()
    assert "the housekeeping of model fake failed" in caplog.text
