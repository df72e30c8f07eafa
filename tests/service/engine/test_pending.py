"""Requests that were submitted: their deadlines, what becomes of them where the caller leaves, and no task for any."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.service.engine.test_top1_proof_by_direction import VOCABULARY, model
from tests.service.engine_harness import TIMEOUT_S, EngineHarness
from tests.service.oracle import Small
from tests.service.server_harness import start_sessions
from wane.service.aio.eager import Waiter
from wane.service.batching.ticket import Ticket
from wane.service.engine.pending import Pending
from wane.service.errors import DeadlineExceeded, InvalidRequest, Unavailable, WaneError
from wane.service.types import Answer, Mode, PredictRequest, StepRequest

WINDOW = PredictRequest((5, 6, 7), mode=Mode.WINDOW, window=2)


def submitted(harness: EngineHarness | Small, request: PredictRequest = WINDOW) -> Pending[Answer]:
    """A window that stands in the queue."""
    return harness.engine.submit(request)


HOUR_S = 3600.0


class Work:
    """What a request waits for. `left`: it was taken back."""

    def __init__(self) -> None:
        self.waiter = Waiter[int]()
        self.left = False

    async def run(self) -> int:
        try:
            return await self.waiter
        except asyncio.CancelledError:
            self.left = True
            raise


def ticket(*, entered: bool = False) -> Ticket:
    """One with an hour."""
    made = Ticket(asyncio.get_running_loop().time() + HOUR_S)
    made.entered = entered
    return made


async def turns() -> None:
    """Lets every callback run that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_result_is_told_once(travel: Callable[[float], None]) -> None:
    work, told = Work(), list[int]()
    pending = Pending(work.run(), ticket())
    pending.on_done(lambda done: told.append(done.result()))
    work.waiter.resolve(7)
    travel(2 * HOUR_S)
    await turns()
    pending.cancel()
    assert told == [7] and not pending.ticket.abandoned


@pytest.mark.parametrize("entered", [False, True])
async def test_a_caller_that_leaves_takes_back_what_has_not_entered_a_batch(entered: bool) -> None:
    work, told = Work(), list[str]()
    pending = Pending(work.run(), ticket(entered=entered))
    pending.on_done(lambda _: told.append("called back"))
    pending.cancel()
    pending.cancel()
    assert pending.ticket.abandoned
    assert work.left is not entered
    work.waiter.resolve(7)
    await turns()
    assert pending.done and told == []


@pytest.mark.parametrize("entered", [False, True])
async def test_a_deadline_is_told_and_takes_back_what_has_not_entered_a_batch(
    travel: Callable[[float], None], entered: bool
) -> None:
    work = Work()
    pending = Pending(work.run(), ticket(entered=entered))
    travel(2 * HOUR_S)
    with pytest.raises(DeadlineExceeded) as late:
        await pending
    assert ("it still commits" in str(late.value)) is entered
    assert work.left is not entered
    work.waiter.resolve(7)
    assert pending.ticket.abandoned


async def test_work_that_its_engine_cancels_is_told_as_unavailable() -> None:
    work = Work()
    pending = Pending(work.run(), ticket())
    work.waiter.fail(asyncio.CancelledError())
    with pytest.raises(Unavailable):
        pending.result()


@pytest.mark.parametrize("end", ["succeeds", "fails", "leaves", "late"])
async def test_a_request_that_is_over_leaves_nothing_for_the_garbage_collector(
    travel: Callable[[float], None], end: str
) -> None:
    async def run() -> None:
        work = Work()
        pending = Pending(work.run(), ticket())
        if end == "succeeds":
            work.waiter.resolve(7)
        elif end == "fails":
            work.waiter.fail(LookupError())
        elif end == "leaves":
            pending.cancel()
        else:
            travel(2 * HOUR_S)
            await turns()
        assert pending.done

    await run()  # what is made once is made now
    while gc.collect():  # what other tests left may go in several rounds
        pass
    gc.disable()
    try:
        await run()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "request_",
    [
        StepRequest("a", (6,)),
        StepRequest("a", (6,), mode=Mode.RECURRENT),
        StepRequest("a", (6, 7)),
        StepRequest("a", (6,), mode=Mode.WINDOW),
        StepRequest("a", (6,), mode=Mode.BOTH),
        StepRequest("a", (5,), expected_position=0),
        PredictRequest(session="a"),
        PredictRequest((5, 6, 7)),
        PredictRequest((5, 6, 7), mode=Mode.BOTH),
    ],
    ids=["plain", "recurrent", "two tokens", "window", "both", "replay", "session", "prediction", "both modes"],
)
async def test_no_request_needs_a_task(harness: EngineHarness, request_: PredictRequest | StepRequest) -> None:
    await start_sessions(harness)
    before = asyncio.all_tasks()
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    pending = harness.engine.submit(request_)
    await harness.runner.until_busy()
    assert asyncio.all_tasks() == before
    harness.runner.gate.set()
    assert (await pending).predictions


# Windows.


@pytest.mark.parametrize(("k", "run"), [(2, [6, 7]), (3, [5, 6, 7]), (4, [5, 6, 7])])
async def test_a_window_of_a_truncated_sequence_runs_its_last_tokens_without_a_start_token(
    harness: EngineHarness, k: int, run: list[int]
) -> None:
    request = PredictRequest((5, 6, 7), mode=Mode.WINDOW, window=k, truncated=True)
    answer = await submitted(harness, request)
    assert harness.runner.calls == [("window", [run])]
    assert (answer.window, answer.error_bound) == (len(run), None)


async def test_a_window_that_is_refused_is_told(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="window is 10000"):
        await submitted(harness, PredictRequest((5,), mode=Mode.WINDOW, window=10_000))
    await harness.engine.drain()
    with pytest.raises(Unavailable):
        await submitted(harness)


async def test_a_window_that_is_cancelled_in_the_queue_is_never_run(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    first = submitted(harness)
    await harness.runner.until_busy()
    second = submitted(harness)
    second.cancel()
    second.cancel()
    harness.runner.gate.set()
    await first
    await harness.engine.drain()
    assert len(harness.runner.calls) == 1
    assert harness.sample("wane_queue_dropped_total", reason="abandoned") == 1


async def test_a_window_that_is_cancelled_while_it_runs_is_answered_to_nobody(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    window = submitted(harness)
    await harness.runner.until_busy()
    window.cancel()
    harness.runner.gate.set()
    await submitted(harness)
    await harness.engine.drain()


async def test_a_run_that_fails_is_told_and_the_engine_goes_on(harness: EngineHarness) -> None:
    harness.runner.poison = 6
    with pytest.raises(WaneError, match="failed to run"):
        await submitted(harness)
    harness.runner.poison = None
    await submitted(harness)
    await harness.engine.drain()


async def test_an_answer_that_cannot_be_made_is_its_own_failure(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = submitted(harness)

    def fails_once(*given: object) -> object:
        monkeypatch.undo()
        raise LookupError(str(len(given)))

    monkeypatch.setattr(harness.engine._answer_builder, "_predictions", fails_once)
    other = submitted(harness)
    with pytest.raises(LookupError):
        await failing
    assert (await other).window == 2
    await harness.engine.drain()


class Held:
    """A proof that is sought until it is let go."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.asked, self.go = asyncio.Event(), threading.Event()

    def proves(self, *_: object) -> bool:
        self.loop.call_soon_threadsafe(self.asked.set)
        return self.go.wait(20)


@pytest.mark.parametrize("left", [False, True])
def test_an_engine_that_drains_waits_for_a_proof_that_somebody_waits_for(left: bool) -> None:
    small, random = model(seed=3, layers=1, front=False), np.random.default_rng(1)
    engine = small.engine

    async def ask() -> tuple[Pending[Answer], bool]:
        proof = Held()
        engine._answer_builder.direction = proof  # type: ignore[assignment]
        asked = asyncio.create_task(proof.asked.wait())
        while not asked.done():  # for a window whose radius settles nothing
            tokens = tuple(random.integers(VOCABULARY, size=8).tolist())
            window = submitted(small, PredictRequest(tokens, mode=Mode.WINDOW, window=2))
            while not (asked.done() or window.done):  # noqa: ASYNC110
                await asyncio.sleep(0)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        waits = not draining.done()
        if left:
            window.cancel()
            await draining
        proof.go.set()
        await draining
        return window, waits

    window, waits = asyncio.run(ask())
    assert waits
    assert left or window.result().top1_proved


def test_an_engine_that_ends_refuses_whoever_waits_for_a_proof_that_has_not_submitted() -> None:
    small, random = model(seed=3, layers=1, front=False), np.random.default_rng(1)
    engine, go = small.engine, threading.Event()

    async def ask() -> Pending[Answer]:
        engine._prover.submit(go.wait, TIMEOUT_S)  # as a document that is scored has it
        while True:
            tokens = tuple(random.integers(VOCABULARY, size=8).tolist())
            window = submitted(small, PredictRequest(tokens, mode=Mode.WINDOW, window=2))
            while not (window.done or engine._answer_builder._proofs):  # noqa: ASYNC110
                await asyncio.sleep(0)
            if not window.done:
                await engine.close()
                go.set()
                return window

    with pytest.raises(Unavailable):
        asyncio.run(ask()).result()
