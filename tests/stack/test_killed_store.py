"""Tests that kill Redis and restart it with its append-only file. In each of the store's failure modes (reject,
degrade), Redis keeps the tokens that were acknowledged as durable."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.stack.conftest import SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.connection import Connection
from tests.stack.harness.history import Outcome
from tests.stack.harness.load_generator import (
    failures,
    histories,
    longest_gap_s,
    open_clients,
    stepped,
    stepping,
    until_each,
)
from tests.stack.harness.session_client import SessionClient
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
RATE = 1.0
UP, DOWN = {f"wane_{number}": "UP" for number in (1, 2, 3)}, {f"wane_{number}": "DOWN" for number in (1, 2, 3)}


async def test_in_mode_reject_steps_fail_until_redis_is_back_and_no_step_is_lost(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack({"WANE_STORE_FAILURE_MODE": "reject"})
    await asyncio.to_thread(stack.start)
    redis = stack.processes["redis"]
    async with open_clients(stack.port, [40] * SESSIONS) as clients:
        async with stepping(clients, RATE):
            await stepped(clients)
            await asyncio.to_thread(redis.kill)
            await until(stack.operations, **DOWN)
            asking = Connection(stack.port)
            refused = await asking.ask("POST", f"/v1/sessions/{clients[0].session}/tokens", {"tokens": [1]})
            predicted = await asking.ask("POST", "/v1/predict", {"tokens": [1, 2, 3]})
            asking.close()
            redis.start()
            await until(stack.operations, **UP)
            await stepped(clients, 2)

        assert (refused.status, refused.document["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert predicted.status == 200, "a prediction failed without the store, although it uses no session"
        figures(
            steps=sum(len(client.timed) for client in clients),
            repeated_by_clients=sum(client.repeated for client in clients),
            longest_gap_s=longest_gap_s(clients),
        )
        assert failures(clients) == []
        assert outcomes(clients) == {Outcome.ACKNOWLEDGED}
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []


async def test_in_mode_degrade_sessions_continue_and_the_sessions_in_redis_replace_local_ones(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack({"WANE_STORE_FAILURE_MODE": "degrade"})
    await asyncio.to_thread(stack.start)
    redis, victim = stack.processes["redis"], stack.replicas[0]
    async with open_clients(stack.port, [40] * SESSIONS, yields=True) as clients:
        async with stepping(clients, RATE):
            await stepped(clients)
            await asyncio.to_thread(redis.kill)
            await until_each(clients, has_undurable)
            # Redis is down, so this replica alone has the newest tokens of its sessions. The kill loses these tokens,
            # so later steps of these sessions have conflicts (409).
            await asyncio.to_thread(victim.kill)
            victim.start()
            before = {client.session: (len(client.history), client.repeated) for client in clients}
            await until_each(clients, lambda client: has_progressed(client, before[client.session]))
            redis.start()
            await asyncio.to_thread(redis.wait_ready)
            await asyncio.to_thread(victim.wait_ready)
            await until(stack.operations, **UP)
            await stepped(clients, 2)
        for client in clients:  # every session must end with a durable step before it is checked
            await client.step((Random(client.session).randrange(1, client.vocabulary),))
            if client.history[-1].outcome is Outcome.UNKNOWN:
                await client.step((Random(client.session).randrange(1, client.vocabulary),))

        found = Counter(append.outcome for client in clients for append in client.history)
        figures(
            durable=found[Outcome.ACKNOWLEDGED],
            not_durable=found[Outcome.NOT_DURABLE],
            conflicts=sum(client.conflicts for client in clients),
            repeated_by_clients=sum(client.repeated for client in clients),
        )
        assert failures(clients) == []
        assert all(client.history[-1].outcome is Outcome.ACKNOWLEDGED for client in clients)
        assert sum(client.conflicts for client in clients) > 0
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []


def has_undurable(client: SessionClient) -> bool:
    """Returns whether any answered step is not durable."""
    return any(append.outcome is Outcome.NOT_DURABLE for append in client.history)


def has_progressed(client: SessionClient, before: tuple[int, int]) -> bool:
    """Returns whether any step has ended or was retried since an earlier time. `before` has the counts of ended steps
    and of retries at that time."""
    return len(client.history) > before[0] or client.repeated > before[1]


def outcomes(clients: list[SessionClient]) -> set[Outcome]:
    return {append.outcome for client in clients for append in client.history}
