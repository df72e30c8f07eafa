"""Cancels the body of a `with` statement from outside, at a deadline or when the client disconnects."""

from __future__ import annotations

import asyncio

from wane.service.aio.eager import EagerTask, current_task


class Interrupt:
    """Raises CancelledError in the body of a `with`, and distinguishes this cancellation from others.

    Create the interrupt in the task that runs the body. The task may be an `asyncio.Task` or an `EagerTask`.
    """

    __slots__ = ("_cancelled_before", "_fired", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | EagerTask[object] | None = current_task() or asyncio.current_task()
        assert self._task is not None, "the interrupt was created outside of a task: this is a bug"
        self._cancelled_before = 0 if isinstance(self._task, EagerTask) else self._task.cancelling()
        self._fired = False

    def fire(self) -> None:
        """Raises CancelledError at the body's `await`."""
        if self._task is None:
            return
        self._fired = True
        if isinstance(self._task, EagerTask):
            self._task.interrupt()
        else:
            self._task.cancel()

    def ended(self, kind: type[BaseException] | None) -> bool:
        """Returns whether this interrupt ended the body. `kind` is the type of the exception that the body raised, or
        None. Call this method after the body."""
        task, self._task = self._task, None
        if not self._fired or task is None:
            return False
        others = not isinstance(task, EagerTask) and task.uncancel() > self._cancelled_before
        return kind is asyncio.CancelledError and not others
