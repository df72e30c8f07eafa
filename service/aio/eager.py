"""Waits for results without an `asyncio.Task`.

An `asyncio.Task` starts one iteration of the event loop after its creation. It resumes one iteration after the result
that it waits for is ready. These delays matter, because most requests wait for one batch only. An `EagerTask` starts
within its constructor, and resumes within the call that resolves its `Waiter`. A coroutine that never waits is finished
when the constructor returns.

An `EagerTask` can run any coroutine that does not need the current `asyncio.Task`. `asyncio.timeout` and
`asyncio.TaskGroup` need the current `asyncio.Task`. `until` (`service/aio/deadline.py`) works in both kinds of task.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Running(threading.local):
    """The `EagerTask` whose coroutine is running on this thread."""

    task: EagerTask[Any] | None = None


_running = _Running()


def current_task() -> EagerTask[Any] | None:
    """Returns the `EagerTask` whose coroutine is running. Returns None if no `EagerTask` is running."""
    return _running.task


class Waiter(Generic[T]):
    """A result for which one caller waits, with `await` or a callback. Call its methods on the event loop's thread
    only.

    Unlike a future, a waiter calls the callback within `resolve`. An `asyncio.Task` that awaits a waiter resumes one
    iteration of the event loop later.
    """

    __slots__ = ("_callback", "_error", "_result", "done")

    def __init__(self) -> None:
        self._callback: Callable[[Waiter[Any]], object] | None = None
        self._error: BaseException | None = None
        self._result: T | None = None
        self.done = False

    def resolve(self, result: T) -> None:
        """Sets the result. Does nothing if the waiter is done or cancelled."""
        if not self.done:
            self._result = result
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Sets an exception, which `await` raises. Does nothing if the waiter is done or cancelled."""
        if not self.done:
            self._error = error
            self._finish()

    def cancel(self) -> None:
        """Cancels the wait: drops the callback, and ignores a later result."""
        self._callback = None
        self.done = True

    def on_done(self, callback: Callable[[Waiter[T]], object]) -> None:
        """Calls `callback` once with this waiter when the result is ready. Calls it immediately if the result is ready
        already. Replaces an earlier callback."""
        if self.done:
            callback(self)
        else:
            self._callback = callback

    def result(self) -> T:
        """Returns the result, or raises the exception. Call this at most once."""
        error, self._error = self._error, None
        if error is None:
            return self._result  # type: ignore[return-value]  # it is set
        try:
            raise error
        finally:
            del error, self  # breaks a reference cycle through the traceback

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            try:
                if _running.task is not None:
                    yield self
                else:
                    future = asyncio.get_running_loop().create_future()
                    self._callback = partial(_set, future)
                    yield from future
            except BaseException:
                self.cancel()
                raise
        return self.result()

    def _finish(self) -> None:
        self.done = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)


def _set(future: asyncio.Future[None], _: object) -> None:
    if not future.done():  # if the future is done, the waiting task was cancelled
        future.set_result(None)


class EagerTask(Waiter[T]):
    """Runs a coroutine immediately. Resumes the coroutine within the call that resolves the `Waiter` that the coroutine
    awaits."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        """`context` has the coroutine's context variables. If it is None, the coroutine runs in the context of the code
        that resumes the coroutine."""
        self._callback = self._error = self._result = None
        self.done = False
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._context = context
        self._waits_for: Waiter[Any] | asyncio.Future[Any] | asyncio.Handle | None = None
        self._run(coroutine.send, None)

    def cancel(self) -> None:
        """Drops the callback of this task, and raises CancelledError at the coroutine's `await`."""
        super().cancel()
        self.interrupt()

    def interrupt(self) -> None:
        """Raises CancelledError at the coroutine's `await`."""
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is None or self._coroutine is None:  # the coroutine has ended or is running
            return
        if isinstance(waits_for, asyncio.Future):
            waits_for.remove_done_callback(self._go_on)
            waits_for.cancel()
        elif isinstance(waits_for, asyncio.Handle):
            waits_for.cancel()
        else:
            waits_for._callback = None
        self._run(self._coroutine.throw, asyncio.CancelledError())

    def _go_on(self, ready: Waiter[Any] | asyncio.Future[Any] | None) -> None:
        """Resumes the coroutine, unless the coroutine was interrupted while it waited."""
        if self._coroutine is not None and (ready is None or ready is self._waits_for):
            self._waits_for = None
            self._run(self._coroutine.send, None)

    def _run(self, call: Callable[[Any], Any], value: object) -> None:
        """Runs the coroutine until it waits or ends."""
        before, _running.task = _running.task, self
        error: BaseException | None = None
        try:
            found = call(value) if self._context is None else self._context.run(call, value)
        except StopIteration as end:
            result = end.value
        except BaseException as raised:
            assert raised.__traceback__ is not None
            # removes this frame from the traceback, because the frame refers to the error
            error = raised.with_traceback(raised.__traceback__.tb_next)
        else:
            self._wait(found)
            return
        finally:
            _running.task = before
        self._coroutine = None
        if error is None:
            if not self.done:
                self._result = result
                self._finish()
        elif isinstance(error, Exception | asyncio.CancelledError):
            self.fail(error)
        else:  # KeyboardInterrupt and SystemExit must end the process
            raise error

    def _wait(self, found: Waiter[Any] | asyncio.Future[Any] | None) -> None:
        if isinstance(found, Waiter):
            found._callback = self._go_on
            self._waits_for = found
        elif found is None:  # a `yield` without a value, for example from asyncio.sleep(0)
            self._waits_for = asyncio.get_running_loop().call_soon(self._go_on, None)
        else:
            found._asyncio_future_blocking = False
            found.add_done_callback(self._go_on)
            self._waits_for = found
