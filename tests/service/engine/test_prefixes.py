"""Tests of prompts that continue the kept state of their beginning."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.models.caches import RandomTables, random_cache
from tests.service.engine_harness import EngineHarness, FixedProfile, MakeHarness, known, listed, name_vocabulary
from tests.service.shipped import each_bundle
from wane.models.manifest import Certificate
from wane.service.engine import score as scoring
from wane.service.engine.forward import PIECE_TOKENS
from wane.service.errors import DeadlineExceeded, WaneError
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode, StateSource
from wane.service.types.predict import ScoreMethod
from wane.service.types.request import GenerateRequest, PredictRequest, ScoreRequest, StepRequest
from wane.service.types.text import Finish, GeneratedToken, Score, ScoredTokens

TEXT = tuple(2 + index * 7 % 200 for index in range(3000))
OTHER = tuple(3 + index * 11 % 200 for index in range(3000))


async def predict(
    harness: EngineHarness,
    tokens: tuple[int, ...],
    owner: str | None = "",
    mode: Mode = Mode.RECURRENT,
    **asked: Any,
) -> Answer:
    return await harness.engine.submit(PredictRequest(tokens, mode=mode, owner=owner, **asked))


async def generate(
    harness: EngineHarness, tokens: tuple[int, ...], owner: str | None = "", count: int = 4, **asked: Any
) -> Finish:
    request = GenerateRequest(tokens, max_tokens=count, temperature=0, owner=owner, **asked)
    async with aclosing(await harness.engine.generate(request)) as stream:
        items = [item async for item in stream]
    assert isinstance(items[-1], Finish)
    return items[-1]


def ran(harness: EngineHarness) -> list[int]:
    """Returns the number of tokens of every run since the last call; 0 for a run of the output layer alone."""
    found = [sum(map(len, rows)) for _, rows in harness.runner.calls]
    harness.runner.calls.clear()
    return found


def assert_equal(one: Answer, other: Answer) -> None:
    """Compares an answer from a kept state with one from all tokens. The fake runner's sums have the same bits in both;
    numpy's tanh may differ in the last bit by the position of a row in memory."""
    assert [token for token, _ in listed(one)] == [token for token, _ in listed(other)]
    assert [value for _, value in listed(one)] == pytest.approx([value for _, value in listed(other)], rel=1e-5)
    assert (one.error_bound, one.state, one.top1_proved) == (other.error_bound, other.state, other.top1_proved)


async def test_a_longer_prompt_runs_only_its_new_tokens(harness: EngineHarness) -> None:
    assert (await predict(harness, TEXT[:100])).cached_tokens == 0
    assert ran(harness) == [101]
    answer = await predict(harness, TEXT[:130])
    assert ran(harness) == [30, 0]
    assert answer.cached_tokens == 100
    assert answer.state is StateSource.FULL
    assert_equal(answer, await predict(harness, TEXT[:130], None))


async def test_the_same_prompt_runs_no_token(harness: EngineHarness) -> None:
    first = await predict(harness, TEXT[:100])
    ran(harness)
    second = await predict(harness, TEXT[:100])
    assert ran(harness) == [0]
    assert second.cached_tokens == 100
    assert_equal(second, first)


async def test_a_prompt_that_is_one_token_longer_is_one_step(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:100])
    harness.runner.calls.clear()
    await predict(harness, TEXT[:101])
    assert harness.runner.calls == [("step", [[TEXT[100]]])]


@pytest.mark.parametrize(("tokens", "cached"), [(62, 0), (63, 63)])
async def test_only_inputs_of_64_tokens_are_kept(harness: EngineHarness, tokens: int, cached: int) -> None:
    """The start token counts as a token of the input."""
    await predict(harness, TEXT[:tokens])
    assert (await predict(harness, TEXT[: tokens + 40])).cached_tokens == cached
    assert harness.sample("wane_prefix_lookups_total", outcome="hit") == bool(cached)


async def test_a_long_prompt_continues_after_its_pieces(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:2000])
    ran(harness)
    answer = await predict(harness, TEXT[:2700])
    assert ran(harness) == [512, 188, 0]
    assert answer.cached_tokens == 2000
    assert_equal(answer, await predict(harness, TEXT[:2700], None))


async def test_parallel_chunks_continue_a_kept_state(make_harness: MakeHarness) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 200}))
    await predict(harness, TEXT[:300])
    answer = await predict(harness, TEXT[:3000])
    assert answer.cached_tokens == 300
    assert_equal(answer, await predict(harness, TEXT[:3000], None))


async def test_prompts_with_a_common_beginning_share_it_from_the_third_on(harness: EngineHarness) -> None:
    common = TEXT[:400]
    for index, cached in enumerate((0, 0, 383, 383)):  # 384 tokens with the start token
        prompt = common + OTHER[37 * index : 37 * index + 50]
        answer = await predict(harness, prompt)
        assert answer.cached_tokens == cached
        assert_equal(answer, await predict(harness, prompt, None))


async def test_owners_never_share_a_state(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:200], "ann")
    await generate(harness, TEXT[:200], "ann")
    for owner in ("bob", "", "ann ", None):
        ran(harness)
        assert (await predict(harness, TEXT[:200], owner)).cached_tokens == 0
        assert ran(harness) == [201]
    assert (await generate(harness, TEXT[:210], "bob")).cached_tokens == 200
    assert (await generate(harness, TEXT[:210], "cid")).cached_tokens == 0


async def test_a_generation_leaves_the_state_after_its_own_tokens(harness: EngineHarness) -> None:
    first = await generate(harness, TEXT[:100], count=40)
    assert first.cached_tokens == 0
    ran(harness)
    turn = TEXT[:100] + first.tokens + OTHER[:32]
    second = await generate(harness, turn, count=1)
    assert second.cached_tokens == 139  # the last token of the generation was drawn, but not run
    assert ran(harness) == [33, 0]
    assert second.tokens == (await generate(harness, turn, None, count=1)).tokens


async def test_a_generation_that_its_client_leaves_keeps_what_it_has_read(harness: EngineHarness) -> None:
    request = GenerateRequest(TEXT[:100], max_tokens=50, temperature=0, owner="")
    tokens: list[int] = []
    async with aclosing(await harness.engine.generate(request)) as stream:
        async for item in stream:
            assert isinstance(item, GeneratedToken)
            tokens.append(item.token_id)
            if len(tokens) == 5:
                break
    found = await predict(harness, TEXT[:100] + tuple(tokens))
    assert found.cached_tokens in (104, 105)
    assert_equal(found, await predict(harness, TEXT[:100] + tuple(tokens), None))


async def test_a_generation_that_is_cancelled_within_a_run_keeps_only_its_prompt(harness: EngineHarness) -> None:
    stream = await harness.engine.generate(GenerateRequest(TEXT[:100], max_tokens=50, temperature=0, owner=""))
    first = await anext(stream)
    assert isinstance(first, GeneratedToken)
    harness.runner.busy.clear()
    harness.runner.gate.clear()
    reading = asyncio.create_task(anext(stream))
    await harness.runner.until_busy()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()
    harness.runner.gate.set()
    assert (await predict(harness, (*TEXT[:100], first.token_id))).cached_tokens == 100


async def test_a_failed_run_leaves_no_state(harness: EngineHarness) -> None:
    harness.runner.poison = TEXT[90]
    with pytest.raises(WaneError):
        await predict(harness, TEXT[:100])
    harness.runner.poison, harness.runner.hot = None, TEXT[90]
    with pytest.raises(WaneError):
        await predict(harness, TEXT[:100])
    assert len(harness.engine.state_cache.prefixes) == 0
    harness.engine.state_cache.check_integrity(idle=True)


async def test_a_prediction_whose_deadline_passes_leaves_no_state(harness: EngineHarness) -> None:
    harness.runner.gate.clear()
    late = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(DeadlineExceeded):
        await predict(harness, TEXT[:100], deadline=late)
    harness.runner.gate.set()
    await harness.engine.submit(PredictRequest((5,), mode=Mode.RECURRENT))
    assert len(harness.engine.state_cache.prefixes) == 0
    harness.engine.state_cache.check_integrity(idle=True)


@pytest.mark.parametrize("asked", [{"truncated": True}, {"prove": True}])
@pytest.mark.parametrize(("tokens", "cached"), [(200, 0), (PIECE_TOKENS + 1, PIECE_TOKENS + 1)])
async def test_what_only_a_run_of_all_tokens_outputs_is_not_lost(
    make_harness: MakeHarness, asked: dict[str, Any], tokens: int, cached: int
) -> None:
    """A run of one piece outputs a radius and a trace, so such a request runs all its tokens. Longer ones have neither
    with or without kept states."""
    harness = make_harness(certified=True, radius=1e-6)
    for _ in range(2):
        answer = await predict(harness, TEXT[:tokens], **asked)
        assert_equal(answer, await predict(harness, TEXT[:tokens], None, **asked))
    assert answer.cached_tokens == cached


@pytest.mark.parametrize("method", ScoreMethod)
async def test_a_score_leaves_the_state_before_its_last_token(harness: EngineHarness, method: ScoreMethod) -> None:
    await harness.engine.score(ScoreRequest(TEXT[:100], method=method, owner="ann"))
    assert (await predict(harness, TEXT[:120], "bob")).cached_tokens == 0
    answer = await predict(harness, TEXT[:120], "ann")
    assert answer.cached_tokens == 99
    assert_equal(answer, await predict(harness, TEXT[:120], None))


async def score(harness: EngineHarness, tokens: tuple[int, ...], owner: str | None = "", **asked: Any) -> Score:
    return await harness.engine.score(ScoreRequest(tokens, owner=owner, **asked))


def assert_same_score(one: Score, other: Score) -> None:
    """Compares a score from a kept state with one from all tokens, like `assert_equal`."""
    assert known(one.logprobs[1:]) == pytest.approx(known(other.logprobs[1:]), abs=1e-5)
    assert one.logprobs[:1] == other.logprobs[:1]
    assert (one.tokens, one.error_bound, one.error_bounds) == (other.tokens, other.error_bound, other.error_bounds)
    assert one.perplexity == pytest.approx(other.perplexity)
    assert (one.predictions is None) == (other.predictions is None)
    for found, expected in zip(one.predictions or (), other.predictions or (), strict=True):
        assert [item.token_id for item in found or ()] == [item.token_id for item in expected or ()]


async def test_a_score_runs_only_the_tokens_after_those_of_an_earlier_score(harness: EngineHarness) -> None:
    assert (await score(harness, TEXT[:100])).cached_tokens == 0
    assert ran(harness) == [100]
    found = await score(harness, TEXT[:100] + OTHER[:30])
    assert ran(harness) == [0, 30]
    assert found.cached_tokens == 99
    assert_same_score(found, await score(harness, TEXT[:100] + OTHER[:30], None))


async def test_the_same_score_runs_no_token(harness: EngineHarness) -> None:
    first = await score(harness, TEXT[:100])
    ran(harness)
    second = await score(harness, TEXT[:100])
    assert ran(harness) == [0]
    assert second.cached_tokens == 99
    assert_same_score(second, first)


@pytest.mark.parametrize(("top_k", "pieces"), [(None, 10), (5, 50)])
async def test_kept_scores_are_read_in_pieces(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, top_k: int | None, pieces: int
) -> None:
    """All of them in one turn of the event loop would hold it."""
    monkeypatch.setattr(scoring, "FED_AT_ONCE", 50)
    request = ScoreRequest(TEXT[:501], owner="", top_k=top_k)
    first = await harness.engine.score(request)
    async with aclosing(await harness.engine.scoring(request)) as stream:
        found = [item async for item in stream if isinstance(item, ScoredTokens)]
    assert len(found) == pieces + 1
    assert [token for item in found for token in item.tokens] == [*TEXT[:501]]
    assert_same_score(await harness.engine.score(request), first)


async def test_scores_of_continuations_share_their_context_from_the_third_on(harness: EngineHarness) -> None:
    for index, cached in enumerate((0, 0, 383, 383)):  # 384 tokens with the start token
        text = TEXT[:400] + OTHER[37 * index : 37 * index + 50]
        found = await score(harness, text)
        assert found.cached_tokens == cached
        assert_same_score(found, await score(harness, text, None))


@pytest.mark.parametrize("method", ScoreMethod)
async def test_scores_of_both_methods_share_states(make_harness: MakeHarness, method: ScoreMethod) -> None:
    harness = make_harness(throughput=FixedProfile({0.0: 200}))
    await score(harness, TEXT[:300], method=method)
    for other in ScoreMethod:
        found = await score(harness, TEXT, method=other)
        assert found.cached_tokens >= 299
        assert_same_score(found, await score(harness, TEXT, None, method=ScoreMethod.SEQUENTIAL))


async def test_a_state_without_scores_does_not_serve_a_score(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:100])
    assert (await score(harness, TEXT[:120])).cached_tokens == 0
    assert (await score(harness, TEXT[:130])).cached_tokens == 119
    assert (await score(harness, TEXT[:130], truncated=True)).cached_tokens == 0


async def test_scores_of_other_owners_are_not_read(harness: EngineHarness) -> None:
    await score(harness, TEXT[:200], "ann")
    for owner in ("bob", "", "ann ", None):
        assert (await score(harness, TEXT[:200], owner)).cached_tokens == 0
    assert (await score(harness, TEXT[:200], "ann")).cached_tokens == 199


async def test_lists_are_kept_for_scores_with_the_same_options(harness: EngineHarness) -> None:
    await score(harness, TEXT[:100], top_k=2)
    text = TEXT[:100] + OTHER[:30]
    assert (await score(harness, text, top_k=1)).cached_tokens == 0
    assert (await score(harness, text, top_k=2, include_unknown=True)).cached_tokens == 0
    found = await score(harness, TEXT[:100] + OTHER[:20], top_k=2)
    assert found.cached_tokens == 99
    assert_same_score(found, await score(harness, TEXT[:100] + OTHER[:20], None, top_k=2))
    assert (await score(harness, text)).cached_tokens == 129


async def test_scores_are_dropped_beyond_their_memory(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wane.service.state.prefixes.SCORES_BYTES", 8 * 150)
    await score(harness, TEXT[:100])
    await score(harness, OTHER[:100])
    harness.engine.state_cache.check_integrity(idle=True)
    assert (await score(harness, OTHER[:100])).cached_tokens == 99
    assert (await score(harness, TEXT[:100])).cached_tokens == 0
    assert (await predict(harness, TEXT[:120])).cached_tokens == 99


@pytest.mark.parametrize("start", ["token", "zero"])
@pytest.mark.parametrize("top_k", [None, 2])
async def test_a_score_with_a_cache_continues(make_harness: MakeHarness, start: str, top_k: int | None) -> None:
    harness = make_harness(cache=random_cache(random.Random(5), 50), start=start, certified=True)
    await score(harness, TEXT[:100], top_k=top_k)
    found = await score(harness, TEXT[:140], top_k=top_k)
    assert found.cached_tokens == 99
    assert_same_score(found, await score(harness, TEXT[:140], None, top_k=top_k))


async def test_a_score_whose_joints_differ_leaves_no_state(make_harness: MakeHarness) -> None:
    harness = make_harness(throughput=FixedProfile({1e-5: 100}))
    found = await harness.engine.score(ScoreRequest(TEXT, method=ScoreMethod.PARALLEL, owner=""))
    assert found.max_residual > 0
    assert len(harness.engine.state_cache.prefixes) == 0


async def test_windows_use_no_kept_state(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:100])
    ran(harness)
    assert (await predict(harness, TEXT[:100], mode=Mode.WINDOW)).cached_tokens == 0
    assert (await generate(harness, TEXT[:100], mode=Mode.WINDOW)).cached_tokens == 0
    assert ran(harness) == [4] * 5


async def test_the_recurrent_part_of_both_modes_uses_a_kept_state(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:100])
    answer = await predict(harness, TEXT[:130], mode=Mode.BOTH)
    assert answer.cached_tokens == 100
    assert answer.agreement is not None
    assert answer.modes is not None


async def test_a_truncated_prompt_shares_no_state_with_a_whole_one(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:600])
    assert (await predict(harness, TEXT[:700], truncated=True)).cached_tokens == 0
    assert (await predict(harness, TEXT[:800], truncated=True)).cached_tokens == 700
    assert (await predict(harness, TEXT[:800])).cached_tokens == 600


async def test_without_prefix_states_every_token_runs(make_harness: MakeHarness) -> None:
    harness = make_harness(settings_prefix_states="off")
    for _ in range(2):
        assert (await predict(harness, TEXT[:100])).cached_tokens == 0
        assert ran(harness) == [101]
    assert harness.sample("wane_prefix_lookups_total", outcome="miss") == 0
    assert harness.engine.state_cache.used == 0


@pytest.mark.parametrize("vocabulary", [None, "events"])
@pytest.mark.parametrize("start", ["token", "zero"])
async def test_a_cache_holds_the_tokens_that_did_not_run(
    make_harness: MakeHarness, vocabulary: str | None, start: str
) -> None:
    names = name_vocabulary("events", [f"e{index}" for index in range(210)]) if vocabulary else None
    tables = RandomTables(random.Random(4), names.size) if names else None
    cache = random_cache(random.Random(5), 50)
    harness = make_harness(vocabulary=names, cache=cache, tables=tables, start=start, certified=True)
    await predict(harness, TEXT[:100])
    answer = await predict(harness, TEXT[:140])
    assert answer.cached_tokens == 100
    assert answer.cache_tokens == 50
    assert_equal(answer, await predict(harness, TEXT[:140], None))


async def test_a_model_whose_bits_differ_has_the_same_bound_from_a_kept_state(make_harness: MakeHarness) -> None:
    certified = make_harness(certified=True).manifest.certificate
    differing = Certificate.model_validate(certified.model_dump() | {"bit_identical": False})
    harness = make_harness(certificate=differing)
    await predict(harness, TEXT[:100])
    answer, whole = await predict(harness, TEXT[:140]), await predict(harness, TEXT[:140], None)
    assert answer.cached_tokens == 100
    assert answer.error_bound == whole.error_bound
    assert answer.error_bound is not None
    assert answer.error_bound > 0


async def test_metrics_count_lookups_tokens_and_bytes(harness: EngineHarness) -> None:
    for count in (50, 100, 150, 150):
        await predict(harness, TEXT[:count])
    assert harness.sample("wane_prefix_lookups_total", outcome="miss") == 1
    assert harness.sample("wane_prefix_lookups_total", outcome="hit") == 2
    assert harness.sample("wane_prefix_cached_tokens_total") == 101 + 151
    pool = harness.engine.state_cache
    assert harness.sample("wane_prefix_bytes") == 2 * pool.slot_bytes == harness.sample("wane_state_bytes")


async def test_states_of_sessions_push_out_states_of_prompts(make_harness: MakeHarness) -> None:
    slot = make_harness().engine.state_cache.slot_bytes
    harness = make_harness(settings_state_budget_bytes=12 * slot, max_batch_size=4)
    harness.engine.state_cache.prefixes._most = 12
    for index in range(8):
        await predict(harness, OTHER[index : index + 100])
    for index in range(9):
        await harness.engine.create_session(f"s{index}")
        await harness.engine.submit(StepRequest(f"s{index}", (5,)))
    assert harness.sample("wane_states_evicted_total") == 0
    assert len(harness.engine.state_cache) == 9
    await predict(harness, TEXT[:100])
    assert len(harness.engine.state_cache) == 9
    harness.engine.state_cache.check_integrity(idle=True)


async def test_idle_states_expire(harness: EngineHarness) -> None:
    await predict(harness, TEXT[:100])
    harness.clock.now_s += harness.settings.session_ttl_s + 1
    await harness.engine.expire()
    assert len(harness.engine.state_cache.prefixes) == 0


@each_bundle
async def test_a_shipped_model_answers_with_the_same_bits_from_a_kept_state(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)
    registry = ModelRegistry(Settings(bundles=path, device="cpu"), Metrics())
    await registry.load()
    engine, draw = registry.get(), np.random.default_rng(2)
    assert engine.manifest.certificate.bit_identical
    tokens = tuple(draw.integers(2, engine.vocabulary.size, 900).tolist())
    for stop, cached in ((70, 0), (71, 70), (300, 71), (300, 300), (899, 300), (900, 899)):
        asked = PredictRequest(tokens[:stop], mode=Mode.RECURRENT, logits=True, owner="")
        kept, whole = await engine.submit(asked), await engine.submit(replace(asked, owner=None))
        assert kept.cached_tokens == cached
        assert kept.logits is not None
        assert whole.logits is not None
        assert kept.logits.tobytes() == whole.logits.tobytes()
        assert kept.predictions == whole.predictions
        assert (kept.error_bound, kept.top1_proved) == (whole.error_bound, whole.top1_proved)
    await registry.close()


@each_bundle
async def test_a_shipped_model_scores_the_same_from_a_kept_state(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token after the kept ones is predicted by the graph `head`, and may differ by its rounding. All other
    log-probabilities have the same bits."""
    monkeypatch.setattr("wane.service.registry.loader.verify_graphs", lambda bundle, run: 0.0)
    registry = ModelRegistry(Settings(bundles=path, device="cpu"), Metrics())
    await registry.load()
    engine, draw = registry.get(), np.random.default_rng(3)
    tokens = tuple(draw.integers(2, engine.vocabulary.size, 700).tolist())
    junctions = set[int]()  # the places of the tokens that followed kept tokens; their values are kept in turn
    for stop, cached in ((70, 0), (71, 69), (300, 70), (300, 299), (700, 299)):
        asked = ScoreRequest(tokens[:stop], owner="")
        kept, whole = await engine.score(asked), await engine.score(replace(asked, owner=None))
        assert kept.cached_tokens == cached
        assert kept.error_bound == whole.error_bound
        differing = [at for at in range(stop) if kept.logprobs[at] != whole.logprobs[at]]
        junctions.add(cached)
        assert set(differing) <= junctions
        for at in differing:
            assert kept.logprobs[at] == pytest.approx(whole.logprobs[at], abs=2e-6)
    await registry.close()


async def test_random_prompts_of_many_clients_are_answered_as_without_kept_states(make_harness: MakeHarness) -> None:
    """Prompts grow, branch, repeat and are cancelled, among steps of sessions in a pool that is too small for all."""
    draw = random.Random(11)
    slot = make_harness().engine.state_cache.slot_bytes
    harness = make_harness(settings_state_budget_bytes=24 * slot)
    harness.engine.state_cache.prefixes._most = 24
    plain = make_harness(settings_prefix_states="off")
    prompts: dict[str, list[tuple[int, ...]]] = {owner: [TEXT[:80], OTHER[:150]] for owner in ("", "ann", "bob")}
    await asyncio.gather(*(harness.engine.create_session(f"s{index}") for index in range(8)))
    hits = 0

    async def once() -> None:
        nonlocal hits
        owner = draw.choice([*prompts])
        prompt = draw.choice(prompts[owner])
        prompt = prompt[: draw.randrange(60, len(prompt) + 1)] if draw.random() < 0.3 else prompt
        more = tuple(draw.randrange(2, 200) for _ in range(draw.choice((0, 1, 5, 70))))
        tokens = (prompt + more)[:700]
        what = draw.random()
        if what < 0.2:
            await harness.engine.submit(StepRequest(f"s{draw.randrange(8)}", (draw.randrange(2, 200),)))
        elif what < 0.3:
            doomed = asyncio.create_task(predict(harness, tokens, owner))
            await asyncio.sleep(0)
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
        elif what < 0.5:
            count = draw.randrange(1, 6)
            found = await generate(harness, tokens, owner, count=count)
            assert found.tokens == (await generate(plain, tokens, owner, count=count)).tokens
            prompts[owner].append((tokens + found.tokens)[:700])
        else:
            answer = await predict(harness, tokens, owner)
            assert_equal(answer, await predict(plain, tokens, owner))
            hits += answer.cached_tokens > 0
            prompts[owner].append(tokens)
        del prompts[owner][:-6]

    for _ in range(60):
        await asyncio.gather(*(once() for _ in range(5)))
        await asyncio.sleep(0)
        harness.engine.state_cache.check_integrity()
    assert hits > 30
    harness.engine.state_cache.check_integrity(idle=True)
