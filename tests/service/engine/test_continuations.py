"""Tests of continuations: they are scored and predicted from a session's state, and the session does not change."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest

from tests.models.caches import random_cache
from tests.service.engine.test_claims import ALL, EVERYTHING, Tally
from tests.service.engine.test_step import expected
from tests.service.engine_harness import EngineHarness, MakeHarness, listed
from tests.service.oracle import Small
from wane.service.engine.agreement import FLOAT32_ROUNDING
from wane.service.engine.logits import log_softmax
from wane.service.engine.steps import continuations
from wane.service.errors import DeadlineExceeded, InvalidRequest, TooLarge, UnknownSession
from wane.service.types.answer import Continuation
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import ContinuationsRequest, History, StepRequest

EOS = 0
TOKENS = (5, 6, 7, 8)
EACH = ((9,), (10, 11), (9, 12, 13, 14, 15), (9,))


async def begin(harness: EngineHarness, mode: Mode | None = None, tokens: tuple[int, ...] = TOKENS) -> None:
    await harness.engine.create_session("a", mode)
    await harness.engine.submit(StepRequest("a", tokens))
    harness.runner.calls.clear()


async def ask(harness: EngineHarness, *each: tuple[int, ...], cache: bool = True) -> tuple[Continuation, ...]:
    request = ContinuationsRequest("a", each, ((),) * len(each), cache=cache)
    return (await harness.engine.continuations(request)).results


async def stepped(harness: EngineHarness, tokens: tuple[int, ...]) -> Continuation:
    """Returns what a fork of the session answers to `tokens`, as a continuation."""
    view = await harness.engine.fork("a")
    answer = await harness.engine.submit(StepRequest(view.session, tokens, token_logprobs=True))
    assert answer.token_logprobs is not None
    return answer  # type: ignore[return-value]


async def test_each_continuation_has_the_answer_of_steps_of_its_tokens_and_the_session_stays(
    harness: EngineHarness,
) -> None:
    await begin(harness)
    before = await harness.engine.sessions.read("a")
    found = await harness.engine.continuations(ContinuationsRequest("a", EACH, ((),) * len(EACH)))
    assert (found.session, found.position) == ("a", 4)
    assert await harness.engine.sessions.read("a") == before
    for one, tokens in zip(found.results, EACH, strict=True):
        assert listed(one) == expected(harness, [*TOKENS, *tokens])
        every = [log_softmax(harness.runner.logits([EOS, *TOKENS, *tokens[:index]])) for index in range(len(tokens))]
        assert one.logprobs == pytest.approx([logprobs[token] for logprobs, token in zip(every, tokens, strict=True)])
        assert (one.tokens, one.session, one.position) == (tokens, "a", 4 + len(tokens))
        assert (one.mode, one.state, one.error_bound) == (Mode.RECURRENT, StateSource.RESIDENT, 0.0)
        assert one.error_bounds == (0.0,) * len(tokens)
    assert listed(await harness.engine.submit(StepRequest("a", (9,)))) == listed(found.results[0])
    harness.engine.state_cache.check_integrity(idle=True)


async def test_the_continuations_of_a_request_run_in_the_same_batches(harness: EngineHarness) -> None:
    await begin(harness)
    await ask(harness, *[(9, 10 + index) for index in range(8)])
    assert [(role, len(rows)) for role, rows in harness.runner.calls] == [("head", 0), ("scan", 8), ("step", 8)]


@pytest.mark.parametrize("mode", [None, Mode.RECURRENT, Mode.WINDOW, Mode.BOTH])
@pytest.mark.parametrize("dropped", [False, True])
async def test_a_session_of_any_mode_continues_from_its_state_or_from_its_kept_tokens(
    make_harness: MakeHarness, mode: Mode | None, dropped: bool
) -> None:
    harness = make_harness(certified=True)
    await begin(harness, mode)
    if dropped:
        harness.engine.state_cache.drop("a")
    (one,) = await ask(harness, (9, 10))
    assert listed(one) == expected(harness, [*TOKENS, 9, 10])
    assert (one.error_bound, one.error_bounds) == (0.0, (0.0, 0.0))
    assert one.state is (StateSource.REBUILT if dropped or mode is Mode.WINDOW else StateSource.RESIDENT)
    (again,) = await ask(harness, (9, 10))
    assert (again.state, listed(again)) == (StateSource.RESIDENT, listed(one))


async def test_bounds_are_those_of_a_session_that_has_lost_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(certified=True)
    curve = harness.manifest.certificate.error_bound
    await harness.engine.create_session("a", history=History((5, 6, 7), 20))
    one, empty = (await harness.engine.continuations(ContinuationsRequest("a", ((8, 9), ()), ((), ("none",))))).results
    assert one.error_bounds == pytest.approx(curve[2:4])
    assert one.error_bound == pytest.approx(curve[4])
    assert (empty.tokens, empty.logprobs, empty.error_bounds) == ((), (), ())
    assert empty.error_bound == pytest.approx(curve[2])
    assert empty.unknown == ("none",)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("count", [3, 30])
async def test_a_model_with_a_cache_mixes_every_distribution(make_harness: MakeHarness, kept: bool, count: int) -> None:
    harness = make_harness(cache=random_cache(Random(4), 12), certified=True, session_history_tokens=16 if kept else 8)
    random = Random(count)
    await begin(harness, tokens=tuple(random.choices(range(5, 9), k=count)))
    each = [tuple(random.choices(range(5, 9), k=length)) for length in (1, 2, 14)]
    for one, tokens in zip(await ask(harness, *each), each, strict=True):
        answer = await stepped(harness, tokens)
        assert one.logprobs == pytest.approx(answer.token_logprobs)
        assert [token for token, _ in listed(one)] == [token for token, _ in listed(answer)]
        assert one.error_bound == pytest.approx(answer.error_bound)
        assert one.cache_tokens == answer.cache_tokens
        bounds = [(await stepped(harness, tokens[:index])).error_bound for index in range(1, len(tokens))]
        assert one.error_bounds[1:] == pytest.approx(bounds)
    (plain,) = await ask(harness, (5, 6), cache=False)
    assert plain.cache_tokens is None


@pytest.mark.parametrize(("kind", "layers"), [("plain", 2), ("residual", 1)])
@pytest.mark.parametrize("lost", [0, 5, 30])
async def test_every_distribution_is_within_its_bound_of_the_never_interrupted_model(
    kind: str, layers: int, lost: int
) -> None:
    small, random = Small("gated", kind, layers, 3, 0.6, beside=False), np.random.default_rng(lost)
    tokens = random.integers(EVERYTHING, size=40).tolist()
    await small.engine.create_session("s", history=History(tuple(tokens[lost:]), 40))
    each = tuple(tuple(random.integers(EVERYTHING, size=size).tolist()) for size in (1, 2, 7))
    request = ContinuationsRequest("s", each, ((),) * len(each), top_k=EVERYTHING, filter=ALL)
    tally = Tally()
    for one, more in zip((await small.engine.continuations(request)).results, each, strict=True):
        tally.check(small, [*tokens, *more], one)
        for index, (token, logprob, bound) in enumerate(zip(more, one.logprobs, one.error_bounds, strict=True)):
            assert bound is not None
            exact = small.uninterrupted([*tokens, *more[:index]])[0][token]
            assert abs(np.exp(logprob) - exact) <= bound + FLOAT32_ROUNDING
    assert tally.bounded == len(each)  # the session keeps 24 tokens
    await small.engine.close()


async def test_faults(make_harness: MakeHarness) -> None:
    harness = make_harness(max_input_tokens=8)
    with pytest.raises(UnknownSession):
        await ask(harness, (9,))
    await begin(harness)
    with pytest.raises(InvalidRequest, match=r"continuations\[1\]\[0\] is 258"):
        await ask(harness, (9,), (258,))
    with pytest.raises(InvalidRequest, match="at least one token"):
        await ask(harness, (9,), ())
    with pytest.raises(InvalidRequest, match="top_k is 0"):
        ContinuationsRequest("a", ((9,),), ((),), top_k=0)
    with pytest.raises(TooLarge, match="9 tokens, but at most 8"):
        await ask(harness, (9, 9, 9), (9, 9, 9), (9, 9, 9))
    assert harness.runner.calls == []


async def test_more_continuations_than_slots_run_one_after_the_other(make_harness: MakeHarness) -> None:
    slot_bytes = make_harness().engine.state_cache.slot_bytes
    harness = make_harness(state_budget_bytes=10 * slot_bytes)
    await begin(harness)
    each = [(9, token) for token in range(10, 40)]
    found = await ask(harness, *each)
    assert [listed(one) for one in found] == [expected(harness, [*TOKENS, *tokens]) for tokens in each]


@pytest.mark.parametrize("how", ["cancelled", "late", "failed"])
async def test_what_is_withdrawn_leaves_the_session_and_no_slot_in_use(harness: EngineHarness, how: str) -> None:
    await begin(harness)
    harness.runner.poison = 13
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    deadline = asyncio.get_running_loop().time() + 0.05 if how == "late" else None
    each = ((9, 10), (9, 13, 9), (9, 11))
    asked = asyncio.create_task(
        harness.engine.continuations(ContinuationsRequest("a", each, ((),) * 3, deadline=deadline))
    )
    await harness.runner.until_busy()
    if how == "cancelled":
        asked.cancel()
    elif how == "late":
        with pytest.raises(DeadlineExceeded):
            await asked
    harness.runner.gate.set()
    with pytest.raises({"cancelled": asyncio.CancelledError, "late": DeadlineExceeded, "failed": Exception}[how]):
        await asked
    await harness.engine.drain()
    assert (await harness.engine.get_session("a")).position == 4


async def test_a_step_changes_the_session_while_its_continuations_run(harness: EngineHarness) -> None:
    await begin(harness)
    asked = asyncio.create_task(ask(harness, *[(9, 10 + index) for index in range(20)]))
    await asyncio.sleep(0)
    answers = [listed(await harness.engine.submit(StepRequest("a", (token,)))) for token in (3, 4, 3)]
    position = (await asked)[0].position or 0
    before = [*TOKENS, 3, 4, 3][: position - 2]
    assert listed((await asked)[0]) == expected(harness, [*before, 9, 10])
    assert answers[2] == expected(harness, [*TOKENS, 3, 4, 3])


@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_long_continuation_is_mixed_in_parts(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    harness = make_harness(cache=random_cache(Random(4), 12), certified=True)
    await begin(harness)
    tokens = (7,) * 20 + (5, 6, 7)
    (whole,) = await ask(harness, tokens)
    monkeypatch.setattr(continuations, "MIXED_AT_ONCE", at_once)
    (parts,) = await ask(harness, tokens)
    assert parts.logprobs == whole.logprobs
    assert parts.error_bounds == whole.error_bounds
