"""Tests of submitted requests: their deadlines, cancellation and proofs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.service.engine_harness import EngineHarness, FakeProof, MakeHarness
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder, AnswerPlan
from wane.service.engine.pending import Admission, Pending
from wane.service.errors import DeadlineExceeded, Unavailable
from wane.service.sessions.sessions import Sessions
from wane.service.sessions.stores.store import Appended, Commit
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest, StepRequest

WINDOW = PredictRequest((5, 6, 7), mode=Mode.WINDOW, window=2)


def submitted(harness: EngineHarness, request: PredictRequest = WINDOW) -> Pending[Answer]:
    """Submits the request, by default a prediction from a window."""
    return harness.engine.submit(request)


HOUR_S = 3600.0


class Work:
    """The work of a request. `withdrawn` is true if the request has cancelled the work."""

    def __init__(self) -> None:
        self.waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.withdrawn = False

    async def run(self) -> int:
        try:
            return await self.waiter
        except asyncio.CancelledError:
            self.withdrawn = True
            raise


def ticket(*, entered: bool = False) -> Ticket:
    """Returns a ticket whose deadline is in an hour."""
    made = Ticket(asyncio.get_running_loop().time() + HOUR_S)
    made.entered = entered
    return made


async def turns() -> None:
    """Runs all callbacks of the event loop that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_result_calls_each_callback_once(travel: Callable[[float], None]) -> None:
    work, results = Work(), list[int]()
    given = ticket()
    pending = Pending.of(work.run(), given)
    pending.add_done_callback(lambda done: results.append(done.result()))
    work.waiter.set_result(7)
    await turns()
    travel(2 * HOUR_S)
    await turns()
    pending.cancel()
    assert results == [7] and not given.abandoned


@pytest.mark.parametrize("entered", [False, True])
async def test_cancel_withdraws_work_that_has_not_entered_a_batch(entered: bool) -> None:
    work = Work()
    given = ticket(entered=entered)
    pending = Pending.of(work.run(), given)
    await turns()
    pending.cancel()
    pending.cancel()
    assert given.abandoned and pending.cancelled()
    await turns()
    assert work.withdrawn is not entered
    if entered:
        work.waiter.set_result(7)
    await turns()
    assert pending.cancelled()


async def test_cancelling_the_task_that_awaits_the_result_withdraws_the_request() -> None:
    work, given = Work(), ticket()

    async def wait() -> int:
        return await Pending.of(work.run(), given)

    waiting = asyncio.create_task(wait())
    await turns()
    waiting.cancel()
    await turns()
    assert waiting.cancelled() and given.abandoned and work.withdrawn


async def test_work_that_is_cancelled_before_its_first_step_still_begins() -> None:
    begun = list[str]()

    async def run() -> None:
        begun.append("begun")
        await asyncio.sleep(HOUR_S)

    Pending.of(run(), ticket()).cancel()
    await turns()
    assert begun == ["begun"]


@pytest.mark.parametrize("entered", [False, True])
async def test_a_passed_deadline_withdraws_work_that_has_not_entered_a_batch(
    travel: Callable[[float], None], entered: bool
) -> None:
    work = Work()
    given = ticket(entered=entered)
    pending = Pending.of(work.run(), given)
    travel(2 * HOUR_S)
    with pytest.raises(DeadlineExceeded) as late:
        await pending
    assert ("the step still commits" in str(late.value)) is entered
    await turns()
    assert work.withdrawn is not entered
    assert given.abandoned


async def test_work_that_the_engine_cancels_is_unavailable() -> None:
    work = Work()
    pending = Pending.of(work.run(), ticket())
    await turns()
    work.waiter.cancel()
    with pytest.raises(Unavailable):
        await pending


# Windows.


async def test_a_window_that_is_cancelled_while_it_runs_is_dropped(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    window = submitted(harness)
    await harness.runner.until_busy()
    window.cancel()
    harness.runner.gate.set()
    await submitted(harness)
    await harness.engine.drain()


async def test_an_answer_that_cannot_be_built_fails_alone(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = submitted(harness)

    def fails_once(*given: object) -> object:
        monkeypatch.undo()
        raise LookupError(str(len(given)))

    monkeypatch.setattr(harness.engine.answer_builder, "predictions", fails_once)
    other = submitted(harness)
    with pytest.raises(LookupError):
        await failing
    assert (await other).window == 2
    await harness.engine.drain()


# Searches for proofs.

PROVED = PredictRequest((5, 6, 7, 8, 9, 10), mode=Mode.WINDOW, prove=True)
SEARCHES: list[PredictRequest | StepRequest] = [
    PROVED,
    PredictRequest(session="a", mode=Mode.WINDOW, window=2, prove=True),
    StepRequest("a", (8, 9), mode=Mode.WINDOW, expected_position=6, prove=True),
    StepRequest("a", (8, 9), mode=Mode.BOTH, expected_position=6, prove=True),
]
each_search = pytest.mark.parametrize("request_", SEARCHES, ids=["window", "session", "step", "step by both"])


@pytest.fixture
async def bounded(make_harness: MakeHarness) -> EngineHarness:
    """An engine whose margin proof leaves some answers unproved. The session a has received six tokens."""
    harness = make_harness(certified=True, radius=1.0)
    await harness.engine.create_session("a")
    await harness.engine.submit(StepRequest("a", (5, 6, 7, 8, 9, 10)))
    return harness


@each_search
async def test_the_engine_searches_for_a_proof_only_on_request(
    bounded: EngineHarness, request_: PredictRequest | StepRequest
) -> None:
    proof = FakeProof(bounded.engine)
    plain = await bounded.engine.submit(replace(request_, prove=False))
    assert proof.asked == 0
    asked = await bounded.engine.submit(request_)  # if the request is a step, the engine replays the step
    assert proof.asked == 1
    found = [answer if answer.agreement is None else answer.agreement for answer in (plain, asked)]
    assert [one.top1_proved for one in found] == [False, True]
    assert asked.latency.total_ms >= asked.latency.compute_ms


async def test_a_token_proved_by_its_margin_needs_no_search(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, radius=1e-9)
    proof = FakeProof(harness.engine)
    assert (await harness.engine.submit(PROVED)).top1_proved
    assert proof.asked == 0


async def test_searches_run_one_at_a_time_without_delaying_steps(bounded: EngineHarness) -> None:
    proof = FakeProof(bounded.engine)
    proof.gate.clear()
    first = bounded.engine.submit(PROVED)
    await proof.until_busy()
    others = asyncio.ensure_future(bounded.engine.predict_many([PROVED] * 3))
    step = bounded.engine.submit(StepRequest("a", (8,)))
    assert (await step).position == 7, "a request without a proof must not wait"
    assert (proof.asked, first.done(), others.done()) == (1, False, False)
    proof.gate.set()
    answers = [await first, *await others]
    assert [isinstance(answer, Answer) and answer.top1_proved for answer in answers] == [True] * 4
    assert proof.asked == 4


@each_search
@pytest.mark.parametrize("begun", [False, True], ids=["waits", "runs"])
@pytest.mark.parametrize("end", ["leaves", "late"])
async def test_a_search_that_is_cancelled_or_late_ends_and_its_step_stays_committed(
    bounded: EngineHarness,
    travel: Callable[[float], None],
    request_: PredictRequest | StepRequest,
    begun: bool,
    end: str,
) -> None:
    engine, proof = bounded.engine, FakeProof(bounded.engine)
    proof.gate.clear()
    if not begun:
        ahead = engine.submit(PROVED)
        await proof.until_busy()
    deadline = asyncio.get_running_loop().time() + HOUR_S
    search = engine.submit(replace(request_, deadline=deadline))
    while not search.ticket.answering:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if begun:
        await proof.until_busy()
    if end == "leaves":
        search.cancel()
    else:
        travel(2 * HOUR_S)
        with pytest.raises(DeadlineExceeded) as late:
            await search
        assert ("the step still commits" in str(late.value)) is isinstance(request_, StepRequest)
    await turns()
    assert bounded.engine.admission.active == (not begun)
    if isinstance(request_, StepRequest):
        again = await engine.submit(replace(request_, prove=False))
        assert (again.position, again.replayed) == (8, True)
    await turns()  # the event loop cancels the thread's future in the next iteration
    proof.gate.set()
    if not begun:
        await ahead
    await engine.drain()
    assert proof.asked == 1, "an abandoned search must not start"


@pytest.mark.parametrize("tokens", [(7,), (7, 8)])
@pytest.mark.parametrize("mode", [Mode.RECURRENT, Mode.WINDOW])
@pytest.mark.parametrize("end", ["leaves", "late"])
async def test_the_answer_of_a_step_that_has_committed_is_not_made_for_a_caller_that_has_left(
    bounded: EngineHarness,
    travel: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tokens: tuple[int, ...],
    mode: Mode,
    end: str,
) -> None:
    """Otherwise a client whose steps are late would leave more and more work to the event loop."""
    engine, builder, waiting, free, made = bounded.engine, AnswerBuilder, list[int](), asyncio.Event(), list[int]()
    await engine.submit(StepRequest("a", (6,), mode=mode))

    async def take_turn(_: AnswerBuilder, plan: AnswerPlan, *answer: object) -> None:
        if answer:  # the turn of a part comes before the commit
            waiting.append(plan.position)
            await free.wait()

    def answer(_: AnswerBuilder, plan: AnswerPlan, *_rest: object, **_named: object) -> None:
        made.append(plan.position)

    monkeypatch.setattr(builder, "take_turn", take_turn)
    with monkeypatch.context() as patch:
        patch.setattr(builder, "answer", answer)
        deadline = asyncio.get_running_loop().time() + HOUR_S
        step = engine.submit(StepRequest("a", tokens, mode=mode, logits=True, deadline=deadline))
        while not waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if end == "leaves":
            step.cancel()
        else:
            travel(2 * HOUR_S)
            with pytest.raises(DeadlineExceeded):
                await step
        free.set()
        await engine.admission.idle()
        await turns()
    assert not made
    assert (await engine.submit(StepRequest("a", (9,)))).position == waiting[0] + 1


@pytest.mark.parametrize("tokens", [(7,), (7, 8)])
@pytest.mark.parametrize("mode", [Mode.RECURRENT, Mode.WINDOW])
@pytest.mark.parametrize("prove", [False, True])
async def test_the_answer_of_a_step_is_not_made_for_a_caller_that_leaves_while_it_commits(
    bounded: EngineHarness, monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, ...], mode: Mode, prove: bool
) -> None:
    engine, began, free, made = bounded.engine, asyncio.Event(), asyncio.Event(), list[int]()
    before = (await engine.submit(StepRequest("a", (6,), mode=mode))).position
    assert before is not None
    proof, answer, commit_many = FakeProof(engine), AnswerBuilder.answer, Sessions.commit_many

    def make(*given: Any, **named: Any) -> Answer:
        made.append(1)
        return answer(*given, **named)

    async def wait(sessions: Sessions, commits: Sequence[Commit]) -> list[Appended]:
        began.set()
        await free.wait()
        return await commit_many(sessions, commits)

    monkeypatch.setattr(Sessions, "commit_many", wait)
    monkeypatch.setattr(AnswerBuilder, "answer", make)
    request = StepRequest("a", tokens, mode=mode, logits=True, prove=prove, idempotency_key="k")
    step = engine.submit(request)
    await began.wait()
    step.cancel()
    free.set()
    await engine.admission.idle()
    await turns()
    assert (made, proof.asked) == ([], 0)
    replayed = await engine.submit(request)
    assert (replayed.position, replayed.replayed) == (before + len(tokens), True)


@pytest.mark.parametrize("left", [False, True])
async def test_draining_waits_for_a_proof_search_that_has_a_caller(bounded: EngineHarness, left: bool) -> None:
    proof = FakeProof(bounded.engine)
    proof.gate.clear()
    window = submitted(bounded, PROVED)
    await proof.until_busy()
    draining = asyncio.create_task(bounded.engine.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    if left:
        window.cancel()
        await draining
    proof.gate.set()
    await draining
    assert left or window.result().top1_proved


async def test_closing_refuses_a_queued_proof_search(
    bounded: EngineHarness,
) -> None:
    proof = FakeProof(bounded.engine)
    proof.gate.clear()
    running = submitted(bounded, PROVED)
    await proof.until_busy()
    waiting = submitted(bounded, PROVED)
    while not waiting.ticket.answering:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await bounded.engine.close()
    proof.gate.set()
    with pytest.raises(Unavailable):
        await waiting
    assert (await running).top1_proved


async def test_a_drain_waits_for_the_last_of_several_requests() -> None:
    admission = Admission()
    admission.enter()
    admission.enter()
    admission.close()
    drained = asyncio.ensure_future(admission.idle())
    await asyncio.sleep(0)
    admission.leave()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not drained.done()
    admission.leave()
    await asyncio.wait_for(drained, 10)
