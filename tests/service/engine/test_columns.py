"""Tests of one-token steps in columns, which are arrays with one row for each step of a batch. The tests cover
deadlines, cancelled steps, failures, and the effect on the other steps of the batch."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.service.engine_harness import TIMEOUT_S, EngineHarness, MakeHarness
from tests.service.server_harness import start_sessions
from wane.models.manifest import Role
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending
from wane.service.engine.steps import columns
from wane.service.engine.steps.answers import StepAnswer, StepAnswers
from wane.service.errors import (
    DeadlineExceeded,
    Unavailable,
    WaneError,
)
from wane.service.runners.outputs import Outputs, TopColumns
from wane.service.runners.runner import Array, Feeds
from wane.service.sessions.resident import ResidentSessions
from wane.service.sessions.sessions import Sessions
from wane.service.sessions.stores.store import Commit, SessionRecord
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import ANYBODY, Filter, StepRequest

HOUR_S = 3600.0
TRAVELS_S = 1.1 * HOUR_S  # longer than an hour, because a coarse timer may fire late by a 64th of its duration
POISON, HOT = 40, 41


@pytest.fixture
async def started(harness: EngineHarness) -> EngineHarness:
    """An engine with the sessions a, b and c. Each session has received one token. The engine processes the next
    one-token step of each session in columns."""
    await start_sessions(harness)
    harness.runner.poison, harness.runner.hot = POISON, HOT
    harness.runner.calls.clear()
    harness.runner.busy.clear()
    return harness


async def turns() -> None:
    """Runs all callbacks of the event loop that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def step(harness: EngineHarness, session: str, token: int = 6, *, hours: float | None = None) -> Pending[Answer]:
    """Submits a step. Its deadline is `hours` hours from now. If `hours` is None, it has no deadline."""
    deadline = None if hours is None else asyncio.get_running_loop().time() + hours * HOUR_S
    return harness.engine.submit(StepRequest(session, (token,), deadline=deadline))


async def keep_runner_busy(harness: EngineHarness, session: str = "c") -> Pending[Answer]:
    """Submits a step of two tokens, which occupies the runner until the test sets the runner's `gate`. The engine runs
    the first token as a sequence, and the second as a row."""
    harness.runner.gate.clear()
    pending = harness.engine.submit(StepRequest(session, (7, 8)))
    await harness.runner.until_busy()
    return pending


async def position(harness: EngineHarness, session: str) -> int:
    return (await harness.engine.get_session(session)).position


async def test_steps_of_one_turn_are_one_batch_in_columns(started: EngineHarness) -> None:
    pending = [step(started, name, token) for name, token in zip("abc", (6, 7, 8), strict=True)]
    answers = [await one for one in pending]
    assert [type(answer) for answer in answers] == [StepAnswer] * 3
    assert started.runner.calls == [("step", [[6], [7], [8]])]
    assert [answer.position for answer in answers] == [2, 2, 2]
    assert [answer.latency.batch_items for answer in answers] == [3] * 3


@pytest.mark.parametrize(("first", "items"), [(("a", "b"), [3, 3, 3]), (("a",), [1, 1])])
async def test_several_steps_wait_for_those_of_the_next_iteration_and_one_step_does_not(
    started: EngineHarness, first: tuple[str, ...], items: list[int]
) -> None:
    pending = [step(started, session) for session in first]
    await asyncio.sleep(0)
    pending.append(step(started, "c"))
    assert [(await one).latency.batch_items for one in pending] == items


async def test_the_filters_of_one_batch_have_a_limited_number_of_tokens(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "FILTERED_AT_ONCE", 4)
    filters = [Filter(exclude=(7, 8)), Filter(exclude=(7,), candidates=(7, 9)), Filter(exclude=(7, 8))]
    asked = zip("abc", filters, strict=True)
    pending = [started.engine.submit(StepRequest(name, (6,), filter=wanted)) for name, wanted in asked]
    answers = [{item.token_id for item in (await one).predictions} for one in pending]
    assert [len(rows) for _, rows in started.runner.calls] == [1, 1, 1]
    assert [answers[1], *(one & {7, 8} for one in answers)] == [{9}, set(), set(), set()]


async def test_a_batch_that_starts_before_the_previous_answers_releases_its_slots(started: EngineHarness) -> None:
    started.runner.gate.clear()
    first = step(started, "a")
    await started.runner.until_busy()
    second = step(started, "b")
    started.runner.gate.set()
    assert [(await one).position for one in (first, second)] == [2, 2]
    started.engine.state_cache.check_integrity(idle=True)


# Deadlines.


async def test_a_late_step_of_the_general_procedure_is_counted_as_late(
    started: EngineHarness, travel: Callable[[float], None]
) -> None:
    await keep_runner_busy(started)
    deadline = asyncio.get_running_loop().time() + HOUR_S
    late = started.engine.submit(StepRequest("a", (6,), idempotency_key="k", deadline=deadline))
    await turns()
    travel(TRAVELS_S)
    with pytest.raises(DeadlineExceeded, match="the deadline passed before the answer was ready"):
        await late
    started.runner.gate.set()
    await step(started, "b")
    reasons = [started.sample("wane_queue_dropped_total", reason=reason) for reason in ("deadline", "abandoned")]
    assert reasons == [1, 0]


@pytest.mark.parametrize("hours", [(1, 3), (3, 1)])
async def test_two_steps_fail_at_their_own_deadlines(
    started: EngineHarness, travel: Callable[[float], None], hours: tuple[int, int]
) -> None:
    await keep_runner_busy(started)
    steps = {given: step(started, name, hours=given) for name, given in zip("ab", hours, strict=True)}
    for given in (1, 3):
        travel(2 * TRAVELS_S)
        with pytest.raises(DeadlineExceeded):
            await steps[given]


async def test_a_step_that_is_late_when_its_batch_starts_fails(started: EngineHarness) -> None:
    late, other = step(started, "a", hours=-1), step(started, "b")
    with pytest.raises(DeadlineExceeded):
        await late
    assert (await other).position == 2
    assert started.runner.calls == [("step", [[6]])]


async def test_a_running_step_fails_at_its_deadline_and_a_queued_step_with_a_later_deadline_runs(
    started: EngineHarness, travel: Callable[[float], None]
) -> None:
    loop = asyncio.get_running_loop()
    started.runner.gate.clear()
    soon, later = loop.time() + HOUR_S, loop.time() + 9 * HOUR_S
    running = started.engine.take_step("a", 6, None, 5, soon)
    assert running is not None
    await started.runner.until_busy()
    queued = started.engine.take_step("b", 6, None, 5, later)
    assert queued is not None
    travel(TRAVELS_S)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert running.done() and not queued.done()
    started.runner.gate.set()
    assert isinstance(await queued, Answer)
    with pytest.raises(DeadlineExceeded):
        await running


# Cancelled steps.


async def test_a_step_that_is_cancelled_before_its_batch_has_no_effect(started: EngineHarness) -> None:
    await keep_runner_busy(started)
    left = step(started, "a")
    left.cancel()
    left.cancel()
    started.runner.gate.set()
    await started.engine.drain()
    assert await position(started, "a") == 1
    # The only step is the last token of the step that kept the runner busy.
    assert [rows for role, rows in started.runner.calls if role == "step"] == [[[8]]]
    assert started.sample("wane_queue_dropped_total", reason="abandoned") == 1


async def test_a_batch_of_cancelled_steps_is_not_run(started: EngineHarness) -> None:
    failed = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    for name in "ab":
        step(started, name).cancel()
    assert (await step(started, "a", 9)).position == 2
    assert started.runner.calls == [("step", [[9]])]
    assert failed == []


async def test_a_step_after_a_cancelled_step_of_its_session_runs(started: EngineHarness) -> None:
    await keep_runner_busy(started)
    left, next_ = step(started, "a", 6), step(started, "a", 9)
    left.cancel()
    started.runner.gate.set()
    assert (await next_).position == 2


# Several steps of one session, and queued steps that the engine takes out of the columns.


async def test_a_step_that_is_handed_back_keeps_its_place_in_the_queue(started: EngineHarness) -> None:
    first, second = step(started, "a", 6), step(started, "a", 7)
    # `get_session` writes the session to the store and takes it out of the columns. So the engine processes the second
    # step by the general procedure.
    await started.engine.get_session("a")
    assert [(await first).position, (await second).position] == [2, 3]
    assert [rows for _, rows in started.runner.calls] == [[[6]], [[7]]]


async def test_a_step_with_a_creator_starts_an_expired_session_again(started: EngineHarness) -> None:
    first = await started.engine.submit(StepRequest("a", (6,), creator=ANYBODY))
    assert (first.created, first.position, started.runner.calls) == (None, 2, [("step", [[6]])])
    started.clock.now_s += started.settings.session_ttl_s + 1
    again = await started.engine.submit(StepRequest("a", (6,), creator=ANYBODY))
    assert (again.created, again.position) == (True, 1)
    assert await position(started, "a") == 1


async def test_a_running_step_applies_to_its_recreated_session(started: EngineHarness) -> None:
    started.runner.gate.clear()
    pending = step(started, "a")
    await started.runner.until_busy()
    started.clock.now_s += started.settings.session_ttl_s + 1
    await started.engine.create_session("a")
    started.runner.gate.set()
    answer = await pending
    assert answer.position == 1
    assert answer.predictions[0].token_id == started.runner.logits([0, 6]).argmax()


async def test_a_queued_step_whose_state_was_evicted_is_rebuilt(started: EngineHarness) -> None:
    await keep_runner_busy(started)
    pending = step(started, "a", 6)
    started.engine.state_cache.drop("a")
    started.runner.gate.set()
    answer = await pending
    assert answer.position == 2
    assert answer.predictions[0].token_id == started.runner.logits([0, 5, 6]).argmax()


@pytest.mark.parametrize(
    "asks",
    [{"mode": Mode.RECURRENT}, {"prove": True}, {"idempotency_key": "k", "expected_position": 1}],
)
async def test_a_step_with_options_is_in_the_batch_of_the_others(
    started: EngineHarness, asks: dict[str, object]
) -> None:
    asking = started.engine.submit(StepRequest("a", (6,), **asks))  # type: ignore[arg-type]
    other = step(started, "b", 7)
    assert [(await one).position for one in (asking, other)] == [2, 2]
    assert started.runner.calls == [("step", [[6], [7]])]


async def test_steps_that_create_their_sessions_do_so_at_once_and_hold_up_no_other_step(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, waiting, may_create = started.store.create, list[str](), asyncio.Event()

    async def waits(record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        waiting.append(record.session)
        await may_create.wait()
        return await create(record, most)

    await started.engine.get_session("c")  # the store commits its next step
    await keep_runner_busy(started, "b")
    creating = [started.engine.submit(StepRequest(name, (6,), creator=ANYBODY)) for name in "xyz"]
    other = step(started, "c")
    await turns()
    monkeypatch.setattr(started.store, "create", waits)
    started.runner.gate.set()
    position_of_other = (await asyncio.wait_for(other, TIMEOUT_S)).position
    await turns()
    at_once, sizes = list(waiting), [len(rows) for _, rows in started.runner.calls]
    may_create.set()
    assert (position_of_other, at_once) == (2, ["x", "y", "z"])
    assert max(sizes) >= 4, "the steps were not in one batch"
    assert [(await one).created for one in creating] == [True] * 3


@pytest.mark.parametrize("asks", [{}, {"filter": Filter(exclude=(7,))}, {"cache": False}, {"top_k": 24}])
async def test_the_latency_of_a_longer_step_includes_the_run_of_its_first_tokens(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch, asks: dict[str, Any]
) -> None:
    run = started.engine.columns.run

    async def of_a_late_row(request: StepRequest, commit: Commit, ticket: Ticket, *rest: Any, **how: Any) -> Answer:
        ticket.queue_s, ticket.compute_s, ticket.batch_items = 2 * HOUR_S, 4 * HOUR_S, 7
        ticket.started_s -= 8 * HOUR_S
        return await run(request, commit, ticket, *rest, **how)

    monkeypatch.setattr(started.engine.columns, "run", of_a_late_row)
    latency = (await started.engine.submit(StepRequest("a", (6, 7), **asks))).latency
    hours = [value / 1e3 / HOUR_S for value in (latency.queue_ms, latency.compute_ms, latency.total_ms)]
    assert hours == pytest.approx([2, 4, 8], abs=0.5) and min(hours) >= 2
    assert latency.batch_items == 7


async def test_an_answer_names_the_excluded_events_that_are_unknown(started: EngineHarness) -> None:
    wanted = Filter(exclude=(7,), unknown=("gone",))
    assert (await started.engine.submit(StepRequest("a", (6,), filter=wanted))).unknown == ("gone",)


async def test_rows_that_are_answered_alone_share_what_they_compute_from_the_outputs(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, computed = Outputs.top, list[int]()

    def counted(outputs: Outputs, count: int) -> TopColumns:
        computed.append(count)
        return top(outputs, count)

    monkeypatch.setattr(Outputs, "top", counted)
    await asyncio.gather(*(started.engine.submit(StepRequest(name, (6,), prove=True)) for name in "abc"))
    assert len(computed) == 1


# Failures.


@pytest.mark.parametrize("bad", [POISON, HOT], ids=["a poisoned token", "a row that is not finite"])
async def test_a_failed_step_fails_alone_and_has_no_effect(started: EngineHarness, bad: int) -> None:
    failing, others = step(started, "a", bad), [step(started, name) for name in "bc"]
    with pytest.raises(WaneError, match="the model failed to run"):
        await failing
    assert [(await one).position for one in others] == [2, 2]
    answer = await step(started, "a", 6)
    assert answer.position == 2
    assert answer.predictions[0].token_id == started.runner.logits([0, 5, 6]).argmax()


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("is_evicted", [False, True])
async def test_a_step_commits_once_if_its_session_is_flushed_while_its_batch_fails(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch, is_inline: bool, is_evicted: bool
) -> None:
    if is_inline:
        monkeypatch.setattr(started.engine.batcher, "_quick", lambda role, count: (role, count) == ("step", 1))
    started.runner.gate.clear()
    flushed, failing = step(started, "a"), step(started, "b", POISON)
    await started.runner.until_busy()
    if is_evicted:
        started.engine.state_cache.drop("a")
    else:
        await started.engine.get_session("a")
    started.runner.gate.set()
    assert (await flushed).position == 2
    with pytest.raises(WaneError, match="the model failed to run"):
        await failing
    kept = await started.store.get("a")
    assert kept is not None and kept.tail.ids().tolist() == [0, 5, 6]
    assert (await step(started, "a", 7)).position == 3
    started.engine.state_cache.check_integrity(idle=True)


async def test_an_abandoned_step_of_a_failed_batch_commits_if_its_state_is_evicted_before_it_runs_alone(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, began, may_end = started.runner.run, threading.Event(), threading.Event()

    def pauses_alone(role: Role, feeds: Feeds) -> Mapping[str, Array]:
        if len(feeds["tokens"]) == 1:
            began.set()
            may_end.wait(TIMEOUT_S)
        return run(role, feeds)

    started.runner.gate.clear()
    failing, abandoned = step(started, "b", POISON), step(started, "a")
    await started.runner.until_busy()
    monkeypatch.setattr(started.runner, "run", pauses_alone)
    abandoned.cancel()
    started.runner.gate.set()
    await asyncio.to_thread(began.wait, TIMEOUT_S)
    started.engine.state_cache.drop("a")
    may_end.set()
    with pytest.raises(WaneError, match="the model failed to run"):
        await failing
    assert (await step(started, "a", 7)).position == 3


async def test_a_step_that_cannot_be_answered_fails_alone(started: EngineHarness) -> None:
    outside = started.engine.submit(StepRequest("a", (6,), filter=Filter(exclude=(10**6,))))
    others = [step(started, name) for name in "bc"]
    with pytest.raises(IndexError):
        await outside
    assert [(await one).position for one in others] == [2, 2]
    assert (await step(started, "a")).position == 3  # the step was committed


@pytest.mark.parametrize(
    ("owner", "name", "fails"),
    [
        (StepAnswers, "asking", True),
        (StepAnswers, "_by_arrays", True),
        (StepAnswers, "_count", False),
        (ResidentSessions, "commit", True),
        (ResidentSessions, "add", True),
        (Sessions, "commit_many", True),
        (Outputs, "finite", True),
    ],
)
async def test_an_error_in_a_batch_of_steps_leaves_no_step_waiting(
    started: EngineHarness, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fails: bool
) -> None:
    await started.engine.get_session("c")  # the store commits its next step, and arrays those of a and b
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, property(broken) if name == "finite" else broken)
        pending = [step(started, session) for session in "abc"]
        results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), TIMEOUT_S)
    failed = [isinstance(result, Exception) for result in results]
    of_the_store, of_arrays = name in ("add", "commit_many"), name == "commit"
    assert failed == [fails and not of_the_store] * 2 + [fails and not of_arrays]
    assert len(reported) == (0 if fails else 2)
    assert not started.engine.admission.active and not started.engine.sessions.locks.waiting
    started.engine.state_cache.check_integrity(idle=True)
    for session in "abc":
        await step(started, session)


# Shutdown.


async def test_a_closed_engine_commits_running_steps_and_refuses_queued_steps(started: EngineHarness) -> None:
    started.runner.gate.clear()
    runs = step(started, "a")
    await started.runner.until_busy()
    waits = step(started, "b")
    closing = asyncio.ensure_future(started.engine.close())
    with pytest.raises(Unavailable):
        await waits
    started.runner.gate.set()
    await closing
    assert (await runs).position == 2
    records = [await started.store.get(name) for name in "ab"]
    assert [record and record.position for record in records] == [2, 1]


async def test_a_step_may_be_submitted_when_another_is_answered(started: EngineHarness) -> None:
    later = list[Pending[Answer]]()
    first = started.engine.take_step("a", 6, 1, 5, None)
    assert first is not None
    first.add_done_callback(lambda _: later.append(started.engine.step_one("a", 7, 2, 5, None)))
    assert (await step(started, "b")).position == 2
    await started.engine.drain()
    assert [(await one).position for one in (first, *later)] == [2, 3]


async def test_a_failing_callback_does_not_affect_the_other_steps(started: EngineHarness) -> None:
    logged = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["exception"]))
    failure = LookupError("no answer")

    def fail(_: object) -> None:
        raise failure

    first = started.engine.take_step("a", 6, 1, 5, None)
    assert first is not None
    first.add_done_callback(fail)
    assert (await step(started, "b")).position == 2
    assert logged == [failure]


@pytest.mark.parametrize("end", ["succeeds", "conflicts", "leaves", "late", "call"])
async def test_a_finished_step_leaves_no_reference_cycle(started: EngineHarness, end: str) -> None:
    async def run() -> None:
        if end == "call":
            rows = [started.engine.take_step(name, 6, None, 5, None) for name in "ab"]
            for row in rows:
                assert row is not None
                await row
            return
        expected = 99 if end == "conflicts" else None
        deadline = asyncio.get_running_loop().time() - 1 if end == "late" else None
        pending = started.engine.submit(StepRequest("a", (6,), expected_position=expected, deadline=deadline))
        if end == "leaves":
            pending.cancel()
            await step(started, "b")
            return
        try:
            assert (await pending).predictions
        except WaneError:
            assert end in ("conflicts", "late")
        finally:
            del pending  # it holds the error, whose traceback holds this frame

    # The garbage of these steps is not counted, because the first steps also create objects that later steps reuse.
    for _ in range(3):
        await step(started, "a")
        await run()
    if end == "conflicts":
        await step(started, "a")
    await turns()
    gc.collect()
    gc.disable()
    try:
        await run()
        await turns()
        assert gc.collect() == 0
    finally:
        gc.enable()


async def test_the_buffers_reserve_no_more_memory_than_the_store_has(make_harness: MakeHarness) -> None:
    budget = 2**24
    harness = make_harness(session_history_tokens=4096, state_budget_bytes=2**28, session_budget_bytes=budget)
    rows = len(harness.engine._resident._rings)
    assert rows * 4096 * 2 <= budget  # two bytes a token
    assert harness.engine.state_cache.capacity > rows > 1
    for name in ("a", "b"):
        await harness.engine.create_session(name)
        for position, token in enumerate((5, 6, 7), 1):
            assert (await harness.engine.submit(StepRequest(name, (token,)))).position == position


async def test_a_row_does_not_fail_because_another_row_of_its_batch_has_lost_its_state(started: EngineHarness) -> None:
    started.runner.gate.clear()
    poisoned, good = step(started, "a", POISON), step(started, "b")
    await started.runner.until_busy()
    started.engine.state_cache.drop("a")
    started.runner.gate.set()
    assert (await good).position == 2
    with pytest.raises(WaneError):
        await poisoned
    assert await position(started, "a") == 1
