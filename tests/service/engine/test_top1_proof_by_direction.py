"""Tests of the directional proof through the engine. A proved token must stay the most probable token whatever tokens
(the past) precede the window. The directional proof proves more answers than a proof from the radius, which bounds the
hidden vector's error equally in all directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.service.engine_harness import InOrder
from tests.service.oracle import Small
from tests.service.shipped import FOLDER, opened
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import DirectionProof, MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.common import Mode
from wane.service.types.request import CompareRequest, Filter, PredictRequest

VOCABULARY = 11
FRONT = {"blocks": 1, "kernel_size": 3, "feed_forward": 5}
PASTS, LONGEST_PAST, CLIMBS = 32, 20, 4


ALL = Filter(include_unknown=True)


def model(seed: int, layers: int, front: bool, block: str = "residual", beside: bool = True) -> Small:
    """Returns a random gated model."""
    fields: dict[str, Any] = {"gate_caps": (0.95,) * layers}
    if block == "residual":
        fields |= {"norm_epsilon": 0.25, "feed_forward": 7, "units": 9, "front": FRONT if front else None}
    return Small("gated", block, layers, seed, 1.0, beside=beside, **fields)


def proofs(small: Small, windows: list[NDArray[np.int64]], *, prove: bool = True) -> list[int | None]:
    """Returns one item for each window: the most probable next token if the engine proves it for all sequences that end
    with the window, and None otherwise."""

    async def ask() -> list[int | None]:
        found = []
        for window in windows:
            tokens = (0, *window.tolist())
            request = PredictRequest(tokens, mode=Mode.WINDOW, window=len(window), prove=prove, filter=ALL)
            answer = await small.engine.submit(request)
            found.append(answer.predictions[0].token_id if answer.top1_proved else None)
        return found

    return asyncio.run(ask())


def logits_after(small: Small, pasts: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the full-history model's logits, float64 (B, V). Row b follows the tokens of row b of `pasts` (B, P) and
    then the tokens of `window`."""
    tokens = np.concatenate([pasts, np.broadcast_to(window, (len(pasts), len(window)))], axis=1)
    state = small.reference.zero_state(len(tokens))
    for column in tokens.T:
        hidden, state = small.reference.advance(column, state)
    result: NDArray[np.float64] = small.reference.logits(hidden)
    return result


def distribution(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the softmax of the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return result


def variations(small: Small, pasts: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns, for each past, the total variation between two distributions: after the window alone, and after the past
    and the window."""
    own = distribution(logits_after(small, pasts[:1, :0], window))
    result: NDArray[np.float64] = np.abs(distribution(logits_after(small, pasts, window)) - own).sum(axis=1) / 2
    return result


def hold(small: Small, window: NDArray[np.int64], first: int, random: np.random.Generator) -> None:
    """Asserts that `first` stays the most probable token after every tried past. Tries random pasts and pasts of one
    repeated token. Then a random search changes the pasts to reduce the lead of the logit of `first`."""
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
def test_no_past_changes_a_proved_token(seed: int, layers: int, front: bool, block: str) -> None:
    small, random = model(seed, layers, front, block), np.random.default_rng(seed)
    windows = [random.integers(VOCABULARY, size=length) for length in random.integers(2, 10, size=12)]
    for window, first in zip(windows, proofs(small, windows), strict=True):
        if first is not None:
            hold(small, window, first, random)


def bounds(small: Small, windows: list[NDArray[np.int64]], *, prove: bool) -> list[float]:
    """Returns each window's `error_bound`."""

    async def ask() -> list[float]:
        found = []
        for window in windows:
            request = PredictRequest((0, *window.tolist()), mode=Mode.WINDOW, window=len(window), top_k=1, prove=prove)
            answer = await small.engine.submit(request)
            assert answer.error_bound is not None
            found.append(answer.error_bound)
        return found

    return asyncio.run(ask())


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    layers=st.integers(1, 3),
    front=st.booleans(),
    block=st.sampled_from(("plain", "residual")),
)
def test_no_past_moves_an_answer_beyond_the_bound_from_the_search(
    seed: int, layers: int, front: bool, block: str
) -> None:
    small, random = model(seed, layers, front, block), np.random.default_rng(seed)
    windows = [random.integers(VOCABULARY, size=length) for length in random.integers(2, 10, size=12)]
    for window, plain, sharp in zip(
        windows, bounds(small, windows, prove=False), bounds(small, windows, prove=True), strict=True
    ):
        assert sharp <= plain
        pasts = random.integers(VOCABULARY, size=(PASTS, LONGEST_PAST))
        pasts[:VOCABULARY] = np.arange(VOCABULARY)[:, None]
        assert variations(small, pasts, window).max() <= sharp


@pytest.mark.parametrize("front", [False, True], ids=["no front", "front"])
def test_a_search_finds_smaller_bounds(front: bool) -> None:
    small, random = model(0, 1, front), np.random.default_rng(0)
    windows = [random.integers(VOCABULARY, size=12) for _ in range(20)]
    plain, sharp = bounds(small, windows, prove=False), bounds(small, windows, prove=True)
    assert np.median(sharp) < np.median(plain) / 2


@pytest.mark.parametrize("front", [False, True], ids=["no front", "front"])
def test_the_directional_proof_proves_more_answers_than_the_radius(front: bool) -> None:
    more = 0
    for seed in range(3):
        small, random = model(seed, 1, front), np.random.default_rng(seed)
        windows = [random.integers(VOCABULARY, size=length) for length in random.integers(3, 9, size=30)]
        both, by_margin = proofs(small, windows), proofs(small, windows, prove=False)
        small.engine.answer_builder.direction = None
        assert proofs(small, windows) == by_margin
        for window, sharp, plain in zip(windows, both, by_margin, strict=True):
            assert plain is None or sharp == plain
            if sharp is not None and plain is None:
                more += 1
                hold(small, window, sharp, random)
    assert more > 5


def test_a_larger_rounding_proves_fewer_tokens() -> None:
    small, random = model(0, 1, front=True), np.random.default_rng(0)
    windows = [random.integers(VOCABULARY, size=length) for length in random.integers(3, 9, size=30)]
    direction = small.engine.answer_builder.direction
    assert direction is not None and direction.rounding == 0.0, "the bounds of the states contain their rounding"
    before = proofs(small, windows)
    direction.rounding = 1e3
    after = proofs(small, windows)
    assert sum(first is not None for first in after) < sum(first is not None for first in before)


def test_graphs_without_a_stream_output_have_no_directional_proof() -> None:
    small, random = model(0, 1, front=False, beside=False), np.random.default_rng(0)
    windows = [random.integers(VOCABULARY, size=16) for _ in range(5)]
    proofs(small, windows)
    assert small.engine.answer_builder.direction is None


MakeShipped = Callable[[], Engine]


@pytest.fixture
def make_shipped() -> MakeShipped:
    """A function that makes engines of the shipped model gated-stable. An engine has its directional proof in
    `answer_builder.direction`."""

    def make() -> Engine:
        bundle, runner = opened(FOLDER / "gated-stable")
        margin = MarginProof(bundle.weights())
        direction = DirectionProof.of(bundle.manifest, bundle.weights(), bundle.request_bound, margin, runner)
        assert direction is not None
        return Engine(
            bundle.manifest,
            bundle.vocabulary,
            margin,
            runner,
            MemoryStore(128, 3600, 2**20),
            Settings(session_history_tokens=128),
            Metrics(),
            throughput=InOrder(),
            direction=direction,
        )

    return make


async def test_a_shipped_model_searches_for_a_proof_only_on_request(
    monkeypatch: pytest.MonkeyPatch, make_shipped: MakeShipped
) -> None:
    engine = make_shipped()
    direction = engine.answer_builder.direction
    assert direction is not None
    search, found = direction.search, list[tuple[bool, float]]()

    def counted(*given: Any) -> tuple[bool, float]:
        found.append(search(*given))
        return found[-1]

    monkeypatch.setattr(direction, "search", counted)
    text = engine.vocabulary.encode("The history of the town and of its old church " * 10)
    prompts = [tuple(text[: 70 + each]) for each in range(8)]

    async def proved(mode: Mode, *, prove: bool) -> int:
        requests = [PredictRequest(prompt, mode=mode, window=64, prove=prove) for prompt in prompts]
        answers = [await engine.submit(request) for request in requests]
        return sum(
            answer.top1_proved if answer.agreement is None else answer.agreement.top1_proved for answer in answers
        )

    for mode in (Mode.WINDOW, Mode.BOTH):
        by_margin = await proved(mode, prove=False)
        assert not found
        assert await proved(mode, prove=True) == by_margin + sum(proof for proof, _ in found) > by_margin
        assert len(found) == len(prompts)
        found.clear()
    await engine.close()


async def test_a_comparison_has_the_bound_from_the_search_for_every_window(make_shipped: MakeShipped) -> None:
    engine = make_shipped()
    text = engine.vocabulary.encode("The history of the town and of its old church " * 20)[:200]
    found = await engine.compare(CompareRequest(tuple(text), windows=(64, 96), repeat=1))
    for line in found.windows:
        asked = PredictRequest(tuple(text), mode=Mode.WINDOW, window=line.window, prove=True)
        answer = await engine.submit(asked)
        assert line.agreement is not None and answer.error_bound is not None and line.error_bound is not None
        assert line.error_bound == line.agreement.error_bound == pytest.approx(answer.error_bound, rel=1e-3)
        assert line.agreement.total_variation <= line.error_bound < 0.2
    await engine.close()


async def test_a_search_meets_a_tolerance_that_the_radius_misses(make_shipped: MakeShipped) -> None:
    engine = make_shipped()
    tokens = tuple(engine.vocabulary.encode("The history of the town and of its old church " * 20)[:200])
    plain = await engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=96))
    sharp = await engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=96, prove=True))
    assert plain.error_bound is not None and sharp.error_bound is not None
    assert sharp.error_bound < plain.error_bound / 2
    tolerance = (plain.error_bound + sharp.error_bound) / 2
    ask = PredictRequest(tokens, window=96, tolerance=tolerance, prove=True)
    assert (await engine.submit(ask)).mode is Mode.WINDOW
    await engine.close()
