"""Tests that eager tasks wait, fail and are cancelled like an `asyncio.Task`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context

import pytest

from wane.service.aio.deadline import until
from wane.service.aio.eager import EagerTask, Waiter, current_task

NAME: ContextVar[str] = ContextVar("NAME")


class Waits:
    """Makes `awaitable`, an awaitable of the class that `kind` names. The method `end` gives it the result 7."""

    def __init__(self, kind: str) -> None:
        self._waiter = Waiter[int]()
        self._future = asyncio.get_running_loop().create_future()
        self.awaitable = self._make(kind)

    def _make(self, kind: str) -> Awaitable[int]:
        match kind:
            case "waiter":
                return self._waiter
            case "future":
                return self._future
            case "turn":
                return asyncio.sleep(0, 7)
            case "eager task":
                return EagerTask(self._wait())
            case _:
                return asyncio.create_task(self._wait())

    async def _wait(self) -> int:
        return await self._waiter

    def end(self) -> None:
        self._waiter.resolve(7)
        if not self._future.done():
            self._future.set_result(7)


KINDS = ["waiter", "future", "turn", "eager task", "task"]


@pytest.fixture(params=KINDS)
async def waits(request: pytest.FixtureRequest) -> Waits:
    return Waits(request.param)


async def add_one(number: Awaitable[int]) -> int:
    return 1 + await number


async def in_time(number: Awaitable[int]) -> int:
    with until(asyncio.get_running_loop().time() + 60):
        return 1 + await number


async def turns() -> None:
    """Runs all callbacks that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


# Results.


async def test_a_coroutine_that_never_waits_finishes_immediately() -> None:
    async def answer() -> int:
        return 7

    task = EagerTask(answer())
    assert task.done
    assert task.result() == 7


async def test_a_coroutine_resumes_in_the_call_that_resolves_its_waiter() -> None:
    waiter = Waiter[int]()
    task = EagerTask(add_one(waiter))
    assert not task.done
    waiter.resolve(7)
    assert task.done
    assert task.result() == 8


async def test_a_coroutine_waits_for_every_kind_of_awaitable(waits: Waits) -> None:
    task = EagerTask(add_one(waits.awaitable))
    assert not task.done
    waits.end()
    await turns()
    assert task.done and task.result() == 8


async def test_a_coroutine_may_wait_repeatedly() -> None:
    waiters = [Waiter[int]() for _ in range(3)]

    async def add() -> int:
        return sum([await waiter for waiter in waiters])

    task = EagerTask(add())
    for waiter in reversed(waiters):
        waiter.resolve(2)
    assert task.result() == 6


@pytest.mark.parametrize("wait", [False, True], ids=["at once", "later"])
async def test_an_asyncio_task_may_await_an_eager_task(wait: bool) -> None:
    waiter = Waiter[int]()
    eager = EagerTask(add_one(waiter))
    if not wait:
        waiter.resolve(7)
    task = asyncio.create_task(add_one(eager))
    await asyncio.sleep(0)
    waiter.resolve(7)
    assert await task == 9


async def test_an_eager_task_is_current_only_while_its_coroutine_runs() -> None:
    found: list[object] = []
    waiter, inner = Waiter[int](), Waiter[int]()

    async def note(one: Waiter[int]) -> None:
        found.append(current_task())
        await one
        found.append(current_task())

    async def nest() -> None:
        found.append(current_task())
        await EagerTask(note(inner))
        found.append(current_task())

    outer = EagerTask(nest())
    assert current_task() is None
    other = EagerTask(note(waiter))
    inner.resolve(1)
    waiter.resolve(1)
    assert current_task() is None
    first, second, third, fourth, fifth, sixth = found
    assert first is fifth is outer and second is fourth and second not in (outer, other, None)
    assert third is sixth is other


async def test_an_eager_task_may_have_its_own_context() -> None:
    waiter = Waiter[int]()

    async def rename() -> str:
        before = NAME.get()
        NAME.set("its own")
        await waiter
        return f"{before}, {NAME.get()}"

    NAME.set("its maker's")
    task = EagerTask(rename(), copy_context())
    assert NAME.get() == "its maker's"
    NAME.set("another")
    waiter.resolve(1)
    assert task.result() == "its maker's, its own"
    assert NAME.get() == "another"


# Callbacks.


async def test_a_waiter_calls_its_callback_once_and_immediately() -> None:
    called: list[str] = []
    waiter = Waiter[int]()
    waiter.on_done(lambda _: called.append("replaced"))
    waiter.on_done(lambda _: called.append("first"))
    waiter.resolve(7)
    waiter.resolve(8)
    waiter.fail(LookupError())
    assert (called, waiter.result()) == (["first"], 7)
    waiter.on_done(lambda _: called.append("late"))
    assert called == ["first", "late"]


async def test_a_cancelled_waiter_does_not_call_its_callback() -> None:
    called: list[str] = []
    waiter = Waiter[int]()
    waiter.on_done(lambda _: called.append("called"))
    waiter.cancel()
    waiter.resolve(7)
    assert waiter.done and not called


# Failures.


@pytest.mark.parametrize("later", [False, True])
async def test_a_failure_is_raised_where_the_result_is_awaited(later: bool) -> None:
    waiter = Waiter[int]()
    task = EagerTask(add_one(EagerTask(add_one(waiter))))
    waiting = asyncio.create_task(add_one(task)) if later else None
    await asyncio.sleep(0)
    waiter.fail(LookupError("there is none"))
    assert task.done
    with pytest.raises(LookupError, match="there is none"):
        await (waiting or task)


async def test_a_coroutine_continues_after_a_failure_that_it_catches() -> None:
    first, second = Waiter[int](), Waiter[int]()

    async def wait() -> int:
        try:
            return await first
        except LookupError:
            return await second

    task = EagerTask(wait())
    first.fail(LookupError())
    second.resolve(7)
    assert task.result() == 7


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_exception_that_ends_the_process_is_not_caught(error: type[BaseException]) -> None:
    waiter = Waiter[int]()

    async def wait() -> None:
        await waiter
        raise error

    task = EagerTask(wait())
    with pytest.raises(error):
        waiter.resolve(7)
    assert current_task() is None and not task.done


# Cancellation.


async def test_an_interrupt_is_raised_where_the_coroutine_waits(waits: Waits) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await waits.awaitable
        finally:
            ended.append("interrupted")

    task = EagerTask(wait())
    task.interrupt()
    assert task.done and ended == ["interrupted"]
    with pytest.raises(asyncio.CancelledError):
        task.result()
    waits.end()
    await turns()


async def test_an_interrupted_coroutine_may_wait_for_something_else(waits: Waits) -> None:
    other = Waiter[int]()

    async def wait() -> int:
        try:
            await waits.awaitable
        except asyncio.CancelledError:
            return await other
        raise AssertionError("the coroutine was not interrupted")

    task = EagerTask(wait())
    task.interrupt()
    waits.end()  # the coroutine now waits for `other`, so `end` does not resume it
    await turns()
    assert not task.done
    other.resolve(3)
    assert task.result() == 3


async def test_an_interrupt_cancels_the_callback_of_a_finished_future() -> None:
    future, other = asyncio.get_running_loop().create_future(), Waiter[int]()

    async def wait() -> int:
        try:
            await future
        except asyncio.CancelledError:
            return await other
        raise AssertionError("the coroutine was not interrupted")

    task = EagerTask(wait())
    future.set_result(7)
    task.interrupt()
    await turns()
    assert not task.done
    other.resolve(3)
    assert task.result() == 3


async def test_a_cancelled_task_interrupts_its_coroutine_without_a_callback(waits: Waits) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await waits.awaitable
        finally:
            ended.append("interrupted")

    task = EagerTask(wait())
    task.on_done(lambda _: ended.append("called back"))
    task.cancel()
    task.cancel()
    waits.end()
    await turns()
    assert task.done and ended == ["interrupted"]


async def test_a_cancelled_asyncio_task_interrupts_the_awaited_eager_task() -> None:
    waiter, interrupted = Waiter[int](), asyncio.Event()

    async def wait() -> None:
        try:
            await waiter
        finally:
            interrupted.set()

    async def wait_for(task: EagerTask[None]) -> None:
        await task

    waiting = asyncio.create_task(wait_for(EagerTask(wait())))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert interrupted.is_set()


async def test_a_coroutine_that_interrupts_its_own_task_continues() -> None:
    async def interrupt() -> int:
        task = current_task()
        assert task is not None
        task.interrupt()
        await asyncio.sleep(0)
        return 7

    task = EagerTask(interrupt())
    await turns()
    assert task.result() == 7


async def test_an_interrupt_of_a_finished_task_does_nothing() -> None:
    waiter = Waiter[int]()
    task = EagerTask(add_one(waiter))
    waiter.resolve(7)
    task.interrupt()
    assert task.result() == 8


# Reference cycles.


def succeed(waiter: Waiter[int], task: EagerTask[int]) -> None:
    waiter.resolve(7)
    assert task.result() == 9


def fail(waiter: Waiter[int], task: EagerTask[int]) -> None:
    waiter.fail(LookupError())
    with pytest.raises(LookupError):
        task.result()


def cancel(waiter: Waiter[int], task: EagerTask[int]) -> None:
    task.cancel()


@pytest.mark.parametrize("end", [succeed, fail, cancel])
async def test_a_finished_task_leaves_no_reference_cycle(
    end: Callable[[Waiter[int], EagerTask[int]], None],
) -> None:
    def run() -> None:
        waiter = Waiter[int]()
        end(waiter, EagerTask(add_one(EagerTask(in_time(waiter)))))

    run()  # the garbage of this call is not counted, because the first call also creates objects that later calls reuse
    while gc.collect():  # one collection may not free all garbage of earlier tests
        pass
    gc.disable()
    try:
        run()
        assert gc.collect() == 0
    finally:
        gc.enable()
