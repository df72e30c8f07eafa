"""Tests of scores that list, for each scored token, the most probable tokens at its position."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.models.caches import random_cache
from tests.service.engine_harness import EngineHarness, MakeHarness
from wane.service.engine.logits import log_softmax
from wane.service.engine.score import with_own
from wane.service.errors import InvalidRequest
from wane.service.types.answer import Prediction
from wane.service.types.common import Mode
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import PredictRequest, ScoreRequest
from wane.service.types.text import Score

EOS = 0
TOKENS = tuple(int(one) for one in np.random.default_rng(3).integers(2, 250, 300))


def check(harness: EngineHarness, score: Score, top_k: int, *, truncated: bool = False) -> None:
    assert score.predictions is not None and len(score.predictions) == len(score.tokens)
    context = [] if truncated else [EOS]
    for token, logprob, places in zip(score.tokens, score.logprobs, score.predictions, strict=True):
        if not context:
            assert logprob is None and places is None
        else:
            assert places is not None
            wanted = log_softmax(harness.runner.logits(context[-120:]))
            ids = [one.token_id for one in places]
            assert ids[:top_k] == np.argsort(-wanted, kind="stable")[:top_k].tolist()
            assert token in ids and len(ids) <= top_k + 1
            assert [one.logprob for one in places if one.token_id == token] == [logprob]
            assert [one.logprob for one in places] == pytest.approx(wanted[ids], abs=1e-4)
        assert token is not None
        context.append(token)


@pytest.mark.parametrize("hiddens", [True, False])
@pytest.mark.parametrize("truncated", [True, False])
async def test_the_lists_are_those_of_the_model(make_harness: MakeHarness, hiddens: bool, truncated: bool) -> None:
    harness = make_harness(puts_out_hiddens=hiddens)
    for top_k, tokens in ((3, TOKENS), (0, TOKENS[:9]), (20, TOKENS[:9])):
        score = await harness.engine.score(ScoreRequest(tokens, truncated=truncated, top_k=top_k))
        check(harness, score, top_k, truncated=truncated)


async def test_the_output_layer_runs_over_one_scan(harness: EngineHarness) -> None:
    await harness.engine.score(ScoreRequest(TOKENS[:100], top_k=1))
    roles = harness.runner.roles()
    assert roles.count("scan") == 1 and set(roles) == {"scan", "head"} and roles.count("head") < 100


async def test_without_a_list_no_output_layer_runs(harness: EngineHarness) -> None:
    score = await harness.engine.score(ScoreRequest(TOKENS[:100]))
    assert score.predictions is None and harness.runner.roles() == ["scan"]


async def test_a_list_is_asked_of_a_parallel_score_too(harness: EngineHarness) -> None:
    check(harness, await harness.engine.score(ScoreRequest(TOKENS, method=ScoreMethod.PARALLEL, top_k=2)), 2)


async def test_a_cache_is_mixed_into_every_place(make_harness: MakeHarness) -> None:
    harness = make_harness(cache=random_cache(Random(3), 12))
    tokens = TOKENS[:20] * 2
    score = await harness.engine.score(ScoreRequest(tokens, top_k=3))
    assert score.predictions is not None
    for place in range(1, len(tokens)):
        request = PredictRequest(tokens[:place], mode=Mode.RECURRENT, top_k=3)
        answer = await harness.engine.submit(request)
        found = sorted((one.logprob for one in score.predictions[place] or ()), reverse=True)[:3]
        assert found == pytest.approx([one.logprob for one in answer.predictions], abs=1e-4)


async def test_limits(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="top_k is 101"):
        await harness.engine.score(ScoreRequest(TOKENS, top_k=101))
    with pytest.raises(InvalidRequest):
        ScoreRequest(TOKENS, top_k=-1)


def listed(*logprobs: float) -> list[Prediction]:
    return [Prediction(token, "", 0.5, logprob) for token, logprob in enumerate(logprobs)]


def test_the_scan_s_number_keeps_the_order_of_the_output_layer() -> None:
    changed = [one.logprob for one in with_own(listed(-1.0, -2.0, -3.0), 1, -1.0)]
    assert changed[0] > changed[1] == -1.0 and changed[2] == -3.0
    assert [one.logprob for one in with_own(listed(-1.0, -2.0), 0, -2.5)] == [-2.5, -2.5]
    assert [one.logprob for one in with_own(listed(-1.0, -1.0), 1, -1.5)] == [-1.0, -1.5]
