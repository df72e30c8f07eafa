from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from tests.service.engine_harness import EngineHarness, MakeHarness, name_vocabulary
from wane.service.errors import DeadlineExceeded, InvalidRequest, WaneError
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import GenerateRequest
from wane.service.types.text import Finish, FinishReason, GeneratedToken

EOS = 0
PROMPT = tuple(range(10, 20))


async def generate(harness: EngineHarness, request: GenerateRequest) -> tuple[list[GeneratedToken], Finish]:
    async with aclosing(await harness.engine.generate(request)) as stream:
        items = [item async for item in stream]
    finish = items.pop()
    assert isinstance(finish, Finish)
    tokens = [item for item in items if isinstance(item, GeneratedToken)]
    assert len(tokens) == len(items)
    return tokens, finish


def greedy(harness: EngineHarness, count: int, k: int | None = None) -> list[int]:
    input_ids = [EOS, *PROMPT]
    for _ in range(count):
        context_ids = input_ids if k is None or k >= len(input_ids) - 1 else input_ids[-k:]
        input_ids.append(int(harness.runner.logits(context_ids).argmax()))
    return input_ids[1 + len(PROMPT) :]


async def test_greedy_generation_runs_one_step_for_each_token(harness: EngineHarness) -> None:
    tokens, finish = await generate(harness, GenerateRequest(PROMPT, max_tokens=6, temperature=0))
    assert [one.token_id for one in tokens] == greedy(harness, 6) == list(finish.tokens)
    assert harness.runner.roles() == ["window", *["step"] * 5]
    assert (finish.finish_reason, finish.mode, finish.state) == (
        FinishReason.LENGTH,
        Mode.RECURRENT,
        StateSource.FULL,
    )
    assert (finish.error_bound, finish.window) == (0.0, None)
    assert finish.text == "".join(one.text for one in tokens) == harness.vocabulary.decode(list(finish.tokens))


@pytest.mark.parametrize("k", [3, 12])
async def test_a_window_runs_for_every_token(harness: EngineHarness, k: int) -> None:
    request = GenerateRequest(PROMPT, max_tokens=6, temperature=0, mode=Mode.WINDOW, window=k)
    tokens, finish = await generate(harness, request)
    assert [one.token_id for one in tokens] == greedy(harness, 6, k)
    assert set(harness.runner.roles()) == {"window"}
    assert (finish.mode, finish.state, finish.window) == (Mode.WINDOW, StateSource.WINDOW, k)
    assert finish.error_bound is None


async def test_a_window_that_covers_all_tokens_is_exact(harness: EngineHarness) -> None:
    request = GenerateRequest(PROMPT, max_tokens=3, temperature=0, mode=Mode.WINDOW, window=12)
    _, finish = await generate(harness, request)
    assert finish.error_bound == 0.0


async def test_a_generation_from_windows_has_the_largest_bound_of_its_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True, window=4, max_window=140)
    epsilon = harness.manifest.certificate.error_bound_at(130)
    for length, bound in (
        (127, 0.0),
        (128, epsilon),
        (135, epsilon),
    ):  # the model predicts the last token from the prompt and three generated tokens, 131 tokens if the prompt has 128
        request = GenerateRequest((5,) * length, max_tokens=4, temperature=0, mode=Mode.WINDOW, window=130)
        assert (await generate(harness, request))[1].error_bound == bound


@pytest.mark.parametrize("k", [None, 3, 12, 100])
async def test_a_truncated_prompt_is_continued_without_a_start_token(make_harness: MakeHarness, k: int | None) -> None:
    harness = make_harness(certified=True, window=4, max_window=140)
    mode = Mode.AUTO if k is None else Mode.WINDOW
    request = GenerateRequest(PROMPT, max_tokens=6, temperature=0, mode=mode, window=k, truncated=True)
    tokens, finish = await generate(harness, request)
    context_ids = list(PROMPT)
    for one in tokens:
        assert one.token_id == harness.runner.logits(context_ids if k is None else context_ids[-k:]).argmax()
        context_ids.append(one.token_id)
    assert finish.error_bound == harness.manifest.certificate.error_bound_at(len(PROMPT) if k is None else min(k, 10))
    assert finish.state is (StateSource.FULL if k is None else StateSource.WINDOW)


async def test_a_truncated_prompt_of_an_uncertified_model_has_no_bound(harness: EngineHarness) -> None:
    request = GenerateRequest(PROMPT, max_tokens=2, temperature=0, truncated=True)
    assert (await generate(harness, request))[1].error_bound is None


async def test_equal_seeds_give_equal_texts_and_different_seeds_do_not(harness: EngineHarness) -> None:
    async def text(seed: int) -> tuple[int, ...]:
        return (await generate(harness, GenerateRequest(PROMPT, max_tokens=20, seed=seed)))[1].tokens

    assert await text(1) == await text(1)
    assert await text(1) != await text(2)


async def test_a_stop_string_ends_the_text_and_the_runs(harness: EngineHarness) -> None:
    whole = (await generate(harness, GenerateRequest(PROMPT, max_tokens=20, temperature=0)))[1].text
    stop = whole[4:6]
    harness.runner.calls.clear()
    request = GenerateRequest(PROMPT, max_tokens=20, temperature=0, stop=(stop,))
    tokens, finish = await generate(harness, request)
    assert finish.finish_reason is FinishReason.STOP
    assert finish.text == whole[: whole.index(stop)] == "".join(one.text for one in tokens)
    assert len(harness.runner.calls) == len(finish.tokens)


async def test_a_sequence_of_events_stops_at_its_end(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary("events"))
    _, finish = await generate(harness, GenerateRequest((2, 3), max_tokens=200, seed=3))
    assert finish.finish_reason is FinishReason.STOP
    assert finish.tokens[-1] == EOS
    assert EOS not in finish.tokens[:-1]


async def test_errors_of_a_request_are_raised_before_the_first_token(harness: EngineHarness) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 4097, but must be at most 4096"):
        await harness.engine.generate(GenerateRequest(PROMPT, max_tokens=4097))
    with pytest.raises(InvalidRequest, match="windows of 1 to 16"):
        await harness.engine.generate(GenerateRequest(PROMPT, mode=Mode.WINDOW, window=17))
    with pytest.raises(InvalidRequest, match=r"tokens\[0\] is 999"):
        await harness.engine.generate(GenerateRequest((999,)))
    harness.runner.poison = 10
    with pytest.raises(WaneError, match="failed to run"):
        await harness.engine.generate(GenerateRequest(PROMPT))


async def test_a_generation_that_is_closed_releases_its_state(harness: EngineHarness) -> None:
    begun = await harness.engine.generate(GenerateRequest(PROMPT, max_tokens=50))
    await anext(begun)
    never = await harness.engine.generate(GenerateRequest(PROMPT, max_tokens=50))
    assert harness.engine.state_cache.used_bytes == 2 * harness.engine.state_cache.slot_bytes
    await begun.aclose()
    await never.aclose()
    assert harness.engine.state_cache.used_bytes == 0
    await harness.engine.drain()


async def test_a_cancel_between_two_tokens_stops_the_runs(harness: EngineHarness) -> None:
    stream = await harness.engine.generate(GenerateRequest(PROMPT, max_tokens=50))
    await anext(stream)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    waiting = asyncio.create_task(anext(stream))
    await harness.runner.until_busy()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # The running batch still writes to the slot, so the slot is not free yet.
    assert harness.engine.state_cache.used_bytes == harness.engine.state_cache.slot_bytes
    harness.runner.gate.set()
    await harness.engine.drain()


async def test_a_deadline_ends_a_generation_between_its_tokens(
    harness: EngineHarness, travel: Callable[[float], None]
) -> None:
    deadline = asyncio.get_running_loop().time() + 3600
    stream = await harness.engine.generate(GenerateRequest(PROMPT, max_tokens=50, deadline=deadline))
    await anext(stream)
    harness.runner.gate.clear()
    travel(2 * 3600)
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    harness.runner.gate.set()
