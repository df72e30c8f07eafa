"""The pending result of a submitted request, calls of many steps, and the count of an engine's requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, Self, TypeVar

from wane.service.batching.ticket import Ticket
from wane.service.deadline import TOO_LATE
from wane.service.errors import DeadlineExceeded, EarlierStepFailed, Unavailable, as_result
from wane.service.types.answer import Answer
from wane.service.types.request import StepRequest, id_of

T = TypeVar("T")


BEGUN_AT_ONCE = 32  # the number of steps or predictions of one call that begin in one iteration of the event loop

STILL_COMMITS = (
    "the deadline passed while the step ran, and the step still commits: retry it with the same position or key to get "
    "its answer"
)


class Pending(asyncio.Future[T]):
    """The future result of a submitted request, with its deadline.

    If work that the request will commit has entered a batch, the request is completed even if its caller is cancelled.
    Before that, `cancel()` and the deadline withdraw the request without side effects. Cancellation and the deadline
    also end the making of an answer, which follows the commit. A task that awaits the result cancels it when the task
    is cancelled.

    The result is computed by a task (`of`), or set by another object.
    """

    ticket: Ticket
    _task: asyncio.Task[T] | None = None
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, coroutine: Coroutine[Any, Any, T], ticket: Ticket) -> Self:
        """Returns the pending result of a coroutine, which submits all its work with `ticket`, the holder of the
        deadline."""
        pending = cls()
        pending.ticket = ticket
        loop = pending.get_loop()
        pending._task = loop.create_task(coroutine)
        pending._task.add_done_callback(pending._settle)
        if ticket.deadline is not None:
            pending._timer = loop.call_at(ticket.deadline, pending._ring)
        return pending

    def cancel(self, msg: object = None) -> bool:
        """Withdraws the request, unless its work has entered a batch."""
        if not super().cancel(msg):
            return False
        self._abandon()
        return True

    def fail(self, error: BaseException) -> None:
        """Sets the error, unless the caller has left."""
        if not self.done():
            self.set_exception(error)
            self.exception()  # a caller that leaves before it reads the error is no fault to be logged

    def _ring(self) -> None:
        """Fails the request, because its deadline has passed."""
        self.fail(DeadlineExceeded(STILL_COMMITS if self.ticket.entered else TOO_LATE))
        self._abandon()

    def _abandon(self) -> None:
        if self._task is None:
            return
        self._stop_timer()
        self.ticket.abandoned = True
        if getcoroutinestate(self._task.get_coro()) == CORO_CREATED:  # type: ignore[arg-type]  # a coroutine
            # The coroutine may have taken over a lock, so it must begin before it can end.
            self.get_loop().call_soon(self._withdraw)
        else:
            self._withdraw()

    def _withdraw(self) -> None:
        """Cancels the task, unless its work has entered a batch, which is then completed."""
        if self._task is not None and (self.ticket.answering or not self.ticket.entered):
            self._task.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        self._stop_timer()
        self._task = None  # breaks a reference cycle
        if task.cancelled():  # closing an engine cancels the work of its threads
            self.fail(Unavailable("the server is stopping"))
        elif (error := task.exception()) is not None:
            self.fail(error)
        elif not self.done():
            self.set_result(task.result())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def outcome_of(pending: Pending[T]) -> T | Exception:
    """Returns a request's result, or its error."""
    try:
        return await pending
    except Exception as error:
        return as_result(error)
    finally:
        del pending  # it holds the error, whose traceback holds this frame


async def step_many(
    submit: Callable[[StepRequest], Pending[Answer]], requests: Sequence[StepRequest]
) -> list[Answer | Exception]:
    """Runs many steps of one call. Steps of different sessions run concurrently. Steps of the same session run one
    after another, in the order of the call. Returns each request's answer or error, in order.

    After a failed step, the later steps of its session are not submitted and fail with EarlierStepFailed. If the caller
    is cancelled, every step is cancelled.
    """
    results: list[Answer | Exception | None] = [None] * len(requests)
    by_session: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_session.setdefault(request.session, []).append(index)

    async def step_in_order(indexes: Sequence[int]) -> None:
        failed = False
        for index in indexes:
            try:
                if failed:
                    raise EarlierStepFailed(id_of(requests[index].session))
                results[index] = await submit(requests[index])
            except Exception as error:
                results[index], failed = as_result(error), True

    pending: list[tuple[int, Pending[Answer]]] = []
    chains: list[asyncio.Task[None]] = []
    try:
        for number, indexes in enumerate(by_session.values(), 1):
            if number % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
            if len(indexes) == 1:
                pending.append((indexes[0], submit(requests[indexes[0]])))
            else:
                chains.append(asyncio.create_task(step_in_order(indexes)))
        for index, step in pending:
            results[index] = await outcome_of(step)
        for chain in chains:
            await chain
    except BaseException:
        for _, step in pending:
            step.cancel()
        for chain in chains:
            chain.cancel()
        raise
    return [result for result in results if result is not None]


class Admission:
    """Counts the requests of one engine, and refuses them after `close`. All methods must be called on the event loop's
    thread."""

    def __init__(self) -> None:
        self.asked = 0
        """Number of requests since the start."""
        self.active = 0
        """Number of requests in flight."""
        self.closed = False
        """Whether new requests are refused."""
        self._idle: asyncio.Event | None = None

    def enter(self) -> None:
        """Counts a request as active until `leave`. Raises Unavailable after `close`."""
        if self.closed:
            raise Unavailable("the server is stopping")
        self.asked += 1
        self.active += 1

    def extend(self) -> None:
        """Counts a request that is active once more. It is active until `leave` is called for both."""
        self.active += 1

    def leave(self, requests: int = 1) -> None:
        """Counts one or several requests as ended."""
        self.active -= requests
        if not self.active and self._idle is not None:
            self._idle.set()
            self._idle = None

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request as active within the `with` block. Raises Unavailable after `close`."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Refuses new requests from now on."""
        self.closed = True

    async def idle(self) -> None:
        """Waits until no request is in flight."""
        if self.active:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()
