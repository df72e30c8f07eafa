"""Tests of a model with a cache, which predicts from the earlier tokens of the history. Each test compares the answers
of one operation with the oracle, which mixes the distributions of the network and the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.caches import RandomTables, random_cache
from tests.service.engine_harness import EngineHarness, FixedProfile, MakeHarness, name_vocabulary
from wane.models.reference.cache import mixture
from wane.service.batching import turns
from wane.service.engine.answer import AnswerBuilder, ModeResult
from wane.service.engine.logits import log_softmax
from wane.service.engine.score import RESIDUAL
from wane.service.engine.steps import columns
from wane.service.engine.steps.answers import StepAnswer
from wane.service.types.answer import Answer, Prediction
from wane.service.types.common import Mode
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import (
    CompareRequest,
    Filter,
    GenerateRequest,
    History,
    PredictRequest,
    ScoreRequest,
    StepRequest,
)
from wane.service.types.text import GeneratedToken

EOS, UNK = 0, 1
LENGTH = 24
CACHE = random_cache(Random(5), LENGTH)
NAMES = [f"n{index}" for index in range(14)]
SIZE = 2 + len(NAMES)
TABLES = RandomTables(Random(6), SIZE)
CLOSE = 1e-5


@pytest.fixture(params=[None, TABLES], ids=["cache", "cache and tables"])
def tables(request: pytest.FixtureRequest) -> RandomTables | None:
    found: RandomTables | None = request.param
    return found


@pytest.fixture
def harness(make_harness: MakeHarness, tables: RandomTables | None) -> EngineHarness:
    names = name_vocabulary("words", NAMES)
    return make_harness(vocabulary=names, cache=CACHE, tables=tables, certified=True, session_history_tokens=64)


def least_network(harness: EngineHarness) -> float:
    """Returns the smallest weight of the network."""
    tables = harness.tables
    of_tables = 1.0 if tables is None else min(weights[0] for weights in tables.weights)
    return min(weights[0] for weights in CACHE.weights) * of_tables


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    """Returns random tokens with many repetitions."""
    random = np.random.default_rng(seed)
    return tuple(int(token) for token in 2 + random.zipf(1.5, count) % (SIZE - 2))


def expected(harness: EngineHarness, seen: Sequence[int], history: Sequence[int]) -> NDArray[np.float64]:
    """Returns the mixture's distribution. The network has read the tokens `seen`, and the cache contains the tokens
    `history`."""
    network = np.exp(log_softmax(harness.runner.logits(list(seen))))
    mixed = mixture(CACHE, network, history) if len(history) else network
    return mixed if harness.tables is None else harness.tables.mixed(mixed, history[-LENGTH:])


def assert_is(predictions: Sequence[Prediction], distribution: NDArray[np.float64]) -> None:
    """Checks the tokens, order, probabilities and log-probabilities of predictions, which do not list `<unk>`."""
    ids = [one.token_id for one in predictions]
    assert [one.probability for one in predictions] == pytest.approx(distribution[ids], abs=CLOSE)
    assert [one.logprob for one in predictions] == pytest.approx(np.log(distribution[ids]), abs=1e-4)
    assert UNK not in ids
    assert sorted(np.delete(distribution, UNK), reverse=True)[: len(ids)] == pytest.approx(distribution[ids], abs=CLOSE)


@pytest.mark.parametrize("count", [1, 2, 5, LENGTH, 40])
@pytest.mark.parametrize("top_k", [1, 5, SIZE])
async def test_predictions_without_a_session(harness: EngineHarness, count: int, top_k: int) -> None:
    tokens = words(count)
    whole = expected(harness, [EOS, *tokens], tokens)
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, top_k=top_k))
    assert_is(answer.predictions, whole)
    assert answer.cache_tokens == min(count, LENGTH)
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=4, top_k=top_k))
    of_window = expected(harness, tokens[-4:] if count > 4 else [EOS, *tokens], tokens)
    assert_is(answer.predictions, of_window)
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.BOTH, window=4, top_k=top_k))
    assert answer.modes is not None and answer.agreement is not None
    assert_is(answer.modes[Mode.RECURRENT].predictions, whole)
    assert_is(answer.modes[Mode.WINDOW].predictions, of_window)
    assert answer.agreement.total_variation == pytest.approx(np.abs(whole - of_window).sum() / 2, abs=CLOSE)
    assert answer.agreement.max_logit_difference == pytest.approx(np.abs(np.log(whole / of_window)).max(), abs=1e-4)


async def test_a_request_without_the_cache(harness: EngineHarness) -> None:
    tokens = words(20)
    network = np.exp(log_softmax(harness.runner.logits([EOS, *tokens])))
    answer = await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, cache=False))
    assert_is(answer.predictions, network)
    assert answer.cache_tokens is None
    await harness.engine.create_session("a")
    step = await harness.engine.submit(StepRequest("a", tokens, cache=False))
    assert_is(step.predictions, network)
    assert step.cache_tokens is None


@pytest.mark.parametrize("count", [3, LENGTH, 30])
async def test_the_answer_to_a_truncated_text_has_the_number_of_tokens_that_the_cache_lacks(
    harness: EngineHarness, count: int
) -> None:
    tokens = words(count)
    whole = await harness.engine.submit(PredictRequest(tokens, truncated=True, mode=Mode.RECURRENT))
    assert_is(whole.predictions, expected(harness, tokens, tokens))
    alone = await harness.engine.submit(PredictRequest(tokens, truncated=True, mode=Mode.RECURRENT, cache=False))
    assert whole.cache_tokens == min(count, LENGTH)
    assert whole.error_bound is not None and alone.error_bound is not None
    if count < LENGTH:
        assert whole.error_bound >= min(1 - least_network(harness), 1)
        assert not whole.top1_proved
    else:
        assert whole.error_bound <= alone.error_bound


async def test_steps_of_sessions(harness: EngineHarness) -> None:
    engine = harness.engine
    tokens = words(40, seed=1)
    for session in ("one", "many", "bulk"):
        await engine.create_session(session)
    in_columns = 0
    for position, token in enumerate(tokens):
        answer = await engine.submit(StepRequest("one", (token,)))
        in_columns += isinstance(answer, StepAnswer)
        history = tokens[: position + 1]
        assert_is(answer.predictions, expected(harness, [EOS, *history], history))
        assert answer.cache_tokens == min(position + 1, LENGTH)
        assert answer.error_bound == 0
        if position % 4 == 0:
            again = await engine.submit(StepRequest("one", (token,), None, position))
            assert again.replayed
            assert_is(again.predictions, expected(harness, [EOS, *history], history))
    assert in_columns > len(tokens) / 4
    answer = await engine.submit(StepRequest("many", tokens))
    assert_is(answer.predictions, expected(harness, [EOS, *tokens], tokens))
    peeked = await engine.submit(PredictRequest(session="one"))
    assert_is(peeked.predictions, expected(harness, [EOS, *tokens], tokens))
    await engine.rewind("one", 33)
    answer = await engine.submit(StepRequest("one", (5,)))
    assert_is(answer.predictions, expected(harness, [EOS, *tokens[:33], 5], [*tokens[:33], 5]))


async def test_a_batch_of_steps_of_different_sessions(harness: EngineHarness) -> None:
    engine = harness.engine
    histories = {f"s{index}": words(3 * index + 1, seed=index) for index in range(8)}
    for session, history in histories.items():
        await engine.create_session(session)
        await engine.submit(StepRequest(session, history))
    for token in words(LENGTH + 3, seed=9):
        pending = {session: engine.submit(StepRequest(session, (token,))) for session in histories}
        answers = dict(zip(pending, await asyncio.gather(*[_answer(one) for one in pending.values()]), strict=True))
        assert all(isinstance(one, StepAnswer) for one in answers.values())
        for session, answer in answers.items():
            histories[session] += (token,)
            history = histories[session]
            assert_is(answer.predictions, expected(harness, [EOS, *history], history))


async def test_a_batch_has_so_many_rows_as_can_be_mixed_in_one_turn(
    make_harness: MakeHarness, tables: RandomTables | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = LENGTH if tables is None else LENGTH + tables.transitions.most_added
    monkeypatch.setattr(columns, "MIXED_AT_ONCE", 3 * added + 1)
    names = name_vocabulary("words", NAMES)
    harness = make_harness(vocabulary=names, cache=CACHE, tables=tables, certified=True, session_history_tokens=64)
    engine, sessions = harness.engine, [f"s{index}" for index in range(8)]
    for session in sessions:
        await engine.create_session(session)
        await engine.submit(StepRequest(session, (5,)))
    pending = [engine.submit(StepRequest(session, (6,))) for session in sessions]
    answers = [await _answer(one) for one in pending]
    assert [one.latency.batch_items for one in answers] == [3, 3, 3, 3, 3, 3, 2, 2]
    for answer in answers:
        assert_is(answer.predictions, expected(harness, [EOS, 5, 6], [5, 6]))


async def test_the_steps_of_one_batch_that_are_answered_alone_are_mixed_in_different_turns(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixing them all at once would hold the event loop for a time that grows with the batch."""
    monkeypatch.setattr(turns, "TOKENS_A_TURN", 1)
    part, turn, mixed = AnswerBuilder.part, 0, list[int]()

    def counted(builder: AnswerBuilder, *given: Any, **named: Any) -> ModeResult:
        mixed.append(turn)
        return part(builder, *given, **named)

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr(AnswerBuilder, "part", counted)
    engine, sessions = harness.engine, [f"s{index}" for index in range(8)]
    for session in sessions:
        await engine.create_session(session)
        await engine.submit(StepRequest(session, (5,)))
    mixed.clear()
    counting = asyncio.create_task(count())
    wanted = Filter(candidates=(6, 7))
    pending = [engine.submit(StepRequest(session, (6,), filter=wanted, top_k=2)) for session in sessions]
    answers = [await _answer(one) for one in pending]
    counting.cancel()
    assert {one.latency.batch_items for one in answers} == {8}
    assert len(set(mixed)) == len(mixed) == 8
    distribution = expected(harness, [EOS, 5, 6], [5, 6])
    for answer in answers:
        listed = {one.token_id: one.probability for one in answer.predictions}
        assert listed == pytest.approx({token: distribution[token] for token in (6, 7)}, abs=CLOSE)


async def _answer(pending: object) -> Answer:
    answer = await pending  # type: ignore[misc]
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("known", [4, LENGTH])
async def test_a_session_that_begins_with_a_history(harness: EngineHarness, known: int) -> None:
    engine = harness.engine
    tokens = words(50, seed=3)
    await engine.create_session("a", history=History(tokens[50 - known :], 50))
    view = await engine.get_session("a")
    answer = await engine.submit(StepRequest("a", (7,)))
    history = [*tokens[50 - known :], 7]
    assert_is(answer.predictions, expected(harness, history, history))
    assert answer.cache_tokens == min(len(history), LENGTH)
    assert answer.error_bound is not None and view.error_bound is not None
    if known < LENGTH:
        assert min(answer.error_bound, view.error_bound) >= 1 - least_network(harness)
        assert not answer.top1_proved
    for token in words(LENGTH, seed=4):  # the engine processes this step in columns
        answer = await engine.submit(StepRequest("a", (token,)))
        history.append(token)
        assert answer.cache_tokens == min(len(history), LENGTH)
        assert not (answer.top1_proved and len(history) < LENGTH)
        assert_is(answer.predictions, expected(harness, history, history))


@pytest.mark.parametrize("mode", [Mode.RECURRENT, Mode.WINDOW])
async def test_generations(harness: EngineHarness, mode: Mode) -> None:
    tokens = words(20, seed=6)
    window = 4 if mode is Mode.WINDOW else None
    stream = await harness.engine.generate(
        GenerateRequest(tokens, max_tokens=16, temperature=0, mode=mode, window=window)
    )
    history = list(tokens)
    async for item in stream:
        if isinstance(item, GeneratedToken):
            seen = [EOS, *history] if window is None else history[-window:]
            distribution = expected(harness, seen, history)
            assert item.token_id == distribution.argmax()
            assert item.logprob == pytest.approx(np.log(distribution.max()), abs=1e-4)
            history.append(item.token_id)
        else:
            assert item.cache_tokens == LENGTH
    await stream.aclose()
    assert len(history) == 36


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("method", [*ScoreMethod])
async def test_scores(
    make_harness: MakeHarness, tables: RandomTables | None, method: ScoreMethod, truncated: bool
) -> None:
    profile = FixedProfile({RESIDUAL: 150}) if method is ScoreMethod.PARALLEL else None
    names = name_vocabulary("words", NAMES)
    options = {"certified": True, "max_window": 200, "throughput": profile}
    harness = make_harness(vocabulary=names, cache=CACHE, tables=tables, **options)
    tokens = words(1500, seed=7)
    tolerance = 0.1 if method is ScoreMethod.PARALLEL else None
    score = await harness.engine.score(ScoreRequest(tokens, method=method, tolerance=tolerance, truncated=truncated))
    assert (score.chunks > 1) is (method is ScoreMethod.PARALLEL)
    start = [] if truncated else [EOS]
    for index in [*range(len(start) == 0, 2 * LENGTH), 300, 1499]:
        history = tokens[:index]
        distribution = expected(harness, [*start, *history], history)
        close = 1e-4 if score.chunks == 1 else 0.2
        assert score.logprobs[index] == pytest.approx(np.log(distribution[tokens[index]]), abs=close)
    assert score.cache_tokens == LENGTH
    if truncated:
        assert score.logprobs[0] is None and score.error_bounds is not None
        low, high = score.error_bounds[LENGTH - 1], score.error_bounds[LENGTH]
        assert low is not None and high is not None
        assert low >= 1 - least_network(harness)
    alone = await harness.engine.score(ScoreRequest(tokens, truncated=truncated, cache=False))
    assert alone.cache_tokens is None
    assert alone.logprobs[-1] == pytest.approx(
        log_softmax(harness.runner.logits([*start, *tokens[:-1]]))[tokens[-1]], abs=1e-4
    )


async def test_a_comparison(harness: EngineHarness) -> None:
    tokens = words(30, seed=8)
    found = await harness.engine.compare(CompareRequest(tokens, windows=(2, 8), repeat=1))
    whole = expected(harness, [EOS, *tokens], tokens)
    assert_is(found.recurrent.predictions, whole)
    assert found.cache_tokens == LENGTH
    for line in found.windows:
        assert line.window is not None and line.agreement is not None
        of_window = expected(harness, tokens[-line.window :], tokens)
        assert_is(line.predictions, of_window)
        assert line.agreement.total_variation == pytest.approx(np.abs(whole - of_window).sum() / 2, abs=CLOSE)


async def test_token_logprobs_of_steps(harness: EngineHarness) -> None:
    engine, tokens = harness.engine, words(40, seed=2)
    await engine.create_session("one")
    score = await engine.score(ScoreRequest(tokens))
    for start, end in ((0, 1), (1, 20), (20, 40)):
        request = StepRequest("one", tokens[start:end], None, start, token_logprobs=True, logits=True)
        for _ in range(2):  # the second request repeats the first, so the engine replays the answer
            answer = await engine.submit(request)
            assert answer.token_logprobs == pytest.approx(score.logprobs[start:end], abs=1e-4)
            assert answer.logits is not None
            distribution = expected(harness, [EOS, *tokens[:end]], tokens[:end])
            np.testing.assert_allclose(np.exp(answer.logits.astype(np.float64)), distribution, atol=CLOSE)
