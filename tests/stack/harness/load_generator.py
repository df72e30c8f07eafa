"""Many sessions at once: played, and judged in the end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random

from tests.stack.harness.history import faults
from tests.stack.harness.session_client import SessionClient
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.redis import RedisStore
from wane.service.settings import Settings

VOCABULARY = 2048
AT_ONCE = 16
WAIT_S = 300.0
LOOK_EVERY_S = 0.02


@asynccontextmanager
async def crowd(
    port: int,
    first: Sequence[int],
    *,
    retries: bool = True,
    yields: bool = False,
    name: str = "session",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[list[SessionClient]]:
    """Players of as many sessions as there are numbers in `first`, each started with so many tokens."""
    players = [
        SessionClient(port, f"{name}-{number}", Random(number), VOCABULARY, retries, yields, dict(headers or {}))
        for number in range(len(first))
    ]
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin(player: SessionClient, tokens: int) -> None:
        async with turns:
            await player.begin(tokens)

    try:
        await asyncio.gather(*map(begin, players, first))
        yield players
    finally:
        for player in players:
            player.connection.close()


@asynccontextmanager
async def playing(players: Iterable[SessionClient], rate: float) -> AsyncIterator[None]:
    """All of them send tokens, `rate` a second each on average, until the end of the block and its last answers. The
    garbage collector stands still: it would stop the clients for longer than most answers take."""
    over = asyncio.Event()
    gc.collect()
    gc.disable()
    tasks = [asyncio.create_task(player.play(rate, over)) for player in players]
    try:
        yield
        over.set()
        await asyncio.gather(*tasks)
    finally:
        gc.enable()
        for task in tasks:
            task.cancel()


async def stepped(players: Sequence[SessionClient], steps: int = 1) -> None:
    """Waits until each of them has ended that many steps more, whatever became of them. The first of these may have
    been under way before."""
    wanted = {player.session: len(player.history) + steps for player in players}
    await until_each(players, lambda player: len(player.history) >= wanted[player.session])


async def until_each(players: Sequence[SessionClient], condition: Callable[[SessionClient], bool]) -> None:
    """Waits until it holds of each of them. Those of whom it does not hold send their next steps at once, so that the
    time that this takes is not that of the longest of many random gaps."""

    def holds() -> bool:
        late = [player for player in players if not condition(player)]
        for player in late:
            player.hurry()
        return not late

    await until_true(holds)


async def until_true(condition: Callable[[], bool]) -> None:
    """Waits until it holds. The time-out only ends a test that hangs."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


def failures(players: Iterable[SessionClient]) -> list[str]:
    """What clients saw that was no answer."""
    return [failure for player in players for failure in player.failures]


async def histories(
    players: Sequence[SessionClient], store: str, session_history_tokens: int, owner: str | None = None
) -> list[str]:
    """Every session's history, held against what the store holds in the end. What is no longer in its tail, the
    beginning of one long first step, is taken to be as it was acknowledged. `owner` is the name of the clients' key."""
    found: list[str] = []
    settings = Settings()
    reader = RedisStore(
        store,
        namespace=settings.store_namespace,
        session_history_tokens=session_history_tokens,
        ttl_s=settings.session_ttl_s,
        budget_bytes=settings.session_budget_bytes,
        timeout_s=10,
        metrics=Metrics(),
    )
    await reader.open()
    try:
        for player in players:
            record = await reader.get(player.session if owner is None else f"{owner}/{player.session}")
            if record is None:
                found.append(f"{player.session} is lost")
                continue
            tail = [int(token) for token in record.tail.ids()][-record.position or None :]
            first = player.history[0].tokens
            cut = record.position - len(tail)
            assert cut <= len(first), "more is cut off than the first step: this is a bug of the test"
            found += [f"{player.session}: {fault}" for fault in faults(player.history, [*first[:cut], *tail])]
    finally:
        await reader.close()
    return found


def longest_gap_s(players: Sequence[SessionClient]) -> float:
    """The longest that a session which wanted an answer went without: from when a step was due until it was answered,
    with every attempt in between."""
    return max(timed.latency_s for player in players for timed in player.timed)
