"""Tests that the backlog admits long requests if they can finish by their deadlines, and otherwise refuses them
immediately."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from random import Random
from typing import Any

import pytest

from tests.service.engine_harness import Clock, EngineHarness, LinearCosts, MakeHarness
from wane.models.manifest import Role
from wane.service.engine.backlog import EMA_ALPHA, LONG_S, MARGIN, MEASURED_S, Backlog, Share
from wane.service.engine.engine import Engine
from wane.service.engine.forward import PIECE_TOKENS
from wane.service.engine.pending import BEGUN_AT_ONCE
from wane.service.errors import DeadlineExceeded, Overloaded
from wane.service.types.common import Mode
from wane.service.types.request import CompareRequest, GenerateRequest, PredictRequest, ScoreRequest, StepRequest


class Requests:
    """A backlog, and the context managers of its admitted requests in flight."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.refused = 0
        self.backlog = Backlog(self._refuse, self.clock)
        self.held = ExitStack()

    def _refuse(self) -> None:
        self.refused += 1

    def enter(self, seconds: float, within_s: float | None) -> Share:
        deadline = None if within_s is None else self.clock() + within_s
        return self.held.enter_context(self.backlog.share(seconds, deadline))


def expected_s(backlog: Backlog) -> float:
    """Returns the expected seconds until all long requests have ended, if no new request arrives."""
    now = backlog._clock()
    return backlog.pace * sum(share.left_s for share in backlog.shares if share.deadline > now)


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.held.close()
    assert expected_s(requests.backlog) == 0


def test_a_request_that_cannot_finish_in_time_is_refused_with_retry_after(
    requests: Requests,
) -> None:
    for _ in range(4):
        requests.enter(6, 30)
    with pytest.raises(Overloaded, match=r"may take 7\.5 s, and 37\.5 s with .* deadline is in 30\.0 s") as refused:
        requests.enter(6, 30)
    assert refused.value.retry_after_s == MARGIN * 30 - 30
    assert requests.refused == 1
    assert expected_s(requests.backlog) == 24


def test_the_only_request_is_always_admitted(requests: Requests) -> None:
    requests.enter(1000, 30)


def test_a_request_that_would_make_another_late_is_refused(
    requests: Requests,
) -> None:
    requests.enter(10, 15)
    with pytest.raises(Overloaded, match="would make a request that was admitted earlier miss its deadline") as refused:
        requests.enter(6, None)
    assert refused.value.retry_after_s == 10
    requests.enter(1, None)
    requests.held.close()
    requests.enter(100, 30)
    requests.enter(6, 30)


def test_a_short_request_is_neither_refused_nor_counted(requests: Requests) -> None:
    requests.enter(10, 12)
    for _ in range(1000):
        requests.enter(LONG_S / 2, 1)
    assert expected_s(requests.backlog) == 10


def test_a_shorter_request_finishes_before_longer_ones(requests: Requests) -> None:
    for _ in range(2):
        requests.enter(10, None)
    requests.enter(1, MARGIN * 3 + 0.01)  # the three requests share the time equally until the short request finishes
    with pytest.raises(Overloaded):
        requests.enter(1, MARGIN * 3)


def test_progress_reduces_the_backlog(requests: Requests) -> None:
    first = requests.enter(20, 30)
    with pytest.raises(Overloaded):
        requests.enter(10, 30)
    requests.clock.now_s += 10
    first.progress(0.5)
    assert expected_s(requests.backlog) == 10
    first.progress(0.25)  # a value smaller than the last progress has no effect
    assert expected_s(requests.backlog) == 10
    requests.enter(4, 30)


def test_slower_work_raises_the_pace_for_all(requests: Requests) -> None:
    first = requests.enter(10, None)
    requests.clock.now_s += 3 * MEASURED_S
    first.progress(MEASURED_S / 10)
    assert expected_s(requests.backlog) == pytest.approx((1 + EMA_ALPHA * 2) * (10 - MEASURED_S))
    with pytest.raises(Overloaded):
        requests.enter(5, MARGIN * 14)


def test_a_failed_request_leaves_the_backlog(requests: Requests) -> None:
    with pytest.raises(KeyError), requests.backlog.share(10, None):
        raise KeyError
    assert expected_s(requests.backlog) == 0


def test_a_request_that_ends_early_does_not_change_the_pace(requests: Requests) -> None:
    for _ in range(12):
        with requests.backlog.share(10, None):
            requests.clock.now_s += 1
    assert requests.backlog.pace == 1


def test_the_end_of_a_request_does_not_change_the_pace_of_another(requests: Requests) -> None:
    first = requests.enter(10, None)
    with requests.backlog.share(10, None):
        requests.clock.now_s += 16  # the two requests share these 16 s, so each gets 8 s
    requests.clock.now_s += 2
    first.progress(1)
    assert requests.backlog.pace == 1


def test_time_spent_waiting_for_a_client_does_not_count(requests: Requests) -> None:
    first = requests.enter(10, None)
    second = requests.enter(10, None)
    for share in (first, second):
        share.pause()
    requests.clock.now_s += 100
    first.resume()
    requests.clock.now_s += 1
    second.resume()
    requests.clock.now_s += 2  # the two requests share these 2 s, so each gets 1 s
    first.progress(0.2)
    second.progress(0.1)
    assert requests.backlog.pace == 1


def test_a_request_is_admitted_while_all_others_wait_for_their_clients(requests: Requests) -> None:
    first = requests.enter(100, None)
    first.pause()
    requests.enter(6, 5).pause()
    assert expected_s(requests.backlog) == 106
    first.resume()
    with pytest.raises(Overloaded):
        requests.enter(6, 5)


def test_requests_past_their_deadlines_do_not_count(requests: Requests) -> None:
    requests.enter(100, 5)
    requests.enter(1, None)
    requests.clock.now_s += 6
    requests.enter(6, MARGIN * 7 + 0.01)
    assert expected_s(requests.backlog) == 7


def test_an_admission_check_reads_each_request_only_a_few_times(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in range(1, 401):
        requests.enter(seconds, None)
    reads, left = 0, vars(Share)["left_s"]

    def read(share: Share) -> float:
        nonlocal reads
        reads += 1
        return left.__get__(share)  # type: ignore[no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(Share, "left_s", property(read, left.__set__))
        requests.enter(200, 1e9)
    assert 400 <= reads <= 400 * 8


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_admitted_as_the_formula_says(requests: Requests, seed: int) -> None:
    random, admitted, answers = Random(seed), list[tuple[float, float]](), set[bool]()

    def finish_s(left: float, *others: float) -> float:
        return sum(min(left, other) for other in others)

    for _ in range(60):
        seconds, within_s = random.uniform(1, 20), random.uniform(20, 400)
        before = [left for left, _ in admitted]
        fits = MARGIN * finish_s(seconds, *before, seconds) <= within_s and all(
            not finish_s(left, *before) <= at < MARGIN * finish_s(left, *before, seconds) for left, at in admitted
        )
        answers.add(fits or not admitted)
        if fits or not admitted:
            requests.enter(seconds, within_s)
            admitted.append((seconds, within_s))
        else:
            with pytest.raises(Overloaded):
                requests.enter(seconds, within_s)
    assert answers == {True, False}


class Slow(LinearCosts):
    """A cost model in which a run takes one millisecond, or `seconds`, for each token."""

    def __init__(self, seconds: float = 1e-3) -> None:
        super().__init__()
        self.seconds = seconds

    def run(self, role: Role, tokens: int) -> float:
        return tokens * self.seconds


LONG = (7,) * (2 * PIECE_TOKENS)
Ask = Callable[[Engine, float | None], Awaitable[object]]


async def streamed(engine: Engine, deadline: float | None) -> None:
    async with aclosing(await engine.generate(GenerateRequest((7,), max_tokens=200, deadline=deadline))) as generation:
        async for _ in generation:
            pass


ASKED: dict[str, Ask] = {
    "score": lambda engine, deadline: engine.score(ScoreRequest(LONG, deadline=deadline)),
    "predict": lambda engine, deadline: engine.submit(PredictRequest(LONG, mode=Mode.RECURRENT, deadline=deadline)),
    "auto": lambda engine, deadline: engine.submit(PredictRequest(LONG, deadline=deadline)),
    "both": lambda engine, deadline: engine.submit(PredictRequest(LONG, mode=Mode.BOTH, deadline=deadline)),
    "generate": streamed,
    "compare": lambda engine, deadline: engine.compare(
        CompareRequest((7,), windows=(8, 16), repeat=20, deadline=deadline)
    ),
    "step": lambda engine, deadline: engine.submit(StepRequest("s", LONG, deadline=deadline)),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_long_requests_are_counted_and_refused_if_they_would_be_late(
    make_harness: MakeHarness, asked: Ask
) -> None:
    harness = make_harness(cost_model=Slow(1.0))
    engine, runner, loop = harness.engine, harness.runner, asyncio.get_running_loop()
    await engine.create_session("s")
    runner.gate.clear()
    first = asyncio.ensure_future(asked(engine, None))
    await runner.until_busy()
    left_s = expected_s(engine.backlog)
    assert left_s >= 200
    calls = len(runner.calls)
    with pytest.raises(Overloaded, match="the request may take") as refused:
        await asked(engine, loop.time() + 100)
    assert refused.value.retry_after_s > 0
    assert harness.sample("wane_queue_rejected_total") == 1
    assert len(runner.calls) == calls, "the model ran, although the request was refused"
    runner.gate.set()
    await first
    assert expected_s(engine.backlog) == 0


async def test_the_inputs_of_one_call_are_admitted_together(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(cost_model=Slow())
    engine, loop = harness.engine, asyncio.get_running_loop()
    short = [PredictRequest((7,) * 39, mode=mode, deadline=loop.time() + 90) for mode in (Mode.RECURRENT, Mode.BOTH)]
    assert engine.predictor.seconds(short[0]) == 0.04 < LONG_S
    with engine.backlog.share(1000, None), pytest.raises(Overloaded):
        await engine.predict_many(short * 500)
    assert harness.sample("wane_queue_rejected_total") == 1
    assert not harness.runner.calls, "the model ran, although the request was refused"
    harness.runner.gate.clear()
    call = asyncio.create_task(engine.predict_many([*short * 500, PredictRequest((-1,))]))
    await harness.runner.until_busy()
    assert expected_s(engine.backlog) == pytest.approx(40)
    assert len(engine.backlog.shares) == 1
    harness.runner.gate.set()
    answered = await call
    assert [index for index, one in enumerate(answered) if isinstance(one, Exception)] == [1000]
    assert expected_s(engine.backlog) == 0


async def test_generations_that_would_be_late_together_are_refused_before_one_begins(make_harness: MakeHarness) -> None:
    engine = (harness := make_harness(cost_model=Slow())).engine
    now = asyncio.get_running_loop().time()
    long = [GenerateRequest(LONG, deadline=now + 90, sample=sample) for sample in range(256)]
    each_s = engine.predictor.generation_seconds(long[0])
    assert LONG_S <= each_s < 90 < 256 * each_s
    with pytest.raises(Overloaded, match="the request may take"):
        await engine.check_generations(long)
    assert harness.sample("wane_queue_rejected_total") == 1
    await engine.check_generations(long[:1])
    await engine.check_generations(
        [GenerateRequest((7,), deadline=now + 0.01, max_tokens=1)] * 256
    )  # each of them is short


async def test_other_work_runs_while_the_inputs_of_one_call_start(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop = harness.engine, asyncio.get_running_loop()
    turn, begun = 0, Counter[int]()
    submit = engine.batcher.submit

    def count_begin(*given: Any) -> Any:
        begun[turn] += 1
        return submit(*given)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if begun.total() < 100:
            loop.call_soon(next_turn)

    monkeypatch.setattr(engine.batcher, "submit", count_begin)
    next_turn()
    await engine.predict_many([PredictRequest((7,), mode=Mode.WINDOW)] * 100)
    assert begun.total() == 100
    assert max(begun.values()) == BEGUN_AT_ONCE


async def test_short_requests_are_answered_during_long_ones(make_harness: MakeHarness) -> None:
    harness = make_harness(cost_model=Slow())
    engine, loop = harness.engine, asyncio.get_running_loop()
    await engine.create_session("s")
    with engine.backlog.share(1000, loop.time() + 1001):
        deadline = loop.time() + 20
        await engine.submit(StepRequest("s", (7,), deadline=deadline))
        await engine.submit(PredictRequest((7,), deadline=deadline))
        await engine.submit(PredictRequest(LONG, mode=Mode.WINDOW, deadline=deadline))
        await engine.score(ScoreRequest((7,) * 40, deadline=deadline))


async def test_a_request_past_its_deadline_fails_with_deadline_exceeded(make_harness: MakeHarness) -> None:
    engine = make_harness(cost_model=Slow()).engine
    with engine.backlog.share(1000, None), pytest.raises(DeadlineExceeded):
        await engine.submit(PredictRequest(LONG, mode=Mode.RECURRENT, deadline=asyncio.get_running_loop().time() - 1))


async def test_a_score_reports_its_progress(make_harness: MakeHarness) -> None:
    engine = make_harness(cost_model=Slow()).engine
    async with aclosing(await engine.scoring(ScoreRequest(LONG))) as scoring:
        left = [round(expected_s(engine.backlog) / engine.backlog.pace, 3) async for _ in scoring]
    assert sorted(set(left), reverse=True) == [0.768, 0.512, 0.256, 0.0]


async def closed_after_three_tokens(engine: Engine) -> None:
    async with aclosing(await engine.generate(GenerateRequest((7,), max_tokens=200))) as generation:
        for _ in range(3):
            await anext(generation)


async def score_closed_after_a_piece(engine: Engine) -> None:
    async with aclosing(await engine.scoring(ScoreRequest(LONG))) as scoring:
        await anext(scoring)


@pytest.mark.parametrize(
    ("ask", "expected_s"),
    [(closed_after_three_tokens, 0.202 * 2 / 200), (score_closed_after_a_piece, PIECE_TOKENS / 2 / 1e3)],
    ids=["generate", "score"],
)
async def test_a_stream_that_ends_early_counts_only_its_runs(
    make_harness: MakeHarness,
    ask: Callable[[Engine], Coroutine[Any, Any, None]],
    expected_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_harness(cost_model=Slow()).engine
    worked: list[float] = []
    monkeypatch.setattr(engine.backlog, "worked", lambda seconds, *_: worked.append(seconds))
    await ask(engine)
    assert sum(worked) == pytest.approx(expected_s)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_finished_request_counts_all_of_its_work(
    make_harness: MakeHarness, asked: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_harness(cost_model=Slow()).engine
    await engine.create_session("s")
    shares: list[Share] = []
    share = engine.backlog.share
    worked: list[float] = []

    @contextmanager
    def noted(seconds: float, deadline: float | None) -> Iterator[Share]:
        with share(seconds, deadline) as given:
            shares.append(given)
            yield given

    monkeypatch.setattr(engine.backlog, "share", noted)
    monkeypatch.setattr(engine.backlog, "worked", lambda seconds, *_: worked.append(seconds))
    await asked(engine, None)
    assert sum(worked) == pytest.approx(sum(one.seconds for one in shares))
    assert worked


async def test_a_replayed_step_counts_no_work(make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(cost_model=Slow()).engine
    await engine.create_session("s")
    await engine.submit(StepRequest("s", LONG, expected_position=0))
    worked: list[float] = []
    monkeypatch.setattr(engine.backlog, "worked", lambda seconds, *_: worked.append(seconds))
    answer = await engine.submit(StepRequest("s", LONG, expected_position=0))
    assert answer.replayed
    assert not worked


async def test_an_unread_stream_does_not_affect_the_pace_or_admission(
    make_harness: MakeHarness,
) -> None:
    engine, clock = make_harness(cost_model=Slow()).engine, Clock()
    engine.backlog = Backlog(lambda: None, clock)
    async with aclosing(await engine.generate(GenerateRequest((7,), max_tokens=1500))) as generation:
        for _ in range(1200):
            await anext(generation)
            clock.now_s += 100
        assert engine.backlog.pace < 1
        with engine.backlog.share(1000, clock() + 30):
            pass
