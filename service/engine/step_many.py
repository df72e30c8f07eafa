"""Runs many steps of one call. Steps of different sessions run concurrently. Steps of the same session run one after
another, in the order of the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from wane.service.engine.pending import Pending
from wane.service.errors import EarlierStepFailed
from wane.service.types.answer import Answer
from wane.service.types.request import Owner, StepRequest, id_of


class StepCall(asyncio.Future[None]):
    """Collects, by step number, the results of those steps of one call that run in columns. The receiver is done when
    every step has a result."""

    creator: Owner | None = None
    """Is None, because no step of the call may create its session."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, Answer | Exception] = {}
        self.waits_for = 0
        """Number of steps without a result."""
        self._general: list[Pending[Answer]] = []

    def cancel(self, msg: object = None) -> bool:
        """Withdraws the steps that have not entered a batch."""
        for pending in self._general:
            pending.cancel()
        return super().cancel(msg)

    def step_ran(self, answer: Answer, number: int) -> None:
        """See `StepReceiver`."""
        self._record(answer, number)

    def step_failed(self, error: Exception, number: int) -> None:
        """See `StepReceiver`."""
        self._record(error, number)

    def step_again(self, pending: Pending[Answer], number: int) -> None:
        """See `StepReceiver`."""
        self._general.append(pending)
        pending.add_done_callback(partial(self._copy, number))

    def _copy(self, number: int, general: asyncio.Future[Answer]) -> None:
        if not general.cancelled():
            error = general.exception()
            assert error is None or isinstance(error, Exception), "a step failed with no Exception: this is a bug"
            self._record(general.result() if error is None else error, number)

    def _record(self, result: Answer | Exception, number: int) -> None:
        """Records a step's first result. A step may get a second result if its deadline passed while it ran."""
        if number in self.results:
            return
        self.results[number] = result
        self.waits_for -= 1
        if not self.waits_for:
            self._general.clear()
            if not self.done():
                self.set_result(None)


BEGUN_AT_ONCE = 32  # the number of sessions whose steps begin in one iteration of the event loop


async def step_many(
    submit: Callable[[StepRequest], Pending[Answer]], requests: Sequence[StepRequest]
) -> list[Answer | Exception]:
    """Returns each request's answer or error, in order.

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
                results[index], failed = error, True

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
        for index, one in pending:
            try:
                results[index] = await one
            except Exception as error:
                results[index] = error
        for chain in chains:
            await chain
    except BaseException:
        for _, one in pending:
            one.cancel()
        for chain in chains:
            chain.cancel()
        raise
    return [result for result in results if result is not None]
