"""Many steps of one call: side by side, but those of one session one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from service.engine.types import Answer, StepRequest
from service.errors import EarlierStepFailed

Outcome = Answer | Exception


async def abreast(step: Callable[[StepRequest], Awaitable[Answer]], requests: Sequence[StepRequest]) -> list[Outcome]:
    """What `step` answers to each request, or what it raised, in their order.

    Behind a step that failed its session's others are not run, and fail with EarlierStepFailed: they were meant to
    follow it.
    """
    outcomes: list[Outcome | None] = [None] * len(requests)
    by_session: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_session.setdefault(request.session, []).append(index)

    async def one_after_the_other(indices: Sequence[int]) -> None:
        failed = False
        for index in indices:
            try:
                if failed:
                    raise EarlierStepFailed(requests[index].session)
                outcomes[index] = await step(requests[index])
            except Exception as error:  # one that nobody expected is no reason to fail the others either
                outcomes[index], failed = error, True

    await asyncio.gather(*map(one_after_the_other, by_session.values()))
    return [outcome for outcome in outcomes if outcome is not None]
