"""Steps that need one run and nothing else: the same as all others, without a task of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from wane.service.engine.step_many import step_many
from wane.service.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, UnknownSession, WaneError
from wane.service.sessions.stores.store import SessionRecord
from wane.service.types import Answer, Mode, StateSource, StepRequest


async def started(harness: EngineHarness, *names: str) -> None:
    """Sessions whose state is resident."""
    for name in names:
        await harness.engine.create_session(name)
        await harness.engine.submit(StepRequest(name, (5,)))


async def held(harness: EngineHarness, request: StepRequest) -> asyncio.Task[Answer]:
    """A step whose run has begun, and does not end before the gate opens."""
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    task = asyncio.ensure_future(harness.engine.submit(request))
    await harness.runner.until_busy()
    return task


async def position(harness: EngineHarness, session: str) -> int:
    return (await harness.engine.get_session(session)).position


@pytest.mark.parametrize(
    "request_",
    [
        StepRequest("a", (6,)),
        StepRequest("a", (6,), mode=Mode.RECURRENT),
        StepRequest("a", (6,), expected_position=1, idempotency_key="k"),
        StepRequest("a", (6, 7)),
        StepRequest("a", (6,), mode=Mode.WINDOW),
        StepRequest("a", (6,), mode=Mode.BOTH),
        StepRequest("a", (5,), expected_position=0),
    ],
    ids=["plain", "recurrent", "at its place", "two tokens", "window", "both", "replay"],
)
async def test_no_step_needs_a_task(harness: EngineHarness, request_: StepRequest) -> None:
    await started(harness, "a")
    before = asyncio.all_tasks()
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    pending = harness.engine.submit(request_)
    await harness.runner.until_busy()
    assert asyncio.all_tasks() == before
    harness.runner.gate.set()
    assert (await pending).session == "a"


async def test_a_state_that_is_not_resident_is_rebuilt(harness: EngineHarness) -> None:
    await started(harness, "a")
    harness.engine._pool.drop("a")
    answer = await harness.engine.submit(StepRequest("a", (6,)))
    assert answer.state is StateSource.REBUILT
    assert (await harness.engine.submit(StepRequest("a", (7,)))).state is StateSource.RESIDENT


async def test_a_second_step_of_the_session_waits_for_the_first(harness: EngineHarness) -> None:
    await started(harness, "a")
    first = await held(harness, StepRequest("a", (6,)))
    second = asyncio.ensure_future(harness.engine.submit(StepRequest("a", (7,))))
    await asyncio.sleep(0)
    harness.runner.gate.set()
    assert [(await first).position, (await second).position] == [2, 3]


@pytest.mark.parametrize("leave", ["cancelled", "late"])
async def test_a_step_that_is_left_in_the_queue_leaves_no_trace(harness: EngineHarness, leave: str) -> None:
    await started(harness, "a", "b")
    first = await held(harness, StepRequest("a", (6,)))
    deadline = asyncio.get_running_loop().time() + (0.0 if leave == "late" else 60.0)
    waiting = asyncio.ensure_future(harness.engine.submit(StepRequest("b", (6,), deadline=deadline)))
    await asyncio.sleep(0)
    if leave == "cancelled":
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if leave == "cancelled" else DeadlineExceeded):
        await waiting
    harness.runner.gate.set()
    await first
    assert await position(harness, "b") == 1
    assert (await harness.engine.submit(StepRequest("b", (6,)))).position == 2
    harness.engine._pool.check_integrity(idle=True)


async def test_a_step_that_is_left_while_it_runs_is_appended_and_can_be_replayed(harness: EngineHarness) -> None:
    await started(harness, "a")
    step = await held(harness, StepRequest("a", (6,), expected_position=1))
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    harness.runner.gate.set()
    again = await harness.engine.submit(StepRequest("a", (6,), expected_position=1))
    assert (again.position, again.replayed) == (2, True)


async def test_a_run_that_fails_changes_nothing(harness: EngineHarness) -> None:
    await started(harness, "a")
    harness.runner.poison = 6
    with pytest.raises(WaneError, match="failed to run"):
        await harness.engine.submit(StepRequest("a", (6,)))
    answer = await harness.engine.submit(StepRequest("a", (7,)))
    assert (answer.position, answer.state) == (2, StateSource.RESIDENT)
    harness.engine._pool.check_integrity(idle=True)


async def test_a_full_queue_refuses_and_the_session_is_free_again(make_harness: MakeHarness) -> None:
    harness = make_harness(max_queue=1)
    await started(harness, "a", "b", "c")
    first = await held(harness, StepRequest("a", (6,)))
    second = asyncio.ensure_future(harness.engine.submit(StepRequest("b", (6,))))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await harness.engine.submit(StepRequest("c", (6,)))
    harness.runner.gate.set()
    await asyncio.gather(first, second)
    assert (await harness.engine.submit(StepRequest("c", (6,)))).position == 2
    harness.engine._pool.check_integrity(idle=True)


async def test_an_engine_that_drains_waits_for_steps_and_takes_no_more(harness: EngineHarness) -> None:
    await started(harness, "a", "b")
    step = await held(harness, StepRequest("a", (6,)))
    draining = asyncio.create_task(harness.engine.drain())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await harness.engine.submit(StepRequest("b", (6,)))
    assert not draining.done()
    harness.runner.gate.set()
    await draining
    assert (await step).position == 2


async def test_steps_of_one_call_have_their_own_answers_and_errors_in_one_batch(harness: EngineHarness) -> None:
    await started(harness, "a", "b", "c")
    harness.runner.calls.clear()
    requests = [
        StepRequest("a", (6,)),
        StepRequest("nowhere", (6,)),
        StepRequest("b", (7,)),
        StepRequest("c", (10_000,)),
    ]
    outcomes = await step_many(harness.engine.submit, requests)
    assert [type(outcome) for outcome in outcomes] == [Answer, UnknownSession, Answer, InvalidRequest]
    assert harness.runner.calls == [("step", [[6], [7]])]


async def test_steps_of_one_call_are_counted_once_each(harness: EngineHarness) -> None:
    await started(harness, "a", "b", "c")
    await step_many(harness.engine.submit, [StepRequest(name, (6,)) for name in "abc"])
    document: Any = harness.engine._stats.document()
    assert document["operations"] == {"step": 6}
    assert document["modes"]["recurrent"]["requests"] == 6
    assert document["modes"]["recurrent"]["latency"]["total"]["count"] == 6
    assert harness.sample("wane_answers_total", operation="step", mode="recurrent") == 6


async def test_a_step_whose_commit_fails_fails_alone(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    await started(harness, "a", "b")
    append = harness.store.append

    async def failing(record: SessionRecord, *step: Any) -> SessionRecord | None:
        if record.session == "a":
            raise OSError("no more room")
        found: SessionRecord | None = await append(record, *step)
        return found

    monkeypatch.setattr(harness.store, "append", failing)
    outcomes = await step_many(harness.engine.submit, [StepRequest(name, (6,)) for name in "ab"])
    assert [type(outcome) for outcome in outcomes] == [OSError, Answer]
    monkeypatch.undo()
    assert (await harness.engine.submit(StepRequest("a", (6,)))).position == 2
    harness.engine._pool.check_integrity(idle=True)


@pytest.mark.parametrize("top_k", [1, 5, 9])
async def test_steps_of_one_batch_have_the_predictions_that_each_asked_for(harness: EngineHarness, top_k: int) -> None:
    await started(harness, "a", "b")
    few, many = await step_many(
        harness.engine.submit, [StepRequest("a", (6,), top_k=2), StepRequest("b", (6,), top_k=top_k)]
    )
    assert isinstance(few, Answer) and isinstance(many, Answer)
    assert (len(few.predictions), len(many.predictions)) == (2, top_k)
    assert few.predictions[:top_k] == many.predictions[:2]


async def test_of_steps_of_one_call_that_is_left_none_that_waits_is_appended(make_harness: MakeHarness) -> None:
    harness = make_harness(max_batch_size=1)
    await started(harness, "a", "b", "c")
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    call = asyncio.create_task(step_many(harness.engine.submit, [StepRequest(name, (6,)) for name in "abc"]))
    await harness.runner.until_busy()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    harness.runner.gate.set()
    await harness.engine.drain()
    assert [await position(harness, name) for name in "abc"] == [2, 1, 1]
    harness.engine._pool.check_integrity(idle=True)


async def test_a_call_of_both_kinds_that_is_left_at_once_appends_nothing(harness: EngineHarness) -> None:
    await started(harness, "a", "b", "c")
    first = await held(harness, StepRequest("c", (6,)))
    call = asyncio.create_task(step_many(harness.engine.submit, [StepRequest("a", (6,)), StepRequest("b", (6, 7))]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    harness.runner.gate.set()
    await first
    await harness.engine.drain()
    assert [await position(harness, name) for name in "ab"] == [1, 1]
    harness.engine._pool.check_integrity(idle=True)
