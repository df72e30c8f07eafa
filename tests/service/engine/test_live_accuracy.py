"""Tests of live accuracy: its counts equal those of the answers that the clients got."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.service.engine_harness import EngineHarness, MakeHarness
from wane.service.engine.live_accuracy import LIST_BYTES, SNAPSHOTS, SPAN_S, TOKEN_BYTES, LiveAccuracy, LiveCounts
from wane.service.errors import UnknownSession
from wane.service.observability.metrics import Metrics
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import ANYBODY, Filter, History, PredictRequest, StepRequest

K = 4
NOTHING = LiveCounts(judged=0, hits=0, reciprocal_ranks=0.0, recall=None, mrr=None, unjudged=0)


def counts(harness: EngineHarness) -> LiveCounts:
    live = harness.engine._live
    assert live is not None
    return live.report().since_start


class Client:
    """Counts the ranks of the tokens that it sends in the answers that it got before."""

    def __init__(self, harness: EngineHarness) -> None:
        self.engine = harness.engine
        self.answers: dict[str, tuple[int, list[int]]] = {}
        self.ranks: list[int] = []
        self.unjudged = 0

    async def step(self, session: str, tokens: Sequence[int], **asked: Any) -> Answer:
        answer = await self.engine.submit(StepRequest(session, tuple(tokens), **asked))
        assert answer.position is not None
        if answer.replayed:
            return answer
        before = answer.position - len(tokens)
        position, listed = self.answers.get(session, (-1, []))
        if before and position == before:
            self.ranks.append(listed.index(tokens[0]) + 1 if tokens[0] in listed else 0)
        elif before:
            self.unjudged += 1
        self.answers[session] = answer.position, [one.token_id for one in answer.predictions][:K]
        return answer

    def check(self, harness: EngineHarness) -> None:
        hits = [rank for rank in self.ranks if rank]
        found = counts(harness)
        assert (found.judged, found.hits, found.unjudged) == (len(self.ranks), len(hits), self.unjudged)
        assert found.reciprocal_ranks == pytest.approx(sum(1 / rank for rank in hits))
        assert found.recall == (len(hits) / len(self.ranks) if self.ranks else None)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 9},
    {"prove": True},
    {"logits": True},
    {"token_logprobs": True},
    {"filter": Filter(exclude=(3, 4, 5))},
    {"filter": Filter(exclude_seen=True)},
    {"filter": Filter(candidates=(2, 3, 4, 5, 6))},
    {"mode": Mode.WINDOW},
    {"mode": Mode.BOTH},
]


@pytest.mark.parametrize("changes", [{}, {"state_budget_bytes": 1 << 13}, {"puts_out_top": False}], ids=str)
async def test_the_counts_equal_those_of_the_client(make_harness: MakeHarness, changes: dict[str, Any]) -> None:
    harness = make_harness(live_accuracy=K, certified=True, **changes)
    client, random = Client(harness), Random(1)
    names = [f"s{number}" for number in range(12)]
    for name in names:
        await harness.engine.create_session(name, random.choice([None, Mode.WINDOW]))
        await client.step(name, [random.randrange(2, 20)])
    for _ in range(60):
        some = random.sample(names, 5)
        lengths = random.choices([1, 3], [5, 1], k=5)
        sent = [(name, [random.randrange(2, 9) for _ in range(n)]) for name, n in zip(some, lengths, strict=True)]
        await asyncio.gather(*(client.step(*one, **random.choice(OPTIONS)) for one in sent))
    assert len({*client.ranks}) == K + 1
    client.check(harness)
    assert counts(harness).unjudged == 0 or "state_budget_bytes" in changes


async def test_what_has_no_answer_before_it_is_not_judged(make_harness: MakeHarness) -> None:
    harness = make_harness(live_accuracy=K)
    client, engine = Client(harness), harness.engine
    await client.step("a", [5], creator=ANYBODY)
    assert counts(harness) == NOTHING  # the first token has no answer before it
    await client.step("a", [6], idempotency_key="k", expected_position=1)
    replayed = await client.step("a", [6], idempotency_key="k", expected_position=1)
    assert replayed.replayed
    await engine.submit(PredictRequest((), session="a"))
    await client.step("a", [7])
    client.check(harness)
    assert counts(harness).judged == 2
    await engine.rewind("a", 2)
    await client.step("a", [8])
    assert counts(harness).unjudged == 1
    await engine.delete_session("a")
    await engine.create_session("a", history=History((1, 2, 3), 3))
    client.answers.clear()
    await client.step("a", [9])  # the deleted session had an answer at position 3, too
    client.check(harness)
    assert counts(harness).unjudged == 2


async def test_skipped_events_are_missed_and_the_list_before_them_judges_the_next_step(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(live_accuracy=K)
    client, engine = Client(harness), harness.engine
    skipped = StepRequest("a", (), unknown_names=("new",), creator=ANYBODY)
    await engine.submit(skipped)
    assert counts(harness) == NOTHING  # the session is new, so no answer came before
    await client.step("a", [5])
    await engine.submit(skipped)
    await engine.submit(skipped)
    client.ranks += [0, 0]
    await client.step("a", [6], unknown_names=("new",))
    client.check(harness)
    assert counts(harness).judged == 3
    await engine.rewind("a", 1)
    await engine.submit(skipped)
    assert (counts(harness).judged, counts(harness).unjudged) == (3, 1)


async def lose_answer(harness: EngineHarness, token: int, position: int) -> None:
    """Appends a token to session "a", up to `position`, by a step whose caller leaves before its answer."""
    harness.runner.gate.clear()
    harness.runner.busy.clear()
    pending = harness.engine.submit(StepRequest("a", (token,), creator=ANYBODY))
    await harness.runner.until_busy()
    pending.cancel()
    harness.runner.gate.set()
    for _ in range(1000):
        with suppress(UnknownSession):
            if (await harness.engine.get_session("a")).position == position:
                return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the step to position {position} was not committed")


async def test_an_answer_that_nobody_got_judges_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(live_accuracy=K)
    client = Client(harness)
    await client.step("a", [5], creator=ANYBODY)
    await client.step("a", [6])
    await lose_answer(harness, 7, 3)
    assert counts(harness).judged == 2  # the step was committed, and its token follows an answer
    await harness.engine.submit(StepRequest("a", (8,)))
    assert (counts(harness).judged, counts(harness).unjudged) == (2, 1)


@pytest.mark.parametrize("removed", ["rewound", "deleted"])
async def test_an_answer_to_removed_tokens_judges_nothing(make_harness: MakeHarness, removed: str) -> None:
    harness = make_harness(live_accuracy=K)
    engine = harness.engine
    tokens = (5, 6, 7) if removed == "rewound" else (5,)
    for token in tokens:
        await engine.submit(StepRequest("a", (token,), creator=ANYBODY))
    if removed == "rewound":
        await engine.rewind("a", len(tokens) - 1)
    else:
        await engine.delete_session("a")
    await lose_answer(harness, 8, len(tokens))  # the session is at the position of the answer to the removed token
    before = counts(harness)
    await engine.submit(StepRequest("a", (9,)))
    assert counts(harness).judged == before.judged
    assert counts(harness).unjudged == before.unjudged + 1


async def test_the_kept_answers_count_against_the_budget_of_states(make_harness: MakeHarness) -> None:
    pools = [make_harness(live_accuracy=k, state_budget_bytes=1 << 16).engine.state_cache for k in (0, 1, 101)]
    bytes_a_state = [(1 << 16) / pool.capacity for pool in pools]
    assert bytes_a_state[0] == pytest.approx(pools[0].slot_bytes, rel=0.1)
    assert bytes_a_state[1] > bytes_a_state[0] + LIST_BYTES
    assert bytes_a_state[2] - bytes_a_state[1] == pytest.approx(100 * TOKEN_BYTES, rel=0.1)


def test_the_memory_of_the_kept_answers_is_what_is_counted() -> None:
    found, _ = live(20, most=10_000)
    names, ids = [f"s{number}" for number in range(8000)], [[*range(first, first + 20)] for first in range(300, 400)]
    tracemalloc.start()
    try:
        found.keep((name, at, ids[at % 100]) for at, name in enumerate(names))
        kept = tracemalloc.get_traced_memory()[0] / len(names)
    finally:
        tracemalloc.stop()
    assert 0.5 * (LIST_BYTES + 20 * TOKEN_BYTES) < kept <= LIST_BYTES + 20 * TOKEN_BYTES


async def test_nothing_is_kept_without_the_setting(harness: EngineHarness) -> None:
    assert harness.engine._live is None
    assert (await harness.engine.report()).live_accuracy is None


def live(k: int = 3, most: int = 10) -> tuple[LiveAccuracy, Metrics]:
    metrics = Metrics()
    return LiveAccuracy(k, most, metrics, "m", "1"), metrics


def test_the_sliding_window_forgets_what_is_older() -> None:
    found, metrics = live()
    found.keep([("a", 1, [7, 8, 9])])
    found.judge([("a", 1, 8)])
    for second in range(SPAN_S):
        assert found.report().recent.hits == 1, second
        found.passed(1.0)
    found.keep([("a", 2, [7, 8, 9])])
    found.judge([("a", 2, 6)])
    for _ in range(SPAN_S // SNAPSHOTS):
        found.passed(1.0)
    report = found.report()
    assert report.recent == replace(NOTHING, judged=1, recall=0.0, mrr=0.0)
    assert report.since_start == replace(NOTHING, judged=2, hits=1, reciprocal_ranks=0.5, recall=0.5, mrr=0.25)
    values = {
        name: metrics.registry.get_sample_value(f"wane_live_{name}_total", {"model": "m", "version": "1"})
        for name in ("judged", "hits", "reciprocal_ranks", "unjudged")
    }
    assert values == {"judged": 2, "hits": 1, "reciprocal_ranks": 0.5, "unjudged": 0}


def test_only_the_latest_sessions_are_kept() -> None:
    found, _ = live(most=2)
    for session in ("a", "b", "a", "c"):
        found.keep([(session, 1, [7])])
    for session in ("a", "b", "c"):
        found.judge([(session, 1, 7)])
    assert (found.report().since_start.hits, found.report().since_start.unjudged) == (2, 1)
