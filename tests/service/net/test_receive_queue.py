"""Tests of the queue of a WebSocket's messages, with eager tasks and with asyncio's own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from wane.service.aio.eager import EagerTask
from wane.service.errors import Abandoned
from wane.service.net.receive_queue import ReceiveQueue

MESSAGE: dict[str, Any] = {"type": "websocket.receive", "text": "{}"}
DISCONNECT: dict[str, Any] = {"type": "websocket.disconnect", "code": 1000}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[EagerTask, asyncio.ensure_future], ids=["eager task", "task"])
def run(request: pytest.FixtureRequest) -> Run:
    """A function that starts a coroutine and returns an awaitable of its result: `EagerTask`, or
    `asyncio.ensure_future`."""
    kind: Run = request.param
    return kind


@pytest.fixture
async def queue() -> ReceiveQueue:
    return ReceiveQueue(asyncio.get_running_loop())


async def test_a_disconnection_cancels_the_work(queue: ReceiveQueue, run: Run) -> None:
    async def work() -> None:
        with queue:
            await asyncio.Event().wait()

    working = run(work())
    await asyncio.sleep(0)
    queue.put_nowait(DISCONNECT)
    with pytest.raises(Abandoned):
        await working


async def test_work_may_continue_for_a_grace_period_after_a_disconnection(queue: ReceiveQueue, run: Run) -> None:
    async def work() -> object:
        assert await queue.get() is MESSAGE
        with queue:
            await asyncio.sleep(0)
        with pytest.raises(Abandoned), queue:
            await asyncio.Event().wait()
        return await queue.get()

    queue.put_nowait(MESSAGE)
    queue.put_nowait(DISCONNECT)
    assert await run(work()) is DISCONNECT


async def test_a_cancellation_by_another_caller_is_not_a_disconnection(queue: ReceiveQueue) -> None:
    async def work() -> None:
        with queue:
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_messages_are_read_in_order(queue: ReceiveQueue, run: Run) -> None:
    async def take() -> list[object]:
        return [(await queue.get())["number"] for _ in range(4)]

    taking = run(take())
    await asyncio.sleep(0)
    queue.put_nowait({**MESSAGE, "number": 0})
    queue.put_now({**MESSAGE, "number": 1})
    queue.put_nowait({**MESSAGE, "number": 2})
    assert 1 <= len(queue) <= 3
    queue.put_nowait({**MESSAGE, "number": 3})
    assert await taking == [0, 1, 2, 3]
    assert queue.empty()


async def test_put_now_resumes_the_reader_immediately(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_now(MESSAGE)
    assert reading.done and reading.result() is MESSAGE


async def test_put_nowait_resumes_the_reader_in_the_next_turn_of_the_event_loop(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_nowait(MESSAGE)
    assert not reading.done
    await asyncio.sleep(0)
    assert reading.done and reading.result() is MESSAGE


async def test_a_message_for_an_interrupted_reader_is_kept_for_the_next_reader(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_nowait(MESSAGE)
    reading.interrupt()
    await asyncio.sleep(0)
    assert await queue.get() is MESSAGE
