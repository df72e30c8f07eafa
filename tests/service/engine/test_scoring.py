from __future__ import annotations

import numpy as np
import pytest

from service.engine.distribution import log_softmax
from service.engine.requests import ScoreRequest
from tests.service.engine.fakes import Bench

EOS = 0


def expected(bench: Bench, tokens: tuple[int, ...]) -> list[float]:
    fed = [EOS, *tokens]
    return [float(log_softmax(bench.runner.logits(fed[: index + 1]))[token]) for index, token in enumerate(tokens)]


async def test_every_given_token_has_its_log_probability_given_those_before_it(bench: Bench) -> None:
    tokens = (10, 11, 12, 10)
    score = await bench.engine.score(ScoreRequest(tokens))
    assert score.logprobs == pytest.approx(expected(bench, tokens), abs=1e-5)
    assert score.summary.perplexity == pytest.approx(np.exp(-np.mean(score.logprobs)))
    assert (score.summary.error_bound, score.summary.max_residual) == (0.0, 0.0)


async def test_a_long_text_is_scored_in_pieces_with_the_state_carried(bench: Bench) -> None:
    tokens = tuple(10 + index % 97 for index in range(600))
    score = await bench.engine.score(ScoreRequest(tokens))
    assert [len(rows[0]) for _, rows in bench.runner.calls] == [256, 256, 88]
    assert len(score.logprobs) == 600
    assert score.logprobs[-1] == pytest.approx(
        float(log_softmax(bench.runner.logits([EOS, *tokens[:-1]]))[tokens[-1]]), abs=1e-5
    )


async def test_an_impossible_text_has_a_perplexity_that_is_a_number(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.runner, "_head", bench.runner._head * np.float32(1e4))
    score = await bench.engine.score(ScoreRequest((10, 11, 12)))
    assert np.isfinite(score.summary.perplexity)
