"""Tests that heavy answers of one batch are spread over several turns of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.engine_harness import MakeHarness, name_vocabulary
from wane.service.batching.turns import HEAVY_TOKENS, Turns
from wane.service.engine import generate
from wane.service.engine.logits import Rankings
from wane.service.engine.logits import log_softmax as log_softmax_of
from wane.service.types import Filter, GenerateRequest, PredictRequest

SAMPLES = 8


class Clock:
    """Counts the turns of the event loop, and notes the turn of each call."""

    def __init__(self) -> None:
        self.now = 0
        self.called: list[int] = []

    async def run(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    def note(self) -> None:
        self.called.append(self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("tokens", [HEAVY_TOKENS, HEAVY_TOKENS - 1])
async def test_callers_with_much_work_run_in_turns_of_their_own(clock: Clock, tokens: int) -> None:
    turns, ticking = Turns(), asyncio.create_task(clock.run())

    async def work() -> None:
        await turns.take(tokens)
        clock.note()

    await asyncio.gather(*(work() for _ in range(SAMPLES)))
    ticking.cancel()
    assert len(set(clock.called)) == (SAMPLES if tokens == HEAVY_TOKENS else 1)


async def test_samples_of_a_large_vocabulary_are_drawn_in_turns_of_their_own(
    make_harness: MakeHarness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=[f"item {index}" for index in range(HEAVY_TOKENS)]))

    def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
        clock.note()
        return log_softmax_of(logits)

    monkeypatch.setattr(generate, "log_softmax", log_softmax)
    ticking = asyncio.create_task(clock.run())

    async def sample(number: int) -> int:
        request = GenerateRequest((2, 3), max_tokens=4, seed=1, sample=number)
        async with aclosing(await harness.engine.generate(request)) as stream:
            return len([item async for item in stream])

    counts = await asyncio.gather(*(sample(number) for number in range(SAMPLES)))
    ticking.cancel()
    assert len(set(clock.called)) == len(clock.called) == sum(counts) - SAMPLES


async def test_long_filters_are_applied_in_turns_of_their_own(
    make_harness: MakeHarness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=[f"item {index}" for index in range(HEAVY_TOKENS)]))
    of = Rankings.of

    def noted(self: Rankings, *given: object) -> object:
        clock.note()
        return of(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Rankings, "of", noted)
    ticking = asyncio.create_task(clock.run())
    wanted = Filter(candidates=tuple(range(2, 2 + HEAVY_TOKENS)))
    answers = await harness.engine.predict_many([PredictRequest((2, 3), filter=wanted) for _ in range(SAMPLES)])
    ticking.cancel()
    assert not any(isinstance(answer, Exception) for answer in answers)
    assert len(set(clock.called)) == len(clock.called) == SAMPLES
