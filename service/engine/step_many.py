"""Many steps of one call: side by side, but those of one session one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from wane.service.engine.inline_step import InlineStep
from wane.service.errors import EarlierStepFailed
from wane.service.types import Answer, StepRequest, id_of

Outcome = Answer | Exception


async def abreast(
    begin: Callable[[StepRequest], InlineStep | None],
    end: Callable[[InlineStep], Awaitable[Answer]],
    count: Callable[[int], None],
    step: Callable[[StepRequest], Awaitable[Answer]],
    requests: Sequence[StepRequest],
) -> list[Outcome]:
    """What is answered to each request, or was raised, in their order.

    A step that is its session's only one is begun, if it can be, and all that are begun are then waited for: that is a
    good deal less work than a task for each of them. Of those that need no wait any more `count` is told how many they
    were. The others are answered by `step`.
    """
    outcomes: list[Outcome | None] = [None] * len(requests)
    times = Counter(request.session for request in requests)
    begun: deque[tuple[int, InlineStep]] = deque()
    others: list[int] = []
    for index, request in enumerate(requests):
        quick: InlineStep | None = None
        if times[request.session] == 1:
            try:
                quick = begin(request)
            except Exception as error:
                outcomes[index] = error
                continue
        if quick is None:
            others.append(index)
        else:
            begun.append((index, quick))

    async def end_all() -> None:
        answered = 0
        try:
            while begun:
                index, quick = begun[0]
                if quick.given is not None:  # another step of its batch was waited for
                    outcomes[index] = quick.given
                    answered += 1
                else:
                    try:
                        outcomes[index] = await end(quick)
                    except Exception as error:  # one that nobody expected is no reason to fail the others either
                        outcomes[index] = error
                begun.popleft()
        finally:
            if answered:
                count(answered)

    try:
        if others:
            tasks = end_all(), _one_after_the_other(step, [(index, requests[index]) for index in others], outcomes)
            await asyncio.gather(*tasks)
        else:
            await end_all()
    finally:
        for _, quick in begun:  # whoever called has left
            quick.leave()
    return [outcome for outcome in outcomes if outcome is not None]


async def _one_after_the_other(
    step: Callable[[StepRequest], Awaitable[Answer]],
    requests: Sequence[tuple[int, StepRequest]],
    outcomes: list[Outcome | None],
) -> None:
    """Puts the answers where the requests' numbers say; sessions are side by side.

    Behind a step that failed its session's others are not run, and fail with EarlierStepFailed: they were meant to
    follow it.
    """
    by_session: dict[str, list[tuple[int, StepRequest]]] = {}
    for index, request in requests:
        by_session.setdefault(request.session, []).append((index, request))

    async def of_one(steps: Sequence[tuple[int, StepRequest]]) -> None:
        failed = False
        for index, request in steps:
            try:
                if failed:
                    raise EarlierStepFailed(id_of(request.session))
                outcomes[index] = await step(request)
            except Exception as error:
                outcomes[index], failed = error, True

    await asyncio.gather(*map(of_one, by_session.values()))
