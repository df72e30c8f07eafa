"""Tests that requests leave no reference cycles. A cycle keeps all arrays of a request until the garbage collector
runs, which then holds the event loop."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress

import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness
from wane.service.api.choices import Choice, Prompt, merged, started
from wane.service.engine.engine import Engine
from wane.service.engine.pending import Pending, outcome_of
from wane.service.errors import DeadlineExceeded, WaneError
from wane.service.types.common import Mode
from wane.service.types.request import (
    ANYBODY,
    CompareRequest,
    GenerateRequest,
    PredictRequest,
    ScoreRequest,
    StepRequest,
)

LONG = (7,) * 40


async def generations(engine: Engine, deadline: float | None) -> None:
    wanted = [GenerateRequest(LONG, max_tokens=4, deadline=deadline, sample=sample) for sample in range(4)]
    async with AsyncExitStack() as held:
        choices = [
            Choice(index, engine.vocabulary, engine.turns, Prompt(LONG), generation, has_logprobs=False)
            for index, generation in enumerate(await started(engine, wanted, held))
        ]
        async with aclosing(merged([choice.parts() for choice in choices])) as parts:
            async for _ in parts:
                pass


async def predictions(engine: Engine, deadline: float | None) -> None:
    assert await engine.predict_many([PredictRequest(LONG, mode=Mode.RECURRENT, deadline=deadline)] * 4)


async def step(engine: Engine, deadline: float | None) -> None:
    session = (await engine.create_session()).session
    await engine.submit(StepRequest(session, LONG, deadline=deadline))


ASKED: dict[str, Callable[[Engine, float | None], Awaitable[object]]] = {
    "generations": generations,
    "predictions": predictions,
    "step": step,
    "prediction": lambda engine, deadline: engine.submit(PredictRequest(LONG, mode=Mode.BOTH, deadline=deadline)),
    "score": lambda engine, deadline: engine.score(ScoreRequest(LONG, deadline=deadline)),
    "listed": lambda engine, deadline: engine.score(ScoreRequest(LONG, top_k=3, deadline=deadline)),
    "comparison": lambda engine, deadline: engine.compare(
        CompareRequest(LONG, windows=(8, 16), repeat=3, deadline=deadline)
    ),
}


@pytest.mark.parametrize("end", ["succeeds", "late", "leaves", "fails"])
@pytest.mark.parametrize("asked", ASKED)
async def test_a_finished_request_leaves_no_reference_cycle(make_harness: MakeHarness, asked: str, end: str) -> None:
    harness: EngineHarness = make_harness()
    engine, runner, loop = harness.engine, harness.runner, asyncio.get_running_loop()

    async def run() -> None:
        if end in ("late", "leaves"):
            runner.gate.clear()
        runner.poison = 7 if end == "fails" else None
        task = asyncio.ensure_future(ASKED[asked](engine, loop.time() + 0.01 if end == "late" else None))
        if end == "leaves":
            await runner.until_busy()
            task.cancel()
        if end in ("late", "leaves"):
            loop.call_later(0.02, runner.gate.set)
        with suppress(WaneError, asyncio.CancelledError):
            await task
        del task
        runner.poison = None
        await engine.admission.idle()
        await asyncio.sleep(0.02)

    assert not await garbage_of(run)


async def test_a_step_that_is_late_in_the_queue_leaves_no_reference_cycle(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy event loop may begin the next batch before the request's own timer
    monkeypatch.setattr(Pending, "_ring", lambda _: None)
    harness: EngineHarness = make_harness()
    engine, runner, loop = harness.engine, harness.runner, asyncio.get_running_loop()

    async def run() -> None:
        runner.gate.clear()
        runner.busy.clear()
        busy = engine.submit(PredictRequest(LONG, mode=Mode.RECURRENT))
        await runner.until_busy()
        late = engine.submit(StepRequest("new", (5,), deadline=loop.time() + 0.05, creator=ANYBODY))
        await asyncio.sleep(0.1)  # the step is queued, and its deadline passes
        runner.gate.set()
        await busy
        found = await outcome_of(late)
        assert isinstance(found, DeadlineExceeded)
        del late, busy, found

    assert not await garbage_of(run)


async def garbage_of(run: Callable[[], Awaitable[None]]) -> Counter[str]:
    """Returns the types of the garbage that `run` leaves."""
    for _ in range(2):  # the first requests also create objects that later requests reuse
        await run()
    gc.disable()
    gc.freeze()  # the collection looks only at the objects of the run that follows
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await run()
        gc.collect()
        return Counter(type(one).__name__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
