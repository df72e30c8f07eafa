"""The directional test, through the engine: never wrong whatever came before, and it proves more than the radius."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.service.oracle import Small
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.certificate.request import WindowBound
from wane.models.certificate.top1 import Top1
from wane.service.engine.answer import MOST_PROOFS
from wane.service.types import Mode, PredictRequest

VOCABULARY = 11
FRONT = {"blocks": 1, "kernel_size": 3, "feed_forward": 5}
PASTS, LONGEST_PAST, CLIMBS = 32, 20, 4


def model(seed: int, layers: int, front: bool, block: str = "residual", beside: bool = True) -> Small:
    """A gated model."""
    fields: dict[str, Any] = {"gate_caps": (0.95,) * layers}
    if block == "residual":
        fields |= {"norm_epsilon": 0.25, "feed_forward": 7, "units": 9, "front": FRONT if front else None}
    return Small("gated", block, layers, seed, 1.0, beside=beside, **fields)


def proofs(small: Small, windows: list[NDArray[np.int64]]) -> list[int | None]:
    """Each window's first token, where it is proved to be that of every run that ends in it."""

    async def ask() -> list[int | None]:
        found = []
        for window in windows:
            tokens = (0, *window.tolist())
            answer = await small.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=len(window), top_k=1))
            found.append(answer.predictions[0].token_id if answer.top1_proved else None)
        return found

    return asyncio.run(ask())


def logits_after(small: Small, pasts: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.float64]:
    """The never-interrupted model's, in float64, after each past (B, P) and the window: (B, V)."""
    tokens = np.concatenate([pasts, np.broadcast_to(window, (len(pasts), len(window)))], axis=1)
    state = small.reference.zero_state(len(tokens))
    for column in tokens.T:
        hidden, state = small.reference.advance(column, state)
    result: NDArray[np.float64] = small.reference.logits(hidden)
    return result


def hold(small: Small, window: NDArray[np.int64], first: int, random: np.random.Generator) -> None:
    """No past makes another token first: random ones, one token repeated, and then changed to narrow the lead."""
    pasts = random.integers(VOCABULARY, size=(PASTS, LONGEST_PAST))
    pasts[:VOCABULARY] = np.arange(VOCABULARY)[:, None]

    def leads(pasts: NDArray[np.int64]) -> NDArray[np.float64]:
        logits = logits_after(small, pasts, window)
        result: NDArray[np.float64] = logits[:, first] - np.delete(logits, first, axis=1).max(axis=1)
        return result

    least = leads(pasts)
    for _ in range(CLIMBS):
        changed = np.where(random.random(pasts.shape) < 0.1, random.integers(VOCABULARY, size=pasts.shape), pasts)
        narrowed = leads(changed)
        better = narrowed < least
        pasts[better], least[better] = changed[better], narrowed[better]
    assert least.min() > 0


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 3),
    front=st.booleans(),
    block=st.sampled_from(("plain", "residual")),
)
def test_no_past_overturns_a_token_that_is_proved(seed: int, layers: int, front: bool, block: str) -> None:
    small, random = model(seed, layers, front, block), np.random.default_rng(seed)
    windows = [random.integers(VOCABULARY, size=length) for length in random.integers(2, 10, size=12)]
    for window, first in zip(windows, proofs(small, windows), strict=True):
        if first is not None:
            hold(small, window, first, random)


@pytest.mark.parametrize("front", [False, True], ids=["no front", "front"])
def test_it_proves_all_that_the_radius_proves_and_more(front: bool) -> None:
    more = 0
    for seed in range(MOST_PROOFS + 2):
        small, random = model(seed, 1, front), np.random.default_rng(seed)
        windows = [random.integers(VOCABULARY, size=length) for length in random.integers(3, 9, size=30)]
        both = proofs(small, windows)
        small.engine._answer_builder.direction = None
        for window, sharp, plain in zip(windows, both, proofs(small, windows), strict=True):
            assert plain is None or sharp == plain
            if sharp is not None and plain is None:
                more += 1
                hold(small, window, sharp, random)
    assert more > 5


def test_what_rounding_may_have_moved_is_not_proved() -> None:
    small, random = model(0, 1, front=True), np.random.default_rng(0)
    windows = [random.integers(VOCABULARY, size=length) for length in random.integers(3, 9, size=30)]
    direction = small.engine._answer_builder.direction
    assert direction is not None and 0 < direction.rounding < 1e-4
    before = proofs(small, windows)
    direction.rounding = 1e3
    after = proofs(small, windows)
    assert sum(first is not None for first in after) < sum(first is not None for first in before)


async def test_the_prover_thread_rehearses_a_proof_once_the_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def moved(self: Top1, bound: WindowBound, gap: Matrix, rows: NDArray[np.intp]) -> Vector:
        ran.append((threading.current_thread().name, len(gap)))
        return held(self, bound, gap, rows)

    held = Top1.moved
    monkeypatch.setattr(Top1, "moved", moved)
    small = model(0, 1, front=True)
    await small.engine.measure()
    thread = small.engine._prover._thread_name_prefix
    assert ran == [(f"{thread}_0", VOCABULARY - 1)]


def test_windows_that_say_no_more_than_their_radius_or_not_even_that_are_judged_by_what_there_is() -> None:
    small, random = model(0, 1, front=False, beside=False), np.random.default_rng(0)
    windows = [random.integers(VOCABULARY, size=16) for _ in range(5)]
    proofs(small, windows)
    assert small.engine._answer_builder.direction is None


class Held:
    """A test that takes until it is let go, and then proves everything."""

    def __init__(self) -> None:
        self.asked, self.go = False, threading.Event()

    def proves(self, *_: object) -> bool:
        self.asked = True
        if not self.go.wait(20):
            raise TimeoutError("an answer waits for a proof that nobody lets go")
        return True


def test_an_answer_does_not_wait_behind_a_queue_of_proofs() -> None:
    small, random = model(seed=3, layers=1, front=False), np.random.default_rng(1)

    async def ask() -> list[bool]:
        held = Held()
        small.engine._answer_builder.direction = held  # type: ignore[assignment]
        held.go.set()
        while not held.asked:  # for a window whose radius settles nothing
            window = tuple(random.integers(VOCABULARY, size=8).tolist())
            request = PredictRequest(window, mode=Mode.WINDOW, window=2, top_k=1)
            await small.engine.submit(request)
        held.go.clear()
        answers = [asyncio.ensure_future(small.engine.submit(request)) for _ in range(MOST_PROOFS + 2)]
        waiting = set(answers)
        try:
            while len(waiting) > MOST_PROOFS:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert not any(answer.result().top1_proved for answer in done)
        finally:
            held.go.set()
        return [answer.top1_proved for answer in await asyncio.gather(*answers)]

    assert sorted(asyncio.run(ask())) == [False] * 2 + [True] * MOST_PROOFS
