"""Tests of many steps in one call. Some tests use `Stepper`, which records the order of the steps. The other tests use
an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.server_harness import start_sessions
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending, step_many
from wane.service.errors import EarlierStepFailed, InvalidRequest, UnknownSession
from wane.service.sessions.stores.store import Append, Appended
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import Latency, StepRequest


class Stepper:
    """Answers steps in place of an engine. A step with token 0 fails. `order` lists the steps in the order of their
    start. `most` is the largest number of steps in progress at the same time."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.busy = self.most = 0

    def submit(self, request: StepRequest) -> Pending[Answer]:
        return Pending.of(self._step(request), Ticket())

    async def _step(self, request: StepRequest) -> Answer:
        self.order.append((request.session, request.tokens[0]))
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        if request.tokens == (0,):
            raise InvalidRequest("no zeros")
        return Answer(
            "m",
            "1",
            "cpu",
            Mode.RECURRENT,
            None,
            (),
            Latency(0, 0, 0),
            StateSource.RESIDENT,
            0.0,
            None,
            False,
            position=request.tokens[0],
        )


def requests(*steps: tuple[str, int]) -> list[StepRequest]:
    return [StepRequest(session, (token,)) for session, token in steps]


def kind(outcome: Answer | Exception) -> type:
    return Answer if isinstance(outcome, Answer) else type(outcome)


async def test_results_are_in_order_and_sessions_run_concurrently() -> None:
    stepper = Stepper()
    outcomes = await step_many(stepper.submit, requests(("a", 1), ("b", 2), ("c", 3)))
    assert [outcome.position for outcome in outcomes if isinstance(outcome, Answer)] == [1, 2, 3]
    assert stepper.most == 3


async def test_steps_of_one_session_run_in_order() -> None:
    stepper = Stepper()
    await step_many(stepper.submit, requests(("a", 1), ("b", 5), ("a", 2), ("a", 3)))
    assert [token for session, token in stepper.order if session == "a"] == [1, 2, 3]
    assert stepper.most == 2


async def test_a_failure_skips_only_the_later_steps_of_its_session() -> None:
    stepper = Stepper()
    outcomes = await step_many(stepper.submit, requests(("a", 1), ("a", 0), ("b", 2), ("a", 3), ("b", 4)))
    assert [kind(outcome) for outcome in outcomes] == [Answer, InvalidRequest, Answer, EarlierStepFailed, Answer]
    assert ("a", 3) not in stepper.order


async def test_a_skipped_step_names_the_session_without_its_owner() -> None:
    outcomes = await step_many(Stepper().submit, requests(("alice/a", 0), ("alice/a", 1)))
    assert "session 'a' " in str(outcomes[1])


async def test_all_steps_of_a_call_are_submitted_in_the_context_of_the_call(harness: EngineHarness) -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    seen: list[str] = []

    def submit(request: StepRequest) -> Pending[Answer]:
        seen.append(caller.get())
        return harness.engine.submit(request)

    await harness.engine.create_session("s")
    caller.set("the call")
    # The second step starts only after the batch with the first step has run.
    await step_many(submit, requests(("s", 5), ("s", 6)))
    assert seen == ["the call", "the call"]


# With an engine.


@pytest.fixture
async def started(harness: EngineHarness) -> EngineHarness:
    """An engine with the sessions a, b and c. Each session has received one token."""
    await start_sessions(harness)
    return harness


async def position(harness: EngineHarness, session: str) -> int:
    return (await harness.engine.get_session(session)).position


async def test_steps_have_their_own_answers_and_errors_in_one_batch(started: EngineHarness) -> None:
    started.runner.calls.clear()
    steps = requests(("a", 6), ("nowhere", 6), ("b", 7), ("c", 10_000))
    outcomes = await step_many(started.engine.submit, steps)
    assert [kind(outcome) for outcome in outcomes] == [Answer, UnknownSession, Answer, InvalidRequest]
    assert started.runner.calls == [("step", [[6], [7]])]


async def test_steps_are_counted_once_each(started: EngineHarness) -> None:
    await step_many(started.engine.submit, requests(("a", 6), ("b", 6), ("c", 6)))
    report: Any = await started.engine.report()
    assert report["operations"] == {"step": 6}  # the count includes the three steps that started the sessions
    assert report["modes"]["recurrent"]["requests"] == 6
    assert report["modes"]["recurrent"]["latency"]["total"]["count"] == 6
    assert started.sample("wane_answers_total", operation="step", mode="recurrent") == 6


async def test_a_failed_commit_fails_only_its_own_step(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = make_harness(puts_out_top=False)
    await start_sessions(started)
    append_many = started.store.append_many

    async def failing(appends: Sequence[Append]) -> list[Appended]:
        results = await append_many([one for one in appends if one.record.session != "a"])
        return [OSError("no more room") if one.record.session == "a" else results.pop(0) for one in appends]

    with monkeypatch.context() as patched:
        patched.setattr(started.store, "append_many", failing)
        outcomes = await step_many(started.engine.submit, requests(("a", 6), ("b", 6)))
    assert [kind(outcome) for outcome in outcomes] == [OSError, Answer]
    assert (await started.engine.submit(StepRequest("a", (6,)))).position == 2


@pytest.mark.parametrize("top_k", [1, 5, 9])
async def test_each_step_of_a_batch_has_its_own_top_k(started: EngineHarness, top_k: int) -> None:
    steps = [StepRequest("a", (6,), top_k=2), StepRequest("b", (6,), top_k=top_k)]
    few, many = await step_many(started.engine.submit, steps)
    assert isinstance(few, Answer) and isinstance(many, Answer)
    assert (len(few.predictions), len(many.predictions)) == (2, top_k)
    assert few.predictions[:top_k] == many.predictions[:2]


async def test_a_cancelled_call_withdraws_its_queued_steps(make_harness: MakeHarness) -> None:
    harness = make_harness(max_batch_size=1)
    await start_sessions(harness)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    call = asyncio.create_task(step_many(harness.engine.submit, requests(("a", 6), ("b", 6), ("c", 6), ("c", 7))))
    await harness.runner.until_busy()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    harness.runner.gate.set()
    await harness.engine.drain()
    assert [await position(harness, name) for name in "abc"] == [2, 1, 1]
