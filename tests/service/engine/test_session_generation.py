"""Tests of generation from a session, which must not change the session."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.engine.test_generate import generate
from tests.service.engine_harness import EngineHarness, MakeHarness
from wane.service.errors import InvalidRequest, PositionConflict, UnknownSession
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import Bias, GenerateRequest, History, StepRequest

EOS = 0
TOKENS = (5, 6, 7, 8)


async def session(harness: EngineHarness, *tokens: int, mode: Mode | None = None) -> None:
    await harness.engine.create_session("s", mode)
    if tokens:
        await harness.engine.submit(StepRequest("s", tokens))


def greedy(harness: EngineHarness, *tokens: int, count: int = 5) -> list[int]:
    ids = [EOS, *tokens]
    for _ in range(count):
        ids.append(int(harness.runner.logits(ids).argmax()))
    return ids[1 + len(tokens) :]


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"session": "s", "max_tokens": 5, "temperature": 0, **changes})


async def test_it_continues_the_session_and_does_not_change_it(harness: EngineHarness) -> None:
    await session(harness, *TOKENS)
    before = await harness.engine.submit(StepRequest("s", (9,)))
    for _ in range(2):
        _, finish = await generate(harness, request())
        assert list(finish.tokens) == greedy(harness, *TOKENS, 9)
        assert (finish.session, finish.position, finish.state) == ("s", 5, StateSource.RESIDENT)
        assert finish.error_bound == 0.0
    assert before.position == (await harness.engine.get_session("s")).position == 5
    after = await harness.engine.submit(StepRequest("s", (1,)))
    assert after.predictions[0].token_id == harness.runner.logits([EOS, *TOKENS, 9, 1]).argmax()


async def test_it_is_that_of_the_same_tokens_without_a_session(harness: EngineHarness) -> None:
    await session(harness, *TOKENS)
    for changes in ({"temperature": 1.0, "seed": 3}, {"bias": Bias({9: 100.0})}, {"frequency_penalty": 2.0}):
        _, here = await generate(harness, request(**changes))
        _, apart = await generate(harness, request(**changes, session=None, tokens=TOKENS))
        assert here.tokens == apart.tokens


async def test_an_empty_session_continues_from_the_start(harness: EngineHarness) -> None:
    await session(harness)
    _, finish = await generate(harness, request())
    assert list(finish.tokens) == greedy(harness) and finish.position == 0


async def test_a_state_that_was_dropped_is_rebuilt_and_kept(harness: EngineHarness) -> None:
    await session(harness, *TOKENS)
    harness.engine.state_cache.drop("s")
    _, finish = await generate(harness, request())
    assert list(finish.tokens) == greedy(harness, *TOKENS) and finish.state is StateSource.REBUILT
    assert (await generate(harness, request()))[1].state is StateSource.RESIDENT


async def test_a_session_by_window_generates_by_window(harness: EngineHarness) -> None:
    await session(harness, *TOKENS, 9, 10, mode=Mode.WINDOW)
    _, finish = await generate(harness, request())
    assert (finish.mode, finish.state, finish.window) == (Mode.WINDOW, StateSource.WINDOW, 4)
    ids = [*TOKENS, 9, 10]
    for token in finish.tokens:
        assert token == harness.runner.logits(ids[-4:]).argmax()
        ids.append(token)


async def test_a_session_with_a_history_has_the_bound_of_its_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=4, max_window=140)
    await harness.engine.create_session("s", None, history=History((5,) * 10, 20))
    _, finish = await generate(harness, request())
    assert finish.error_bound == harness.manifest.certificate.error_bound_at(10) and finish.position == 20


async def test_the_position_is_compared(harness: EngineHarness) -> None:
    await session(harness, *TOKENS)
    assert (await generate(harness, request(position=4)))[1].position == 4
    with pytest.raises(PositionConflict, match="at position 4") as caught:
        await generate(harness, request(position=3))
    assert caught.value.position == 4


async def test_an_unknown_session_is_refused(harness: EngineHarness) -> None:
    with pytest.raises(UnknownSession):
        await generate(harness, request())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("session", {"tokens": (5,)}),
        ("truncated", {"truncated": True}),
        ("position", {"session": None, "tokens": (5,), "position": 1}),
        ("position", {"position": -1}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("top_logprobs", {"top_logprobs": -1}),
    ],
    ids=str,
)
def test_an_invalid_request_names_its_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [101.0, -100.5, float("nan")])
def test_a_bias_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"^logit_bias of token 5 is {value:g}, ") as caught:
        Bias({4: 100.0, 5: value})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("logit_bias", {"bias": Bias({9999: 1.0})}),
        ("logit_bias", {"bias": Bias(dict.fromkeys(range(258), -100.0))}),
        ("top_logprobs", {"top_logprobs": 101}),
    ],
    ids=["a token that is not in the vocabulary", "no token may be drawn", "too many listed tokens"],
)
async def test_a_request_beyond_a_limit_names_its_field(
    harness: EngineHarness, field: str, changes: dict[str, Any]
) -> None:
    await session(harness, *TOKENS)
    with pytest.raises(InvalidRequest) as caught:
        await generate(harness, request(**changes))
    assert caught.value.field == field
