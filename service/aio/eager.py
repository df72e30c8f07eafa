"""Waits for results without an `asyncio.Task`.

An `asyncio.Task` starts one turn of the event loop after its creation, and resumes one turn after its result is ready.
Most requests wait for one batch only. An `EagerTask` starts at once, and resumes in the call that resolves its
`Waiter`. A coroutine that never waits is finished when `EagerTask` returns.

Both kinds of task run the same coroutines, except those that need the current `asyncio.Task`, like `asyncio.timeout`
and `asyncio.TaskGroup`. `until` (`service/aio/deadline.py`) works in both.
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
    """The `EagerTask` whose coroutine runs now on this thread."""

    task: EagerTask[Any] | None = None


_running = _Running()


def current_task() -> EagerTask[Any] | None:
    """Returns the `EagerTask` whose coroutine runs now; None in any other task."""
    return _running.task


class Waiter(Generic[T]):
    """A result that one caller waits for, with `await` or a callback. Call its methods on the event loop's thread only.

    Unlike a future it calls back at once. An `asyncio.Task` that awaits it resumes one turn of the event loop later.
    """

    __slots__ = ("_callback", "_error", "_result", "done")

    def __init__(self) -> None:
        self._callback: Callable[[Waiter[Any]], object] | None = None
        self._error: BaseException | None = None
        self._result: T | None = None
        self.done = False

    def resolve(self, result: T) -> None:
        """Sets the result. Does nothing if it is done or cancelled."""
        if not self.done:
            self._result = result
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Like `resolve`, with an exception that `await` raises."""
        if not self.done:
            self._error = error
            self._finish()

    def cancel(self) -> None:
        """Drops the callback, and a later result."""
        self._callback = None
        self.done = True

    def on_done(self, callback: Callable[[Waiter[T]], object]) -> None:
        """Calls `callback` once with this waiter when the result is ready, or at once if it is. Replaces an earlier
        callback."""
        if self.done:
            callback(self)
        else:
            self._callback = callback

    def result(self) -> T:
        """Returns the result, or raises the error. Call it once."""
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
    if not future.done():  # else the task that waited was cancelled
        future.set_result(None)


class EagerTask(Waiter[T]):
    """Runs a coroutine at once, and resumes it in the calls that resolve its waiters."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        """`context`: the coroutine's context variables. Default: those of the code that resumes it."""
        self._callback = self._error = self._result = None
        self.done = False
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._context = context
        self._waits_for: Waiter[Any] | asyncio.Future[Any] | asyncio.Handle | None = None
        self._run(coroutine.send, None)

    def cancel(self) -> None:
        """Drops the callback, and raises CancelledError at the coroutine's `await`."""
        super().cancel()
        self.interrupt()

    def interrupt(self) -> None:
        """Raises CancelledError at the coroutine's `await`."""
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is None or self._coroutine is None:  # the coroutine has ended, or is running now
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
        """Resumes the coroutine. Does nothing if it was interrupted meanwhile."""
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
            error = raised.with_traceback(raised.__traceback__.tb_next)  # without this frame, which holds the error
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
        else:  # the process must end
            raise error

    def _wait(self, found: Waiter[Any] | asyncio.Future[Any] | None) -> None:
        if isinstance(found, Waiter):
            found._callback = self._go_on
            self._waits_for = found
        elif found is None:  # asyncio.sleep(0)
            self._waits_for = asyncio.get_running_loop().call_soon(self._go_on, None)
        else:
            found._asyncio_future_blocking = False
            found.add_done_callback(self._go_on)
            self._waits_for = found
