"""The body of a `with`, ended from outside: by a deadline, or because the client has gone."""

from __future__ import annotations

import asyncio

from wane.service.aio.eager import EagerTask, current_task


class Interrupt:
    """Raises CancelledError in the body of a `with`, and tells that apart from a cancellation by others.

    To be made in the task that runs the body, be it an `asyncio.Task` or an `EagerTask`.
    """

    __slots__ = ("_cancelled_before", "_fired", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | EagerTask[object] | None = current_task() or asyncio.current_task()
        assert self._task is not None, "this is a bug: the body of a `with` is always run by a task"
        self._cancelled_before = 0 if isinstance(self._task, EagerTask) else self._task.cancelling()
        self._fired = False

    def fire(self) -> None:
        """Ends the body, where it waits."""
        if self._task is None:
            return
        self._fired = True
        if isinstance(self._task, EagerTask):
            self._task.interrupt()
        else:
            self._task.cancel()

    def ended(self, kind: type[BaseException] | None) -> bool:
        """Whether this has ended the body, which raised an exception of `kind`. To be called when the body is over."""
        task, self._task = self._task, None
        if not self._fired or task is None:
            return False
        others = not isinstance(task, EagerTask) and task.uncancel() > self._cancelled_before
        return kind is asyncio.CancelledError and not others
