"""Tests of many steps in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest
from msgspec import to_builtins

from tests.service.engine_harness import EngineHarness, MakeHarness
from tests.service.server_harness import start_sessions
from wane.service.engine.pending import Pending, step_many
from wane.service.errors import InvalidRequest, UnknownSession
from wane.service.sessions.stores.store import Appended, Commit
from wane.service.types.answer import Answer
from wane.service.types.request import StepRequest


def requests(*steps: tuple[str, int]) -> list[StepRequest]:
    return [StepRequest(session, (token,)) for session, token in steps]


def kind(outcome: Answer | Exception) -> type:
    return Answer if isinstance(outcome, Answer) else type(outcome)


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
    report: Any = to_builtins(await started.engine.report())
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

    async def failing(commits: Sequence[Commit]) -> list[Appended]:
        results = await append_many([commit for commit in commits if commit.record.session != "a"])
        return [OSError("no more room") if commit.record.session == "a" else results.pop(0) for commit in commits]

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
