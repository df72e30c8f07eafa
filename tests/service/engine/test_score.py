from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.engine_harness import EngineHarness, FixedProfile, known
from wane.models.manifest import Role
from wane.service.engine import score
from wane.service.engine.logits import log_softmax
from wane.service.engine.score import RESIDUAL
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import ScoreRequest

EOS = 0


def expected(harness: EngineHarness, tokens: tuple[int, ...]) -> list[float]:
    input_ids = [EOS, *tokens]
    return [
        float(log_softmax(harness.runner.logits(input_ids[: index + 1]))[token]) for index, token in enumerate(tokens)
    ]


async def test_each_token_has_its_log_probability_conditional_on_the_earlier_tokens(harness: EngineHarness) -> None:
    tokens = (10, 11, 12, 10)
    score = await harness.engine.score(ScoreRequest(tokens))
    assert score.logprobs == pytest.approx(expected(harness, tokens), abs=1e-5)
    assert score.perplexity == pytest.approx(np.exp(-np.mean(known(score.logprobs))))
    assert (score.error_bound, score.max_residual) == (0.0, 0.0)


async def test_a_long_text_is_scored_in_pieces_with_the_state_carried(harness: EngineHarness) -> None:
    tokens = tuple(10 + index % 97 for index in range(600))
    score = await harness.engine.score(ScoreRequest(tokens))
    assert [len(rows[0]) for _, rows in harness.runner.calls] == [256, 256, 88]
    assert len(score.logprobs) == 600
    assert score.logprobs[-1] == pytest.approx(
        float(log_softmax(harness.runner.logits([EOS, *tokens[:-1]]))[tokens[-1]]), abs=1e-5
    )


@pytest.mark.parametrize("truncated", [False, True])
async def test_other_work_runs_while_a_long_text_is_copied(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, truncated: bool
) -> None:
    turn, input_ids, turns = 0, list[int](), list[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    run = harness.engine.scorer.parallel.run

    def noted(role: Role, inputs: NDArray[np.int64], targets: NDArray[np.int64], *given: Any, **named: Any) -> Any:
        turns.append(turn)
        input_ids.extend([*inputs.tolist(), int(targets[-1])])
        return run(role, inputs, targets, *given, **named)

    monkeypatch.setattr(score, "FED_AT_ONCE", 8, raising=False)
    monkeypatch.setattr(harness.engine.scorer.parallel, "run", noted)
    tokens = tuple(10 + index % 97 for index in range(83))
    counting = asyncio.create_task(count_turns())
    await harness.engine.score(ScoreRequest(tokens, truncated=truncated))
    counting.cancel()
    assert input_ids == [*([] if truncated else [EOS]), *tokens]
    assert turns[0] > 83 // 8


async def test_a_text_of_probability_zero_has_a_finite_perplexity(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.runner, "head", harness.runner.head * np.float32(1e4))
    score = await harness.engine.score(ScoreRequest((10, 11, 12)))
    assert score.perplexity is not None and np.isfinite(score.perplexity)


# Truncated sequences


def truncated(harness: EngineHarness, tokens: tuple[int, ...]) -> list[float]:
    """Returns the log-probability of every token except the first, given the tokens before it. There is no start token
    before the first token."""
    return [float(log_softmax(harness.runner.logits(tokens[:end]))[tokens[end]]) for end in range(1, len(tokens))]


async def test_the_first_token_of_a_truncated_sequence_has_no_score(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(certified=True, max_window=200)
    epsilon = harness.manifest.certificate.error_bound_at
    tokens = (10, 11, 12, 10)
    score = await harness.engine.score(ScoreRequest(tokens, truncated=True))
    assert score.logprobs[0] is None
    assert score.logprobs[1:] == pytest.approx(truncated(harness, tokens), abs=1e-5)
    assert score.error_bounds == [None, epsilon(1), epsilon(2), epsilon(3)]
    assert (len(score.tokens), score.error_bound) == (4, epsilon(1))
    assert score.perplexity == pytest.approx(np.exp(-np.mean(truncated(harness, tokens))))
    assert harness.runner.calls == [("scan", [[10, 11, 12]])]


async def test_each_token_of_a_truncated_sequence_has_its_own_bound(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(certified=True, max_window=200)
    tokens = tuple(10 + index % 97 for index in range(600))
    score = await harness.engine.score(ScoreRequest(tokens, truncated=True))
    assert len(score.logprobs) == 600
    assert score.logprobs[300] == pytest.approx(truncated(harness, tokens[:301])[-1], abs=1e-5)
    assert score.error_bounds is not None
    assert score.error_bounds[1:] == [*map(harness.manifest.certificate.error_bound_at, range(1, 600))]


async def test_parallel_scoring_adds_the_bound_of_each_chunk_boundary(
    make_harness: Callable[..., EngineHarness],
) -> None:
    harness = make_harness(certified=True, max_window=200, throughput=FixedProfile({RESIDUAL: 150}))
    epsilon = harness.manifest.certificate.error_bound_at
    tokens = tuple(10 + index * index % 97 for index in range(1500))
    in_order = await harness.engine.score(ScoreRequest(tokens, truncated=True))
    score = await harness.engine.score(ScoreRequest(tokens, method=ScoreMethod.PARALLEL, tolerance=0.1, truncated=True))
    assert (score.chunks, score.rounds) == (4, 1) and 0 < score.max_residual <= RESIDUAL
    assert score.logprobs[0] is None and score.logprobs[1:] == pytest.approx(in_order.logprobs[1:], abs=0.5)
    assert score.error_bounds is not None and in_order.error_bounds is not None
    assert score.warm_up is not None
    joints = epsilon(score.warm_up + 1)
    assert joints is not None and 0 < joints <= 0.1
    for length, found in enumerate(score.error_bounds[1:], 1):
        alone = epsilon(length)
        assert alone is not None and found == min(alone + joints, 1)
    assert score.error_bound == score.error_bounds[1]


async def test_one_truncated_token_has_no_score_and_needs_no_run(harness: EngineHarness) -> None:
    score = await harness.engine.score(ScoreRequest((10,), truncated=True))
    assert (score.logprobs, score.error_bounds) == ([None], [None])
    assert (score.tokens, score.perplexity, score.error_bound) == ([10], None, None)
    assert harness.runner.calls == []


async def test_a_truncated_score_of_an_uncertified_model_has_no_bounds(harness: EngineHarness) -> None:
    score = await harness.engine.score(ScoreRequest((10, 11, 12), truncated=True))
    assert (score.error_bounds, score.error_bound) == ([None, None, None], None)
    assert (await harness.engine.score(ScoreRequest((10, 11, 12)))).error_bounds is None
