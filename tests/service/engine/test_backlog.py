"""Long requests are let in if they can be over by their deadlines; the others are refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing

import pytest

from models.manifest import Role
from service.engine.backlog import LONG_S, MARGIN, MEASURED_S, NEWEST, Backlog, Share
from service.engine.engine import Engine
from service.engine.forward import PIECE_TOKENS
from service.engine.mode import Mode
from service.engine.requests import CompareRequest, GenerateRequest, PredictRequest, ScoreRequest, StepRequest
from service.errors import DeadlineExceeded, Overloaded
from tests.service.engine.fakes import Bench, Clock, LinearCosts

MakeBench = Callable[..., Bench]


class Stage:
    """A backlog, and the requests that were let in and are not over."""

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


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.held.close()
    assert stage.backlog.seconds == 0


def test_as_many_are_let_in_as_can_be_over_in_time_and_the_others_are_told_when_to_come_again(stage: Stage) -> None:
    for _ in range(4):
        stage.enter(6, 30)
    with pytest.raises(Overloaded, match=r"6\.0 s, and 30\.0 s beside .* deadline is in 30\.0 s") as refused:
        stage.enter(6, 30)
    assert refused.value.retry_after_s == MARGIN * 30 - 30
    assert stage.refused == 1
    assert stage.backlog.seconds == 24


def test_a_request_that_finds_no_other_is_let_in_however_long_it_is_expected_to_take(stage: Stage) -> None:
    stage.enter(1000, 30)


def test_one_that_would_make_another_late_is_refused_and_one_that_is_late_anyway_holds_up_nobody(stage: Stage) -> None:
    stage.enter(10, 15)
    with pytest.raises(Overloaded, match="one that was let in before it would miss its deadline") as refused:
        stage.enter(6, None)
    assert refused.value.retry_after_s == 10
    stage.enter(1, None)
    stage.held.close()
    stage.enter(100, 30)
    stage.enter(6, 30)


def test_a_short_request_is_neither_refused_nor_counted(stage: Stage) -> None:
    stage.enter(10, 12)
    for _ in range(1000):
        stage.enter(LONG_S / 2, 1)
    assert stage.backlog.seconds == 10


def test_a_shorter_one_is_over_before_the_longer_ones_are(stage: Stage) -> None:
    for _ in range(2):
        stage.enter(10, None)
    stage.enter(1, MARGIN * 3 + 0.01)  # three take turns until it is over
    with pytest.raises(Overloaded):
        stage.enter(1, MARGIN * 3)


def test_what_is_done_is_expected_no_more(stage: Stage) -> None:
    first = stage.enter(20, 30)
    with pytest.raises(Overloaded):
        stage.enter(10, 30)
    stage.clock.now_s += 10
    first.progress(0.5)
    assert stage.backlog.seconds == 10
    first.progress(0.25)  # what was done stays done
    assert stage.backlog.seconds == 10
    stage.enter(4, 30)


def test_what_takes_longer_than_expected_makes_the_others_expected_to(stage: Stage) -> None:
    first = stage.enter(10, None)
    stage.clock.now_s += 3 * MEASURED_S
    first.progress(MEASURED_S / 10)
    assert stage.backlog.seconds == pytest.approx((1 + NEWEST * 2) * (10 - MEASURED_S))
    with pytest.raises(Overloaded):
        stage.enter(5, MARGIN * 14)


def test_a_request_that_fails_leaves_nothing_behind(stage: Stage) -> None:
    with pytest.raises(KeyError), stage.backlog.share(10, None):
        raise KeyError
    assert stage.backlog.seconds == 0


class Slow(LinearCosts):
    """Every run takes a millisecond a token."""

    def run(self, role: Role, tokens: int) -> float:
        return tokens / 1e3


LONG = (7,) * (2 * PIECE_TOKENS)
Ask = Callable[[Engine, float | None], Awaitable[object]]


async def streamed(engine: Engine, deadline: float | None) -> None:
    async with aclosing(await engine.generate(GenerateRequest((7,), max_tokens=200, deadline=deadline))) as generation:
        async for _ in generation:
            pass


ASKED: dict[str, Ask] = {
    "score": lambda engine, deadline: engine.score(ScoreRequest(LONG, deadline=deadline)),
    "predict": lambda engine, deadline: engine.predict(PredictRequest(LONG, Mode.RECURRENT, deadline=deadline)),
    "auto": lambda engine, deadline: engine.predict(PredictRequest(LONG, deadline=deadline)),
    "both": lambda engine, deadline: engine.predict(PredictRequest(LONG, Mode.BOTH, deadline=deadline)),
    "generate": streamed,
    "compare": lambda engine, deadline: engine.compare(CompareRequest((7,), (8, 16), 20, deadline)),
    "step": lambda engine, deadline: engine.step(StepRequest("s", LONG, deadline=deadline)),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_every_long_request_is_counted_while_it_lasts_and_refused_if_it_would_be_late(
    make_bench: MakeBench, asked: Ask
) -> None:
    bench = make_bench(costs=Slow())
    engine, runner, loop = bench.engine, bench.runner, asyncio.get_running_loop()
    await engine.create_session("s")
    runner.gate.clear()
    first = asyncio.create_task(asked(engine, None))
    await runner.until_busy()
    left_s = engine._backlog.seconds
    assert left_s >= 0.2
    calls = len(runner.calls)
    with pytest.raises(Overloaded, match="expected to take") as refused:
        await asked(engine, loop.time() + 0.1)
    assert refused.value.retry_after_s > 0
    assert bench.sample("wane_refused_items_total") == 1
    assert len(runner.calls) == calls, "nothing was run for what was refused"
    runner.gate.set()
    await first
    assert engine._backlog.seconds == 0


async def test_a_batch_s_inputs_are_let_in_or_refused_each_on_its_own(make_bench: MakeBench) -> None:
    engine = make_bench(costs=Slow()).engine
    deadline = asyncio.get_running_loop().time() + 3.2 * MARGIN
    asked = [PredictRequest(LONG, Mode.RECURRENT, deadline=deadline)] * 6
    answered = await engine.predict_many(asked)
    assert [isinstance(one, Overloaded) for one in answered] == [False] * 3 + [True] * 3


async def test_what_is_short_is_answered_beside_what_is_long(make_bench: MakeBench) -> None:
    bench = make_bench(costs=Slow())
    engine, loop = bench.engine, asyncio.get_running_loop()
    await engine.create_session("s")
    with engine._backlog.share(1000, loop.time() + 1001):
        deadline = loop.time() + 20
        await engine.step(StepRequest("s", (7,), deadline=deadline))
        await engine.predict(PredictRequest((7,), deadline=deadline))
        await engine.predict(PredictRequest(LONG, Mode.WINDOW, deadline=deadline))
        await engine.score(ScoreRequest((7,) * 40, deadline=deadline))


async def test_a_request_whose_deadline_has_passed_is_told_so(make_bench: MakeBench) -> None:
    engine = make_bench(costs=Slow()).engine
    with engine._backlog.share(1000, None), pytest.raises(DeadlineExceeded):
        await engine.predict(PredictRequest(LONG, Mode.RECURRENT, deadline=asyncio.get_running_loop().time() - 1))


async def test_a_score_tells_how_far_it_is(make_bench: MakeBench) -> None:
    engine = make_bench(costs=Slow()).engine
    async with aclosing(await engine.scoring(ScoreRequest(LONG))) as scoring:
        left = [round(engine._backlog.seconds / engine._backlog._pace, 3) async for _ in scoring]
    assert sorted(set(left), reverse=True) == [0.768, 0.512, 0.256, 0.0]
