"""Tests of coarse timers, which may fire a little late."""

from __future__ import annotations

import asyncio

import pytest

from wane.service.aio.timers import Timers, timers


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_timers_fire_once_and_in_order() -> None:
    rung: list[str] = []
    done = asyncio.Event()
    timers().at(now() + 0.05, done.set)
    timers().at(now() + 0.03, lambda: rung.append("second"))
    timers().at(now(), lambda: rung.append("first"))
    await done.wait()
    assert rung == ["first", "second"]


async def test_a_failing_timer_does_not_stop_the_others() -> None:
    loop, failed = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, what: failed.append(what["exception"]))
    rung: list[int] = []
    done = asyncio.Event()

    def fail() -> None:
        raise RuntimeError("a failing timer")

    def ring() -> None:
        rung.append(1)
        if len(rung) == 4:
            done.set()

    when = now()
    for each in (ring, fail, ring, fail, ring, fail, ring):
        timers().at(when, each)
    await asyncio.wait_for(done.wait(), 120)
    while len(failed) < 3:  # noqa: ASYNC110  (the failing timers may be the last to fire)
        await asyncio.sleep(0)
    assert [type(error) for error in failed] == [RuntimeError] * 3


async def test_a_cancelled_timer_does_not_fire() -> None:
    rung: list[str] = []
    done = asyncio.Event()
    when = now() + 0.01
    timer = timers().at(when, lambda: rung.append("never"))
    timers().at(when + 0.02, done.set)
    timer.cancel()
    await done.wait()
    timer.cancel()  # a second cancel has no effect
    assert rung == []


async def test_a_timer_may_cancel_another_timer_of_the_same_time_and_set_a_new_timer() -> None:
    mine = Timers(asyncio.get_running_loop())
    rung: list[int] = []
    done = asyncio.Event()
    when = now()

    def ring(number: int) -> None:
        rung.append(number)
        pair[1 - number].cancel()
        mine.at(when, done.set)

    pair = [mine.at(when, lambda number=number: ring(number)) for number in (0, 1)]  # type: ignore[misc]
    await done.wait()
    assert len(rung) == 1


async def test_timers_for_the_same_time_share_a_timer_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    monkeypatch.setattr(loop, "call_at", lambda when, *_: timers.append(when))
    mine, when = Timers(asyncio.get_running_loop()), now() + 1
    for _ in range(100):
        mine.at(when, lambda: None)
    assert len(timers) == 1 and when <= timers[0] <= when + 0.0101


@pytest.mark.parametrize("seconds", [30.0, 300.0, 86_400.0])
async def test_long_delays_share_timers_of_the_event_loop_within_their_tolerance(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    timers: list[float] = []
    monkeypatch.setattr(loop, "call_at", lambda when, *_: timers.append(when))
    mine = Timers(asyncio.get_running_loop())
    for index in range(2000):
        began_s = now()
        when = began_s + seconds * (1 + index / 2000)
        mine.at(when, lambda: None).cancel()
        late = [timer - when for timer in timers if timer >= when]
        assert late and min(late) <= (when - began_s) / 64 + 0.0101
    assert len(timers) <= 200
