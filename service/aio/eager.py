"""Results that are waited for without an `asyncio.Task`.

A task begins one turn of the event loop after it was made, and goes on one turn after what it waits for is there. Most
requests wait for one batch and for nothing else. An `EagerTask` begins at once, and goes on as soon as the `Waiter`
that it waits for is resolved: in the same call. A coroutine that never waits is over when `EagerTask` returns.

Coroutines are run by either, unchanged, but for what asks for the current `asyncio.Task`: `asyncio.timeout` and
`asyncio.TaskGroup` do. `until` (`service/aio/deadline.py`) works in both.
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
    """The `EagerTask` whose coroutine runs now, on this thread."""

    task: EagerTask[Any] | None = None


_running = _Running()


def current_task() -> EagerTask[Any] | None:
    """The `EagerTask` whose coroutine runs now; None where another task's does."""
    return _running.task


class Waiter(Generic[T]):
    """A result that one caller waits for, by `await` or by a callback. All methods belong to the event loop's thread.

    Unlike a future it calls back at once. Awaited by a task, it resumes the task one turn of the event loop later.
    """

    __slots__ = ("_callback", "_error", "_result", "done")

    def __init__(self) -> None:
        self._callback: Callable[[Waiter[Any]], object] | None = None
        self._error: BaseException | None = None
        self._result: T | None = None
        self.done = False

    def resolve(self, result: T) -> None:
        """Sets the result. Does nothing where there is one, or the caller has left."""
        if not self.done:
            self._result = result
            self._finish()

    def fail(self, error: BaseException) -> None:
        """As `resolve`, with what `await` raises."""
        if not self.done:
            self._error = error
            self._finish()

    def cancel(self) -> None:
        """The caller has left. Drops a later result, and calls nobody back."""
        self._callback = None
        self.done = True

    def on_done(self, callback: Callable[[Waiter[T]], object]) -> None:
        """Calls back once with this, when the result is there; at once where it is. Takes the place of an earlier
        callback."""
        if self.done:
            callback(self)
        else:
            self._callback = callback

    def result(self) -> T:
        """Returns the result, or raises the error; to be called once."""
        error, self._error = self._error, None
        if error is None:
            return self._result  # type: ignore[return-value]  # it is there
        try:
            raise error
        finally:
            del error, self  # they hold each other through the traceback

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
    """Runs a coroutine, from its beginning on, in the calls that make its results ready."""

    __slots__ = ("_context", "_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> None:
        """`context`: the coroutine's own context variables. Without one it sees those of the code that resumes it."""
        self._callback = self._error = self._result = None
        self.done = False
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._context = context
        self._waits_for: Waiter[Any] | asyncio.Future[Any] | asyncio.Handle | None = None
        self._run(coroutine.send, None)

    def cancel(self) -> None:
        """The caller has left: raises CancelledError in the coroutine, where it waits."""
        super().cancel()
        self.interrupt()

    def interrupt(self) -> None:
        """Raises CancelledError in the coroutine, where it waits."""
        waits_for, self._waits_for = self._waits_for, None
        if waits_for is None or self._coroutine is None:  # it is over, or is running right now
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
        """What the coroutine waits for is there. Does nothing where it was interrupted meanwhile."""
        if self._coroutine is not None and (ready is None or ready is self._waits_for):
            self._waits_for = None
            self._run(self._coroutine.send, None)

    def _run(self, call: Callable[[Any], Any], value: object) -> None:
        """Runs the coroutine until it waits, or is over."""
        before, _running.task = _running.task, self
        error: BaseException | None = None
        try:
            found = call(value) if self._context is None else self._context.run(call, value)
        except StopIteration as end:
            result = end.value
        except BaseException as raised:
            assert raised.__traceback__ is not None
            error = raised.with_traceback(raised.__traceback__.tb_next)  # without this call, which holds the error
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
        else:  # the process is to end
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
