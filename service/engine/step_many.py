"""Runs many steps of one call. Steps of different sessions run concurrently. Steps of the same session run one after
another, in the order of the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from wane.service.engine.pending import Pending, outcome_of
from wane.service.errors import EarlierStepFailed
from wane.service.types.answer import Answer
from wane.service.types.request import StepRequest, id_of

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
            results[index] = await outcome_of(one)
        for chain in chains:
            await chain
    except BaseException:
        for _, one in pending:
            one.cancel()
        for chain in chains:
            chain.cancel()
        raise
    return [result for result in results if result is not None]
