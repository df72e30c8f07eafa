"""Drives many sessions at once, and checks their histories."""

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
async def open_clients(
    port: int,
    first: Sequence[int],
    *,
    retries: bool = True,
    name: str = "session",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[list[SessionClient]]:
    """Starts a client and a session for each entry of `first`. The entry is the number of tokens in the session's first
    step."""
    clients = [
        SessionClient(port, f"{name}-{number}", Random(number), VOCABULARY, retries, dict(headers or {}))
        for number in range(len(first))
    ]
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin(client: SessionClient, tokens: int) -> None:
        async with turns:
            await client.begin(tokens)

    try:
        await asyncio.gather(*map(begin, clients, first))
        yield clients
    finally:
        for client in clients:
            client.connection.close()


@asynccontextmanager
async def stepping(clients: Iterable[SessionClient], rate: float) -> AsyncIterator[None]:
    """Makes every client send `rate` tokens a second on average, until the end of the block. Then waits for the last
    answers. Garbage collection is off during the block, because a collection would stop the clients for longer than
    most answers take."""
    over = asyncio.Event()
    gc.collect()
    gc.disable()
    tasks = [asyncio.create_task(client.step_at_rate(rate, over)) for client in clients]
    try:
        yield
        over.set()
        await asyncio.gather(*tasks)
    finally:
        gc.enable()
        for task in tasks:
            task.cancel()


async def stepped(clients: Sequence[SessionClient], steps: int = 1) -> None:
    """Waits until each client has ended `steps` more steps, with any outcome. A step that is in flight at the call
    counts."""
    wanted = {client.session: len(client.history) + steps for client in clients}
    await until_each(clients, lambda client: len(client.history) >= wanted[client.session])


async def until_each(clients: Sequence[SessionClient], condition: Callable[[SessionClient], bool]) -> None:
    """Waits until the condition holds for every client. A client for which the condition does not hold sends its next
    step immediately. Without this, the duration of the wait would be the longest random time between two steps."""

    def holds() -> bool:
        late = [client for client in clients if not condition(client)]
        for client in late:
            client.hurry()
        return not late

    await until_true(holds)


async def until_true(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds. Only a test that hangs reaches the timeout."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


def failures(clients: Iterable[SessionClient]) -> list[str]:
    """Returns the failures that the clients have recorded."""
    return [failure for client in clients for failure in client.failures]


async def histories(
    clients: Sequence[SessionClient], store: str, session_history_tokens: int, owner: str | None = None
) -> list[str]:
    """Checks the history of every session against the store. Returns the faults. The store keeps only the last tokens
    of a long session. Only tokens of the session's first step may be missing from the store. The check takes them from
    the client's history. `owner` is the name of the clients' API key."""
    found: list[str] = []
    reader = RedisStore(Settings(store=store, store_timeout_ms=10_000), session_history_tokens, Metrics())
    await reader.open()
    try:
        for client in clients:
            record = await reader.get(client.session if owner is None else f"{owner}/{client.session}")
            if record is None:
                found.append(f"{client.session} is lost")
                continue
            tail = [int(token) for token in record.tail.ids()][-record.position or None :]
            first = client.history[0].tokens
            cut = record.position - len(tail)
            assert cut <= len(first), "the store has dropped tokens of later steps, which the test cannot check"
            found += [f"{client.session}: {fault}" for fault in faults(client.history, [*first[:cut], *tail])]
    finally:
        await reader.close()
    return found


def longest_gap_s(clients: Sequence[SessionClient]) -> float:
    """Returns the longest latency of a step. The latency is the time from when the step was due until it was answered,
    and includes retries."""
    return max(timed.latency_s for client in clients for timed in client.timed)
