"""Tests of deadlines and disconnections, with eager tasks and with asyncio's own tasks. A deadline or a disconnection
ends only the body of the `with` statement that watches for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.service.alone import alone
from wane.service.aio.deadline import until
from wane.service.aio.eager import EagerTask, Waiter
from wane.service.aio.interrupt import Interrupt
from wane.service.errors import DeadlineExceeded

Run = Callable[[Coroutine[Any, Any, Any]], Any]
HOUR_S = 3600.0


@pytest.fixture(params=[EagerTask, asyncio.ensure_future], ids=["eager task", "task"])
def run(request: pytest.FixtureRequest) -> Run:
    """A function that starts a coroutine and returns an awaitable of its result: `EagerTask`, or
    `asyncio.ensure_future`."""
    kind: Run = request.param
    return kind


def now() -> float:
    return asyncio.get_running_loop().time()


async def turns() -> None:
    """Runs all callbacks that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


class Ended(Exception):
    """The error that `interruptible` raises if its interrupt has ended the body of the `with` statement."""


class interruptible:  # noqa: N801  (read as `with interruptible(...)`)
    """A context manager. Appends a new interrupt to `made`. Raises Ended if this interrupt ends the body of the `with`
    statement."""

    def __init__(self, made: list[Interrupt]) -> None:
        self._made = made

    def __enter__(self) -> None:
        self._made.append(Interrupt())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._made[-1].ended(kind):
            raise Ended


async def test_an_interrupt_ends_a_body_at_its_await(run: Run) -> None:
    made: list[Interrupt] = []

    async def body() -> None:
        with interruptible(made):
            await Waiter[None]()

    task = run(body())
    await turns()
    made[0].fire()
    with pytest.raises(Ended):
        await task


async def test_a_task_may_be_interrupted_repeatedly(run: Run) -> None:
    made: list[Interrupt] = []

    async def body() -> int:
        for _ in range(2):
            with pytest.raises(Ended), interruptible(made):
                await Waiter[None]()
        await asyncio.sleep(0)
        return 7

    task = run(body())
    for index in range(2):
        await turns()
        made[index].fire()
    assert await task == 7


async def test_an_interrupt_after_the_body_does_nothing(run: Run) -> None:
    made: list[Interrupt] = []
    waiter = Waiter[int]()

    async def body() -> int:
        with interruptible(made):
            pass
        return await waiter

    task = run(body())
    await turns()
    made[0].fire()
    waiter.resolve(7)
    assert await task == 7


async def test_an_interrupt_that_the_body_catches_is_not_raised(run: Run) -> None:
    made: list[Interrupt] = []

    async def body() -> int:
        with interruptible(made):
            try:
                await Waiter[None]()
            except asyncio.CancelledError:
                return 7
        raise AssertionError("the coroutine was not interrupted")

    task = run(body())
    await turns()
    made[0].fire()
    assert await task == 7


async def test_an_interrupted_body_may_raise_its_own_error(run: Run) -> None:
    made: list[Interrupt] = []

    async def body() -> None:
        with interruptible(made):
            try:
                await Waiter[None]()
            finally:
                raise LookupError

    task = run(body())
    await turns()
    made[0].fire()
    with pytest.raises(LookupError):
        await task


async def test_a_cancellation_by_another_caller_is_not_an_interrupt() -> None:
    made: list[Interrupt] = []

    async def body() -> None:
        with interruptible(made):
            await Waiter[None]()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    eager = EagerTask(body())
    eager.interrupt()
    with pytest.raises(asyncio.CancelledError):
        eager.result()


async def test_a_cancellation_together_with_an_interrupt_is_a_cancellation() -> None:
    made: list[Interrupt] = []

    async def body() -> None:
        with interruptible(made):
            await Waiter[None]()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    made[0].fire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Deadlines.


async def test_a_deadline_ends_a_body_at_its_await(run: Run, travel: Callable[[float], None]) -> None:
    async def body() -> None:
        with until(now() + HOUR_S, "too late"):
            await Waiter[None]()

    task = run(body())
    await turns()
    travel(2 * HOUR_S)
    with pytest.raises(DeadlineExceeded, match="too late"):
        await task


async def test_a_deadline_that_has_passed_ends_the_first_wait(run: Run) -> None:
    async def body() -> None:
        with until(now() - 1):
            await Waiter[None]()

    with pytest.raises(DeadlineExceeded):
        await run(body())


async def test_a_deadline_that_passes_after_the_body_and_a_missing_deadline_have_no_effect(
    run: Run, travel: Callable[[float], None]
) -> None:
    async def body() -> int:
        for deadline in (now() + HOUR_S, None):
            with until(deadline):
                await asyncio.sleep(0)
        return 7

    task = run(body())
    await turns()
    travel(2 * HOUR_S)
    assert await task == 7


@pytest.mark.parametrize("outer_first", [True, False])
async def test_the_earliest_of_nested_deadlines_raises(
    run: Run, travel: Callable[[float], None], outer_first: bool
) -> None:
    caught: list[str] = []

    async def body() -> None:
        sooner, later = now() + HOUR_S, now() + 10 * HOUR_S
        with until(sooner if outer_first else later, "outer"):
            try:
                with until(later if outer_first else sooner, "inner"):
                    await Waiter[None]()
            except DeadlineExceeded as error:
                caught.append(str(error))

    task = run(body())
    await turns()
    travel(2 * HOUR_S)
    if outer_first:
        with pytest.raises(DeadlineExceeded, match="outer"):
            await task
        assert caught == []
    else:
        await task
        assert caught == ["inner"]


async def test_a_cancellation_within_a_deadline_is_a_cancellation(travel: Callable[[float], None]) -> None:
    async def body() -> None:
        with until(now() + HOUR_S), until(now() + 10 * HOUR_S):
            await Waiter[None]()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    eager = EagerTask(body())
    eager.interrupt()
    with pytest.raises(asyncio.CancelledError):
        eager.result()
    travel(20 * HOUR_S)
    await turns()
    assert eager.done


async def test_a_deadline_and_an_interrupt_together_end_the_body_once(
    run: Run, travel: Callable[[float], None]
) -> None:
    made: list[Interrupt] = []

    async def body() -> int:
        try:
            with interruptible(made), until(now() + HOUR_S):
                await Waiter[None]()
        except (Ended, DeadlineExceeded):
            await asyncio.sleep(0)
            return 7
        raise AssertionError("neither the deadline nor the interrupt ended the body")

    task = run(body())
    await turns()
    travel(2 * HOUR_S)
    made[0].fire()
    assert await task == 7


async def meet_deadlines() -> None:
    """Runs ten `with` statements, each with a deadline one minute ahead. Each body finishes before its deadline."""
    gc.collect()
    for _ in range(10):
        with until(now() + 60):
            pass
    assert gc.collect() == 0


def test_a_deadline_that_is_met_leaves_no_reference_cycle() -> None:
    alone(meet_deadlines)
