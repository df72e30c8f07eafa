"""Tests of forks: a session that is made from another one continues it without running its tokens."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness, listed
from wane.service.errors import InvalidRequest, QuotaExceeded, SessionExists, UnknownSession
from wane.service.sessions.stores.store import Commit
from wane.service.types.answer import NewSession, SessionView
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import ANYBODY, Owner, StepRequest

TOKENS = (5, 6, 7, 8)


async def begin(harness: EngineHarness, mode: Mode | None = None) -> None:
    await harness.engine.create_session("a", mode)
    await harness.engine.submit(StepRequest("a", TOKENS))
    harness.runner.calls.clear()


async def step(harness: EngineHarness, session: str, *tokens: int) -> list[tuple[int, float]]:
    return listed(await harness.engine.submit(StepRequest(session, tokens)))


def assert_close(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> None:
    assert [token for token, _ in one] == [token for token, _ in other]
    assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other])


async def test_a_fork_has_a_copy_of_the_state_and_runs_no_token(harness: EngineHarness) -> None:
    await begin(harness)
    view = await harness.engine.fork("a", "b")
    assert isinstance(view, NewSession)
    assert (view.session, view.position, view.state, view.error_bound) == ("b", 4, StateSource.RESIDENT, 0.0)
    assert harness.runner.calls == []
    other = await step(harness, "b", 9)
    assert harness.runner.roles() == ["step"]
    assert await step(harness, "a", 9) == other
    assert await step(harness, "a", 3) != await step(harness, "b", 4)  # they are two sessions from now on
    harness.engine.state_cache.check_integrity(idle=True)


async def test_a_fork_at_an_earlier_position_equals_a_session_of_these_tokens(harness: EngineHarness) -> None:
    await begin(harness)
    view = await harness.engine.fork("a", "b", 2)
    assert view.position == 2
    await harness.engine.create_session("c")
    await harness.engine.submit(StepRequest("c", TOKENS[:2]))
    assert_close(await step(harness, "b", 9), await step(harness, "c", 9))
    assert (await harness.engine.get_session("a")).position == 4
    empty = await harness.engine.fork("a", "d", 0)
    assert (empty.position, empty.state) == (0, StateSource.RESIDENT)


@pytest.mark.parametrize("mode", [Mode.RECURRENT, Mode.WINDOW])
async def test_a_fork_has_the_mode_of_its_session(harness: EngineHarness, mode: Mode) -> None:
    await begin(harness, mode)
    assert (await harness.engine.fork("a")).mode is mode
    assert len((await harness.engine.fork("a")).session) > 20


async def test_the_same_fork_again_is_the_same_session_until_it_has_made_a_step(harness: EngineHarness) -> None:
    await begin(harness)
    await harness.engine.fork("a", "b")
    again = await harness.engine.fork("a", "b")
    assert type(again) is SessionView
    with pytest.raises(SessionExists, match="'b' already exists, and it is at position 4, not 3"):
        await harness.engine.fork("a", "b", 3)
    await step(harness, "a", 9)
    with pytest.raises(SessionExists, match="'b' already exists, and it is at position 4, not 5"):
        await harness.engine.fork("a", "b")
    assert type(await harness.engine.fork("a", "b", 4)) is SessionView
    await step(harness, "b", 9)
    with pytest.raises(SessionExists, match="'b' already exists, and it has made a step"):
        await harness.engine.fork("a", "b")


async def test_faults_of_forks(make_harness: MakeHarness) -> None:
    harness = make_harness(session_history_tokens=3)
    with pytest.raises(UnknownSession):
        await harness.engine.fork("a", "b")
    await begin(harness)
    for position in (0, 5):
        with pytest.raises(InvalidRequest, match=r"can be forked at positions 2 to 4"):
            await harness.engine.fork("a", "b", position)
    with pytest.raises(InvalidRequest):
        await harness.engine.fork("a", "b/c")
    with pytest.raises(QuotaExceeded):
        await harness.engine.fork("a", "b", owner=Owner("", 1))
    assert isinstance(await harness.engine.fork("a", "b", owner=ANYBODY), NewSession)


async def test_a_fork_of_a_session_without_a_state_rebuilds_it(harness: EngineHarness) -> None:
    await begin(harness)
    harness.engine.state_cache.drop("a")
    await harness.engine.fork("a", "b")
    assert harness.runner.calls == []
    assert_close(await step(harness, "b", 9), await step(harness, "a", 9))


async def test_a_fork_of_a_session_whose_state_is_behind_runs_only_the_tokens_that_the_state_has_not_read(
    harness: EngineHarness,
) -> None:
    await begin(harness)
    record = await harness.engine.sessions.read("a")
    await harness.store.append_many([Commit(record, (3, 4))])  # as another replica does
    await harness.engine.fork("a", "b", 5)
    assert harness.runner.calls == []
    await harness.engine.create_session("c")
    await harness.engine.submit(StepRequest("c", (*TOKENS, 3)))
    harness.runner.calls.clear()
    found = await step(harness, "b", 9)
    assert [rows for role, rows in harness.runner.calls if role != "head"] == [[[3]], [[9]]]
    assert_close(found, await step(harness, "c", 9))


async def test_a_fork_survives_the_deletion_and_the_eviction_of_its_session(make_harness: MakeHarness) -> None:
    harness = make_harness()
    await begin(harness)
    await harness.engine.fork("a", "b")
    await harness.engine.delete_session("a")
    harness.runner.calls.clear()
    await step(harness, "b", 9)
    assert harness.runner.roles() == ["step"]


async def test_a_fork_without_a_free_state_is_made_all_the_same(make_harness: MakeHarness) -> None:
    harness = make_harness()
    await begin(harness)
    expected = await step(harness, "a", 9)
    await harness.engine.rewind("a", 4)
    await harness.engine.submit(StepRequest("a", (), unknown_names=("none",)))  # rebuilds the state
    cache = harness.engine.state_cache
    with ExitStack() as held:
        for _ in range(cache.capacity - cache.used - 2):
            held.enter_context(cache.lease())
        view = await harness.engine.fork("a", "b")
        assert (view.position, view.state) == (4, StateSource.REBUILT)
    assert_close(await step(harness, "b", 9), expected)


async def test_a_fork_waits_for_the_step_in_flight(harness: EngineHarness) -> None:
    await begin(harness)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    stepping = harness.engine.submit(StepRequest("a", (9,)))
    await harness.runner.until_busy()
    forking = asyncio.create_task(harness.engine.fork("a", "b"))
    cancelled = asyncio.create_task(harness.engine.fork("a", "c"))
    await asyncio.sleep(0)
    cancelled.cancel()
    harness.runner.gate.set()
    await stepping
    assert (await forking).position == 5
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(UnknownSession):
        await harness.engine.get_session("c")
