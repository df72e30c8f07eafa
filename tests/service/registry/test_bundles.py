"""Tests of properties of every shipped bundle, through the whole engine and onnxruntime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.shipped import FOLDER, PATHS, opened
from wane.models.reference import Reference
from wane.service.engine.engine import Engine
from wane.service.engine.logits import log_softmax
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest
from wane.service.types.text import GeneratedToken

STREAMED = 1000


@pytest.fixture(scope="module", params=PATHS, ids=[path.name for path in PATHS])
def path(request: pytest.FixtureRequest) -> Path:
    """The path of a shipped model. The scope makes pytest run all tests with one model before those with the next."""
    path: Path = request.param
    return path


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[Engine]:
    """An engine that serves one shipped model, after the engine's warm-up."""
    bundle, runner = opened(path)
    settings = Settings(max_batch_size=8)
    history = max(settings.session_history_tokens, bundle.manifest.history_tokens)  # enough for the model's cache
    store = MemoryStore(history, settings.session_ttl_s, settings.session_budget_bytes)
    margin = MarginProof(bundle.weights())
    engine = Engine(bundle.manifest, bundle.vocabulary, margin, runner, store, settings, Metrics())
    await asyncio.to_thread(engine.warm_up)
    yield engine
    await engine.close()


def some_tokens(engine: Engine, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(1).integers(engine.vocabulary.size, size=count).tolist())


async def own_tokens(engine: Engine, count: int) -> tuple[int, ...]:
    """Returns tokens that the model itself has generated. Most tokens are among the hundred most probable tokens at
    their position. A model of events ends its sessions, so the tokens of several sessions are joined."""
    found: list[int] = []
    for seed in range(1, count):
        if len(found) < count:
            request = GenerateRequest(some_tokens(engine, 10), max_tokens=count, seed=seed)
            items = [item async for item in await engine.generate(request)]
            found += [item.token_id for item in items if isinstance(item, GeneratedToken)]
    return tuple(found[:count])


def _listed(engine: Engine, values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values of one row without those of tokens that are never listed, such as a session's end."""
    values = values.copy()
    values[list(engine.vocabulary.unlisted)] = -np.inf
    return values


def logprobs(answer: Answer) -> dict[int, float]:
    return {one.token_id: one.logprob for one in answer.predictions}


async def test_stepping_a_thousand_tokens_agrees_with_scoring_them(engine: Engine) -> None:
    tokens = await own_tokens(engine, STREAMED)
    score = await engine.score(ScoreRequest(tokens))
    session = (await engine.create_session()).session
    answer = await engine.submit(PredictRequest(session=session, top_k=100))
    compared = 0
    for token, scored in zip(tokens, score.logprobs, strict=True):
        seen = logprobs(answer)
        if token in seen:
            assert seen[token] == pytest.approx(scored, abs=1e-4)
            compared += 1
        answer = await engine.submit(StepRequest(session, (token,), top_k=100))
    assert compared > STREAMED // 2
    assert answer.position == STREAMED
    assert answer.error_bound == 0.0
    whole = await engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, top_k=100))
    assert logprobs(answer) == pytest.approx(logprobs(whole), abs=1e-4)


async def test_a_truncated_sequence_runs_exactly_its_own_tokens(path: Path, engine: Engine) -> None:
    bundle, _ = opened(path)
    oracle = Reference(bundle.manifest.architecture, bundle.weights())
    tokens = some_tokens(engine, 12)
    state, expected = oracle.zero_state(1), []
    for token in tokens:
        hidden, state = oracle.advance(np.array([token]), state)
        expected.append(log_softmax(oracle.logits(hidden)[0]))
    for count in (1, 12):
        request = PredictRequest(tokens[:count], mode=Mode.RECURRENT, top_k=100, truncated=True)
        answer = await engine.submit(request)
        own = {token: float(expected[count - 1][token]) for token in logprobs(answer)}
        assert logprobs(answer) == pytest.approx(own, abs=1e-4)
        begun = await engine.submit(PredictRequest(tokens[:count], mode=Mode.RECURRENT, top_k=100))
        assert logprobs(begun) != pytest.approx(own, abs=1e-4)
        curve = engine.manifest.certificate.error_bound_at(count)
        assert begun.error_bound == 0.0
        # The answer adds its own rounding to the curve, which is in exact arithmetic.
        assert (curve is None) == (answer.error_bound is None)
        # A run's own norms can give less than the curve, but no less than the distance to a longer sequence's answer.
        if engine.vocabulary.kind != "events":
            assert curve is None or (answer.error_bound is not None and curve <= answer.error_bound <= 1)
        network = await engine.submit(PredictRequest(tokens[:count], mode=Mode.RECURRENT, truncated=True, cache=False))
        for seed in range(8):
            earlier = np.random.default_rng(seed).integers(1, engine.vocabulary.size, 64).tolist()
            state = oracle.zero_state(1)
            for token in (*earlier, *tokens[:count]):
                hidden, state = oracle.advance(np.array([token]), state)
            whole = np.exp(log_softmax(oracle.logits(hidden)[0]))
            distance = float(np.abs(whole - np.exp(expected[count - 1])).sum() / 2)
            assert network.error_bound is None or distance <= network.error_bound
    score = await engine.score(ScoreRequest(tokens, truncated=True))
    own_scores = [float(expected[index][token]) for index, token in enumerate(tokens[1:])]
    assert score.logprobs[1:] == pytest.approx(own_scores, abs=1e-4)


async def test_a_window_of_all_tokens_equals_the_recurrent_run_bit_for_bit(engine: Engine) -> None:
    tokens = some_tokens(engine, engine.manifest.window - 1)
    recurrent = await engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT))
    for k in (len(tokens), engine.manifest.max_window):
        window = await engine.submit(PredictRequest(tokens, mode=Mode.WINDOW, window=k))
        assert window.predictions == recurrent.predictions


async def test_a_window_that_covers_a_session_agrees_with_its_steps_bit_for_bit(engine: Engine) -> None:
    session = (await engine.create_session()).session
    for token in some_tokens(engine, engine.manifest.window - 1):
        answer = await engine.submit(StepRequest(session, (token,), mode=Mode.BOTH))
        assert answer.agreement is not None
        assert answer.agreement.error_bound == 0.0
        assert answer.agreement.total_variation == 0.0
    report = await engine.report()
    assert report.agreement.bound_violations == 0


async def test_a_padded_batch_equals_single_runs(engine: Engine) -> None:
    tokens = some_tokens(engine, 60)
    requests = [PredictRequest(tokens[:n], mode=Mode.RECURRENT, top_k=50) for n in (60, 41, 59, 33, 60)]
    together = await engine.predict_many(requests)
    for request, answer in zip(requests, together, strict=True):
        alone = await engine.submit(request)
        assert isinstance(answer, Answer)
        assert logprobs(answer) == pytest.approx(logprobs(alone), abs=1e-4)


async def test_a_session_rebuilt_from_all_its_tokens_equals_a_resident_session(engine: Engine) -> None:
    tokens = some_tokens(engine, 40)
    session = (await engine.create_session()).session
    await engine.submit(StepRequest(session, tokens))
    stayed = await engine.submit(PredictRequest(session=session, top_k=50))
    engine.state_cache.drop(session)
    rebuilt = await engine.submit(PredictRequest(session=session, top_k=50))
    assert (stayed.state, rebuilt.state) == (StateSource.RESIDENT, StateSource.REBUILT)
    assert rebuilt.error_bound == 0.0
    assert logprobs(rebuilt) == pytest.approx(logprobs(stayed), abs=1e-4)


async def test_sessions_in_one_batch_do_not_affect_each_other(engine: Engine) -> None:
    texts = [some_tokens(engine, 30 + index) for index in range(8)]
    sessions = [(await engine.create_session()).session for _ in texts]

    async def stream(session: str, tokens: tuple[int, ...]) -> Answer:
        for token in tokens[:-1]:
            await engine.submit(StepRequest(session, (token,)))
        return await engine.submit(StepRequest(session, tokens[-1:], top_k=50))

    answers = await asyncio.gather(*map(stream, sessions, texts))
    for answer, tokens in zip(answers, texts, strict=True):
        whole = await engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, top_k=50))
        assert logprobs(answer) == pytest.approx(logprobs(whole), abs=1e-4)
    engine.state_cache.check_integrity()


@pytest.mark.parametrize("token", [1336, 5, 2047])
async def test_a_token_repeated_for_long_gets_no_false_proof(engine: Engine, token: int) -> None:
    """The token 1336 is a known difficult case. After 367 repetitions of it, the most probable next token of the model
    `lstm` is another token in float32 than in exact arithmetic."""
    manifest, held = engine.manifest, (token % engine.vocabulary.size,) * 367
    answer = await engine.submit(PredictRequest(held, mode=Mode.RECURRENT, cache=False))
    reference = Reference(manifest.architecture, opened(FOLDER / manifest.name)[0].weights())
    state = reference.zero_state(1)
    for each in (engine.vocabulary.eos_id, *held):
        logits, _, state = reference.step(np.array([each]), state)
    assert answer.error_bound == 0.0, "the recurrent run must read all tokens"
    assert answer.top1_proved <= manifest.certificate.contractive
    assert not answer.top1_proved or answer.predictions[0].token_id == _listed(engine, logits[0]).argmax()
