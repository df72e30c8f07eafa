"""Windows that were submitted: cancelled, failed, proved while the engine drains."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tests.service.engine.test_top1_proof_by_direction import VOCABULARY, model
from tests.service.engine_harness import TIMEOUT_S, EngineHarness
from tests.service.oracle import Small
from wane.service.engine.pending import Pending
from wane.service.errors import InvalidRequest, Unavailable, WaneError
from wane.service.types import Answer, Mode, PredictRequest

WINDOW = PredictRequest((5, 6, 7), mode=Mode.WINDOW, window=2)


def begun(harness: EngineHarness | Small, request: PredictRequest = WINDOW) -> Pending[Answer]:
    """A window that stands in the queue."""
    return harness.engine.submit(request)


@pytest.mark.parametrize(("k", "run"), [(2, [6, 7]), (3, [5, 6, 7]), (4, [5, 6, 7])])
async def test_one_of_a_truncated_sequence_runs_its_last_tokens_without_a_start_token(
    harness: EngineHarness, k: int, run: list[int]
) -> None:
    request = PredictRequest((5, 6, 7), mode=Mode.WINDOW, window=k, truncated=True)
    answer = await begun(harness, request)
    assert harness.runner.calls == [("window", [run])]
    assert (answer.window, answer.error_bound) == (len(run), None)


async def test_one_that_is_refused_is_refused_as_a_prediction(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="window is 10000"):
        await begun(harness, PredictRequest((5,), mode=Mode.WINDOW, window=10_000))
    await harness.engine.drain()
    with pytest.raises(Unavailable):
        await begun(harness)


async def test_one_that_is_left_in_the_queue_is_never_run_and_nobody_waits_for_it(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    first = begun(harness)
    await harness.runner.until_busy()
    second = begun(harness)
    second.cancel()
    second.cancel()
    harness.runner.gate.set()
    await first
    await harness.engine.drain()
    assert len(harness.runner.calls) == 1
    assert harness.sample("wane_queue_dropped_total", reason="abandoned") == 1


async def test_one_that_is_left_while_it_runs_is_answered_to_nobody(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    window = begun(harness)
    await harness.runner.until_busy()
    window.cancel()
    harness.runner.gate.set()
    await begun(harness)
    await harness.engine.drain()


async def test_a_run_that_fails_is_told_and_the_engine_goes_on(harness: EngineHarness) -> None:
    harness.runner.poison = 6
    with pytest.raises(WaneError, match="failed to run"):
        await begun(harness)
    harness.runner.poison = None
    await begun(harness)
    await harness.engine.drain()


async def test_an_answer_that_cannot_be_made_is_its_own_failure(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = begun(harness)

    def fails_once(*given: object) -> object:
        monkeypatch.undo()
        raise LookupError(str(len(given)))

    monkeypatch.setattr(harness.engine._answer_builder, "_predictions", fails_once)
    other = begun(harness)
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
            window = begun(small, PredictRequest(tokens, mode=Mode.WINDOW, window=2))
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


def test_an_engine_that_ends_refuses_whoever_waits_for_a_proof_that_has_not_begun() -> None:
    small, random = model(seed=3, layers=1, front=False), np.random.default_rng(1)
    engine, go = small.engine, threading.Event()

    async def ask() -> Pending[Answer]:
        engine._prover.submit(go.wait, TIMEOUT_S)  # as a document that is scored has it
        while True:
            tokens = tuple(random.integers(VOCABULARY, size=8).tolist())
            window = begun(small, PredictRequest(tokens, mode=Mode.WINDOW, window=2))
            while not (window.done or engine._answer_builder._proofs):  # noqa: ASYNC110
                await asyncio.sleep(0)
            if not window.done:
                await engine.close()
                go.set()
                return window

    with pytest.raises(Unavailable):
        asyncio.run(ask()).result()
