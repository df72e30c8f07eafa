"""Tests of models of events: unknown events, filters of the listed events, and models without a start token. The
expected lists are computed in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.caches import random_cache
from tests.service.engine.columns_fuzz import PlainStore
from tests.service.engine_harness import Clock, EngineHarness, MakeHarness, name_vocabulary
from wane.models.manifest import Unknown
from wane.models.reference.cache import mixture
from wane.service.batching.turns import HEAVY_TOKENS
from wane.service.engine.event_names import EventTokens
from wane.service.engine.steps.answers import StepAnswer
from wane.service.errors import IdempotencyKeyReused, InvalidRequest, PositionConflict
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.sessions.stores.store import Store
from wane.service.types.answer import Answer, Prediction
from wane.service.types.body import as_array
from wane.service.types.common import Mode, StateSource
from wane.service.types.predict import PredictBody
from wane.service.types.request import (
    Bias,
    CompareRequest,
    Filter,
    GenerateRequest,
    PredictRequest,
    ScoreRequest,
    StepRequest,
)
from wane.service.types.text import Finish

EOS, UNK = 0, 1
NAMES = [f"item {index}" for index in range(60)]
SIZE = 2 + len(NAMES)
CACHE = random_cache(Random(8), 12)
CLOSE = 1e-5


def clicks(count: int, seed: int = 0) -> tuple[int, ...]:
    """Returns the token ids of `count` random items. Some items are repeated often."""
    random = np.random.default_rng(seed)
    return tuple(int(token) for token in 2 + random.zipf(1.4, count) % len(NAMES))


def distribution(harness: EngineHarness, tokens: Sequence[int], *, cache: bool = False) -> NDArray[np.float64]:
    """Returns the distribution of the token that follows `tokens`, a whole sequence. The distribution is computed from
    the fake runner's logits and, if `cache` is true, from the definition of the cache."""
    read = [*harness.manifest.start_tokens, *tokens]
    logits = harness.runner.logits(read).astype(np.float64)
    weights = np.exp(logits - logits.max())
    network = weights / weights.sum()
    return mixture(CACHE, network, list(tokens)) if cache and tokens else network


def ranking(
    of: NDArray[np.float64],
    count: int,
    *,
    exclude: Sequence[int] = (),
    candidates: Sequence[int] | None = None,
    include_end: bool = False,
) -> list[int]:
    """Returns the ids that an answer must list, most probable first. `of` is the distribution of the next token."""
    allowed = range(SIZE) if candidates is None else candidates
    left = [one for one in allowed if one not in exclude and one != UNK and (include_end or one != EOS)]
    return sorted(left, key=lambda one: (-of[one], one))[:count]


def assert_lists(found: Answer | Sequence[Prediction], of: NDArray[np.float64], count: int, **filters: Any) -> None:
    """Asserts that an answer lists the expected tokens in the expected order, with their probabilities in the whole
    distribution `of`."""
    predictions = found.predictions if isinstance(found, Answer) else found
    ids = [one.token_id for one in predictions]
    wanted = ranking(of, count, **filters)
    assert len(ids) == len(set(ids)) == len(wanted)
    assert set(ids) <= set(ranking(of, SIZE, **filters))
    assert of[ids] == pytest.approx(of[wanted], abs=CLOSE)
    assert [one.probability for one in predictions] == pytest.approx(of[ids], abs=CLOSE)
    assert [one.logprob for one in predictions] == pytest.approx(np.log(of[ids]), abs=1e-4)


OPTIONS = [
    pytest.param({}, id="network"),
    pytest.param({"cache": CACHE}, id="cache"),
    pytest.param({"start": "zero"}, id="zero start"),
    pytest.param({"start": "zero", "cache": CACHE}, id="zero start and cache"),
    pytest.param({"puts_out_top": False}, id="graphs without the largest logits"),
]


@pytest.fixture(params=OPTIONS)
def harness(request: pytest.FixtureRequest, make_harness: MakeHarness) -> EngineHarness:
    options = {"certified": True, "session_history_tokens": 64, "unknown": "skip", **request.param}
    return make_harness(vocabulary=name_vocabulary(names=NAMES), **options)


def has_cache(harness: EngineHarness) -> bool:
    return harness.manifest.cache is not None


FILTERS: list[tuple[Filter, dict[str, Any]]] = [
    (Filter(), {}),
    (Filter(include_end=True), {"include_end": True}),
    (Filter(exclude=(5, 6, 7)), {"exclude": (5, 6, 7)}),
    (Filter(exclude=tuple(range(2, 50))), {"exclude": tuple(range(2, 50))}),
    (Filter(candidates=(9, 3, 40, 3)), {"candidates": (3, 9, 40)}),
    (Filter(candidates=(9, 0), include_end=True), {"candidates": (0, 9), "include_end": True}),
    (Filter(candidates=(9, 3), exclude=(9,)), {"candidates": (3,)}),
    (Filter(candidates=()), {"candidates": ()}),
]


@pytest.mark.parametrize(("wanted", "filters"), FILTERS, ids=range(len(FILTERS)))
@pytest.mark.parametrize("top_k", [1, 5, 20])
async def test_the_list_is_the_ranking_of_a_prediction(
    harness: EngineHarness, wanted: Filter, filters: dict[str, Any], top_k: int
) -> None:
    tokens = clicks(20)
    of = distribution(harness, tokens, cache=has_cache(harness))
    for mode in (Mode.RECURRENT, Mode.BOTH):
        answer = await harness.engine.submit(PredictRequest(tokens, mode=mode, top_k=top_k, filter=wanted))
        assert_lists(answer, of, top_k, **filters)
        assert answer.seen_tokens is None


async def test_the_list_of_every_step_of_a_session(harness: EngineHarness) -> None:
    engine, tokens = harness.engine, clicks(40)
    await engine.create_session("s")
    cache = has_cache(harness)
    in_columns = 0
    for position in range(len(tokens)):
        seen = tokens[: position + 1]
        of = distribution(harness, seen, cache=cache)
        wanted = Filter(exclude_seen=True) if position % 3 == 2 else Filter()
        answer = await engine.submit(StepRequest("s", (tokens[position],), None, position, filter=wanted))
        in_columns += isinstance(answer, StepAnswer)
        assert_lists(answer, of, 5, exclude=seen if wanted.exclude_seen else ())
        assert answer.seen_tokens == (position + 1 if wanted.exclude_seen else None)
    assert (in_columns > 0) is (harness.runner.puts_out_top and not harness.shadow_runner.calls)


async def test_sessions_that_may_list_few_of_the_most_probable_tokens_are_answered_together(
    harness: EngineHarness,
) -> None:
    engine, cache = harness.engine, has_cache(harness)
    histories = {"few": clicks(12, 1), "none": clicks(13, 2), "all": clicks(11, 3)}
    for session, tokens in histories.items():
        await engine.create_session(session)
        await engine.submit(StepRequest(session, tokens[:-1]))
    excluded: dict[str, tuple[int, ...]] = {"all": ()}
    for session, count in (("few", SIZE - 12), ("none", SIZE - 4)):
        of = distribution(harness, histories[session], cache=cache)
        excluded[session] = tuple(ranking(of, SIZE)[:count])
    pending = {
        session: engine.submit(StepRequest(session, tokens[-1:], filter=Filter(exclude=excluded[session])))
        for session, tokens in histories.items()
    }
    for session, tokens in histories.items():
        answer = await pending[session]
        of = distribution(harness, tokens, cache=cache)
        assert_lists(answer, of, 5, exclude=excluded[session])
        # Six tokens are searched for. The session `none` may list only two.
        by_arrays = harness.runner.puts_out_top and not harness.shadow_runner.calls and session != "none"
        assert isinstance(answer, StepAnswer) is by_arrays


async def test_a_rebuilt_and_a_rewound_session_lists_the_ranking(harness: EngineHarness) -> None:
    engine, tokens, cache = harness.engine, clicks(30), has_cache(harness)
    await engine.create_session("s")
    await engine.submit(StepRequest("s", tokens))
    engine.state_cache.drop("s")
    answer = await engine.submit(PredictRequest(session="s", filter=Filter(exclude_seen=True), mode=Mode.RECURRENT))
    assert answer.state is StateSource.REBUILT
    assert_lists(answer, distribution(harness, tokens, cache=cache), 5, exclude=tokens)
    for position in (20, 1, 0):
        await engine.rewind("s", position)
        answer = await engine.submit(PredictRequest(session="s", filter=Filter(exclude_seen=True), mode=Mode.RECURRENT))
        assert (answer.position, answer.seen_tokens) == (position, position)
        if position or harness.manifest.start_tokens:
            of = distribution(harness, tokens[:position], cache=cache)
            assert_lists(answer, of, 5, exclude=tokens[:position])
        else:
            assert answer.predictions == ()
    answer = await engine.submit(StepRequest("s", tokens[:2], None, 0))
    assert_lists(answer, distribution(harness, tokens[:2], cache=cache), 5)


@pytest.mark.parametrize("options", OPTIONS)
async def test_a_session_that_moves_between_servers_lists_the_ranking(
    make_harness: MakeHarness, options: dict[str, Any]
) -> None:
    clock = Clock()
    store = cast(Store, PlainStore(MemoryStore(64, 3600, 2**20, clock)))
    given = {"vocabulary": name_vocabulary(names=NAMES), "certified": True, "session_history_tokens": 64, **options}
    harnesses = [make_harness(store=store, clock=clock, **given) for _ in range(2)]
    tokens, sources = clicks(24), set()
    await harnesses[0].engine.create_session("s")
    for position, token in enumerate(tokens):
        harness, seen = harnesses[position % 5 % 2], tokens[: position + 1]
        request = StepRequest("s", (token,), None, position, filter=Filter(exclude_seen=True))
        answer = await harness.engine.submit(request)
        assert_lists(answer, distribution(harness, seen, cache=has_cache(harness)), 5, exclude=seen)
        assert answer.seen_tokens == answer.position == position + 1
        sources.add(answer.state)
    assert sources == {StateSource.RESIDENT, StateSource.REBUILT}


async def test_exclude_seen_knows_only_the_kept_tokens(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES), session_history_tokens=16)
    tokens = tuple(range(2, 42))
    await harness.engine.create_session("s")
    answer = await harness.engine.submit(StepRequest("s", tokens[:39]))
    answer = await harness.engine.submit(StepRequest("s", tokens[39:], filter=Filter(exclude_seen=True), top_k=60))
    assert answer.seen_tokens == 17  # the 16 tokens that the session keeps, and the token of the step
    assert_lists(answer, distribution(harness, tokens), 60, exclude=tokens[-17:])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("top_k", [5, 40])
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("wanted", [Filter(exclude_seen=True), Filter(exclude=tuple(range(2, 22)))])
async def test_a_long_session_lists_no_excluded_token(
    make_harness: MakeHarness, options: dict[str, Any], top_k: int, is_buffered: bool, wanted: Filter
) -> None:
    """Most of the events that the graph outputs are excluded, so many lists need all logits."""
    memory = MemoryStore(16, 3600, 2**20, Clock())
    store = memory if is_buffered else cast(Store, PlainStore(memory))
    given = {"vocabulary": name_vocabulary(names=NAMES), "session_history_tokens": 16, **options}
    harness = make_harness(store=store, **given)
    engine, tokens = harness.engine, tuple(2 + index % 20 for index in range(40))
    await engine.create_session("s")
    for position, token in enumerate(tokens):
        answer = await engine.submit(StepRequest("s", (token,), None, position, top_k=top_k, filter=wanted))
        seen = tokens[: position + 1]
        assert answer.seen_tokens == (min(len(seen), 17) if wanted.exclude_seen else None)
        of = distribution(harness, seen, cache=has_cache(harness))
        assert_lists(answer, of, top_k, exclude=seen[-17:] if wanted.exclude_seen else wanted.exclude)


@pytest.mark.parametrize("certified", [True, False])
async def test_the_proof_is_about_the_listed_events(make_harness: MakeHarness, certified: bool) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES), certified=True, window=16)
    margin = harness.runner.margin()
    for seed in range(30):
        tokens = clicks(20, seed)
        for wanted, filters in FILTERS:
            request = PredictRequest(tokens, mode=Mode.WINDOW, window=12, filter=wanted)
            answer = await harness.engine.submit(request)
            ids = ranking(distribution(harness, tokens), SIZE, **filters)
            if answer.top1_proved:
                assert [one.token_id for one in answer.predictions[:1]] == ids[:1] != []
            if len(ids) == 1:
                assert answer.top1_proved
            if not ids:
                assert not answer.top1_proved
            if not wanted.candidates and answer.state_error_bound is not None and ids:
                # If a token is proved to be the most probable of all tokens, it is also the most probable of any list
                # that contains it.
                logits = harness.runner.logits(tokens[-12:])
                hidden = await hidden_of(harness, tokens[-12:])
                first = int(logits.argmax())
                if margin.has_no_rival(logits, hidden, answer.state_error_bound, first) and first in ids:
                    assert answer.top1_proved


async def hidden_of(harness: EngineHarness, tokens: Sequence[int]) -> NDArray[np.float32]:
    outputs = harness.runner.run("window", {"tokens": np.array([tokens]), "lengths": np.array([len(tokens)])})
    hidden: NDArray[np.float32] = outputs["hidden"][0]
    return hidden


async def test_a_lead_over_the_excluded_tokens_is_not_needed(make_harness: MakeHarness) -> None:
    """The two candidates have equal output weights, so neither is proved. If one of them is excluded, the other is
    proved."""
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES), certified=True)
    tokens = clicks(20)
    harness.runner.head[3] = harness.runner.head[2]
    close = await harness.engine.submit(PredictRequest(tokens, mode=Mode.RECURRENT, filter=Filter(candidates=(2, 3))))
    alone = await harness.engine.submit(
        PredictRequest(tokens, mode=Mode.RECURRENT, filter=Filter(candidates=(2, 3), exclude=(3,)))
    )
    assert not close.top1_proved
    assert alone.top1_proved and [one.token_id for one in alone.predictions] == [2]


# Unknown events


def test_names_become_tokens(harness: EngineHarness) -> None:
    names = harness.engine.events
    found = names.tokens(["item 3", "nope", "item 4", "<unk>"])
    assert found == (as_array((5, 6)), ("nope", "<unk>"), (1, 3))
    assert names.tokens(["item 3", "nope"], "token") == (as_array((5, UNK)), ("nope",), ())
    with pytest.raises(InvalidRequest, match=r"events\[1\] is 'nope', which the vocabulary of fake lacks"):
        names.tokens(["item 3", "nope"], "refuse")
    with pytest.raises(InvalidRequest, match="the input is empty: give at least one event"):
        names.tokens([])


async def test_a_long_list_of_names_is_read_like_a_short_one(harness: EngineHarness) -> None:
    names = [NAMES[index % 7] if index % 5 else "nope" for index in range(HEAVY_TOKENS + 3)]
    policies: tuple[Unknown, ...] = ("skip", "token")
    for unknown in policies:
        found = await harness.engine.events.read(names, unknown)
        assert found == harness.engine.events.tokens(names, unknown)
        assert len(found.tokens) + len(found.skipped) == len(names)
    names[:] = [NAMES[0]] * len(names)
    names[-2] = "nope"
    with pytest.raises(InvalidRequest, match=rf"events\[{len(names) - 2}\] is 'nope'"):
        await harness.engine.events.read(names, "refuse")


def test_reserved_names_are_not_events(harness: EngineHarness) -> None:
    for name in ("<eos>", "<unk>"):
        assert harness.engine.events.tokens([name, NAMES[0]], "skip") == EventTokens(as_array((2,)), (name,), (0,))


def test_a_text_without_a_known_event_is_refused(harness: EngineHarness) -> None:
    text = f"{NAMES[0]} {NAMES[1]}"
    with pytest.raises(InvalidRequest, match="has no event of prompt: write one event name in each line"):
        harness.engine.events.lines(text, "skip")
    with pytest.raises(InvalidRequest, match=r"which the vocabulary of fake lacks$"):
        harness.engine.events.lines(text, "refuse")


def test_an_integer_is_a_name(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=["17", "-4", "x"]))
    assert harness.engine.events.tokens([17, -4, "17", "x"]).tokens == as_array((2, 3, 2, 4))
    with pytest.raises(InvalidRequest, match=r"events\[0\] is '18'"):
        harness.engine.events.tokens([18])  # without `unknown` in the manifest, unknown events are refused


def test_the_filter_of_names(harness: EngineHarness) -> None:
    def filtered(exclude: Sequence[str] | None, candidates: Sequence[str] | None, unknown: Unknown | None) -> Filter:
        body = PredictBody(
            tokens=(5,),
            exclude=None if exclude is None else tuple(exclude),
            candidates=None if candidates is None else tuple(candidates),
            unknown=unknown,
        )
        return harness.engine.events.filter(body)

    assert filtered(None, None, None) == Filter()
    assert filtered(["item 1", "nope"], None, None) == Filter(exclude=(3,), unknown=("nope",))
    with pytest.raises(InvalidRequest, match=r"exclude\[1\] is 'nope'"):
        filtered(["item 1", "nope"], None, "refuse")
    assert filtered(["a"], ["b"], "skip").unknown == ("a", "b")
    found = filtered(None, ["item 1", "nope"], None)
    assert found == Filter(candidates=(3,), unknown=("nope",))
    assert filtered(None, ["item 1", "nope"], "token") == found
    with pytest.raises(InvalidRequest, match=r"candidates\[1\] is 'nope'"):
        filtered(None, ["item 1", "nope"], "refuse")
    too_many = ["x"] * (harness.settings.max_filter_events + 1)
    with pytest.raises(InvalidRequest, match="exclude holds 10001 values, but must hold at most 10000"):
        filtered(too_many, None, None)


async def test_a_step_of_skipped_events_appends_nothing(harness: EngineHarness) -> None:
    engine, tokens = harness.engine, clicks(6)
    await engine.create_session("s")
    first = await engine.submit(StepRequest("s", (), None, 0, unknown_names=("nope",)))
    assert (first.position, first.replayed, first.unknown) == (0, False, ("nope",))
    if harness.manifest.start_tokens:
        assert_lists(first, distribution(harness, (), cache=False), 5)
    else:
        assert first.predictions == ()
        assert first.error_bound is None and not first.top1_proved
    await engine.submit(StepRequest("s", tokens, None, 0, "key"))
    answer = await engine.submit(StepRequest("s", (), None, 6, unknown_names=("nope",)))
    assert (answer.position, answer.unknown) == (6, ("nope",))
    assert_lists(answer, distribution(harness, tokens, cache=has_cache(harness)), 5)
    # The step without tokens did not replace the last step, so the earlier step can be replayed.
    assert (await engine.submit(StepRequest("s", tokens, None, 0, "key"))).replayed
    with pytest.raises(PositionConflict):
        await engine.submit(StepRequest("s", (), None, 0, unknown_names=("nope",)))
    with pytest.raises(IdempotencyKeyReused):
        await engine.submit(StepRequest("s", (), None, 6, "key", unknown_names=("nope",)))


async def test_a_request_of_skipped_events_is_answered_from_the_start(harness: EngineHarness) -> None:
    for mode in (Mode.RECURRENT, Mode.WINDOW, Mode.BOTH, Mode.AUTO):
        for truncated in (False, True):
            request = PredictRequest(
                (), mode=mode, truncated=truncated, unknown_names=("nope",), filter=Filter(exclude_seen=True)
            )
            answer = await harness.engine.submit(request)
            assert answer.unknown == ("nope",) and answer.seen_tokens == 0
            assert answer.cache_tokens == (0 if has_cache(harness) else None)
            if harness.manifest.start_tokens:
                assert_lists(answer, distribution(harness, ()), 5)
                assert answer.error_bound == (None if truncated else 0)
            else:
                assert (answer.predictions, answer.error_bound) == ((), None)


async def test_a_score_has_null_at_the_places_of_skipped_events(harness: EngineHarness) -> None:
    tokens, cache = clicks(5), has_cache(harness)
    own = [
        np.log(distribution(harness, tokens[:index], cache=cache)[token])
        if index or harness.manifest.start_tokens
        else None
        for index, token in enumerate(tokens)
    ]
    for top_k in (None, 3):
        for skipped in ((), (0,), (2, 3), (5,), (0, 1, 4, 8)):
            unknown = ("nope",) * len(skipped)
            score = await harness.engine.score(
                ScoreRequest(tokens, unknown_names=unknown, skipped=skipped, top_k=top_k, truncated=False)
            )
            kept = [place for place in range(len(tokens) + len(skipped)) if place not in skipped]
            wanted: list[Any] = [None] * (len(tokens) + len(skipped))
            for place, logprob in zip(kept, own, strict=True):
                wanted[place] = logprob
            assert len(score.logprobs) == len(wanted)
            for one, other in zip(score.logprobs, wanted, strict=True):
                assert one == (None if other is None else pytest.approx(other, abs=1e-4))
            assert [score.tokens[place] for place in kept] == list(tokens)
            assert all(score.tokens[place] is None for place in skipped)
            assert score.unknown == (unknown or None)
            if top_k is not None:
                assert score.predictions is not None
                for place, listed in enumerate(score.predictions):
                    assert (listed is None) is (wanted[place] is None)
                    assert UNK not in [one.token_id for one in listed or ()]
            known = [logprob for logprob in own if logprob is not None]
            assert score.perplexity == pytest.approx(np.exp(-np.mean(known)), rel=1e-3)


async def test_a_score_of_skipped_events_only(harness: EngineHarness) -> None:
    for truncated in (False, True):
        request = ScoreRequest((), unknown_names=("a", "b"), skipped=(0, 1), truncated=truncated, top_k=2)
        score = await harness.engine.score(request)
        assert (score.tokens, score.logprobs, score.perplexity) == ([None, None], [None, None], None)
        assert score.predictions == [None, None]
        assert score.error_bounds == ([None, None] if truncated else None)


# Models without a start token


async def test_generation_and_comparison_after_the_start(harness: EngineHarness) -> None:
    engine, tokens, cache = harness.engine, clicks(8), has_cache(harness)
    stream = await engine.generate(GenerateRequest(tokens, max_tokens=6, temperature=0))
    items = [item async for item in stream]
    finish = items[-1]
    assert isinstance(finish, Finish)
    text = list(tokens)
    for token in finish.tokens:
        of = distribution(harness, text, cache=cache)
        of[UNK] = 0
        assert of[token] == pytest.approx(of.max(), abs=CLOSE)
        text.append(token)
    compared = await engine.compare(CompareRequest(tokens[:1], windows=(1, 4), repeat=1))
    of = distribution(harness, tokens[:1], cache=cache)
    wanted = ranking(of, 5)
    for line in (compared.recurrent, compared.windows[-1]):
        assert of[[one.token_id for one in line.predictions]] == pytest.approx(of[wanted], abs=CLOSE)


async def test_a_zero_start_predicts_nothing_before_the_first_event(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES), start="zero", cache=CACHE)
    engine = harness.engine
    await engine.create_session("s")
    with pytest.raises(InvalidRequest, match="there is nothing to continue"):
        await engine.generate(GenerateRequest(session="s"))
    with pytest.raises(InvalidRequest, match="there is nothing to continue"):
        await engine.generate(GenerateRequest(unknown_names=("nope",)))
    with pytest.raises(InvalidRequest, match="there is nothing to compare"):
        await engine.compare(CompareRequest((), windows=(1,), unknown_names=("nope",)))
    for mode in Mode:
        answer = await engine.submit(PredictRequest(session="s", mode=mode))
        assert (answer.predictions, answer.position, answer.cache_tokens) == ((), 0, 0)
    assert not harness.runner.calls
    # Every run begins with the first event, not with `<eos>`.
    await engine.submit(StepRequest("s", (2, 3)))
    await engine.submit(PredictRequest((2, 3)))
    assert harness.runner.calls and not any(EOS in row for _, rows in harness.runner.calls for row in rows)


async def test_token_logprobs_of_the_first_step_of_a_zero_start(harness: EngineHarness) -> None:
    engine, tokens = harness.engine, clicks(4)
    await engine.create_session("s")
    score = await engine.score(ScoreRequest(tokens))
    for _ in range(2):  # the second request is a replay of the first
        answer = await engine.submit(StepRequest("s", tokens, None, 0, token_logprobs=True))
        assert answer.token_logprobs is not None
        for one, other in zip(answer.token_logprobs, score.logprobs, strict=True):
            assert one == (None if other is None else pytest.approx(other, abs=1e-4))


async def test_generation_never_draws_unk(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES[:2]))
    harness.runner.head[UNK] = 50 * np.abs(harness.runner.head[2])
    for seed in range(10):
        stream = await harness.engine.generate(GenerateRequest((2, 3), max_tokens=5, seed=seed, top_logprobs=3))
        items = [item async for item in stream]
        finish = items[-1]
        assert isinstance(finish, Finish)
        assert UNK not in finish.tokens


async def test_a_bias_that_leaves_only_unk_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(vocabulary=name_vocabulary(names=NAMES[:2]))
    with pytest.raises(InvalidRequest, match="logit_bias forbids every token"):
        await harness.engine.generate(GenerateRequest((2,), bias=Bias({0: -100, 2: -100, 3: -100})))
