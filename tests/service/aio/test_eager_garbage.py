"""Coroutines that run without a task: what they leave behind, and whose context they see."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from wane.service.aio.deadline import until
from wane.service.aio.eager import EagerTask, Waiter
from wane.service.errors import InvalidRequest


@contextmanager
def without_collector() -> Iterator[None]:
    """Fails where the body leaves something that only the garbage collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()


async def caught(task: Callable[[], EagerTask[None]]) -> None:
    """Waits for a task, which fails or is cancelled."""
    try:
        await task()
    except (InvalidRequest, asyncio.CancelledError):
        return
    raise AssertionError("the task did not fail")


async def raises(waiter: Waiter[None]) -> None:
    await waiter
    raise InvalidRequest("no")


async def waits(waiter: Waiter[None]) -> None:
    with until(asyncio.get_running_loop().time() + 60.0):
        await waiter


def raise_in_the_coroutine() -> None:
    waiter: Waiter[None] = Waiter()
    task = EagerTask(caught(lambda: EagerTask(raises(waiter))))
    waiter.resolve(None)
    assert task.done


def fail_what_it_waits_for() -> None:
    waiter: Waiter[None] = Waiter()
    task = EagerTask(caught(lambda: EagerTask(waits(waiter))))
    waiter.fail(InvalidRequest("no"))
    assert task.done


def interrupt_it() -> None:
    waiter: Waiter[None] = Waiter()
    task = EagerTask(caught(lambda: EagerTask(waits(waiter))))
    task.interrupt()
    assert task.done


def cancel_it() -> None:
    waiter: Waiter[None] = Waiter()
    EagerTask(waits(waiter)).cancel()


@pytest.mark.parametrize("end", [raise_in_the_coroutine, fail_what_it_waits_for, interrupt_it, cancel_it])
async def test_a_task_that_fails_leaves_nothing_for_the_garbage_collector(end: Callable[[], None]) -> None:
    end()  # what is made once
    with without_collector():
        end()
