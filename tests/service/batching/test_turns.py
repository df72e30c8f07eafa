"""Tests of the work that all callers may do in one turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from wane.service.batching.turns import TOKENS_A_TURN, Turns


@pytest.mark.parametrize(
    ("tokens", "in_a_turn"), [(TOKENS_A_TURN // 4, 4), (TOKENS_A_TURN // 2, 2), (TOKENS_A_TURN, 1), (10**6, 1)]
)
async def test_the_work_of_one_turn_is_limited(tokens: int, in_a_turn: int) -> None:
    turns, turn, began = Turns(), 0, list[int]()

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async def work() -> None:
        await turns.take(tokens)
        began.append(turn)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work() for _ in range(8)))
    counting.cancel()
    assert len(began) == 8
    assert max(map(began.count, began)) == in_a_turn


async def test_a_cancelled_caller_does_not_stop_the_others() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take(10**6)) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False, False]


@pytest.mark.parametrize(
    ("tokens", "callers", "begun"), [(0, 256, 10**6), (TOKENS_A_TURN // 2, 4, 1), (TOKENS_A_TURN, 256, 10**6)]
)
async def test_small_work_does_not_wait_behind_large_work(tokens: int, callers: int, begun: int) -> None:
    turns = Turns()
    large = [asyncio.create_task(turns.take(size)) for size in (begun, *[10**6] * callers)]
    small = asyncio.create_task(turns.take(tokens))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert small.done() and not large[-1].done()
    await asyncio.gather(*large)


async def test_small_work_does_not_starve_large_work() -> None:
    turns = Turns()
    await turns.take(1)
    large = asyncio.create_task(turns.take(10**6))
    for _ in range(4):
        await asyncio.sleep(0)
        small = asyncio.create_task(turns.take(1))
    assert large.done()
    await small
