"""Tests that no token is lost or duplicated when replicas are killed under load.

`python -m benchmarks.outages` measures how long clients wait while replicas are killed.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import failures, histories, open_clients, stepped, stepping
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 200
LONG = 20
RATE = 1.25
KILLS = 6


async def test_two_hundred_sessions_continue_while_replicas_are_killed_one_after_another(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    # A tenth of the sessions have more tokens than the store keeps. The states of these sessions can be rebuilt only
    # within an error bound.
    first = [SESSION_HISTORY_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with open_clients(stack.port, first) as clients:
        async with stepping(clients, RATE):
            for number in range(KILLS):
                await stepped(clients)
                victim = stack.replicas[number % len(stack.replicas)]
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
            await stepped(clients, 2)
        wrong = [*failures(clients), *await histories(clients, stack.store, SESSION_HISTORY_TOKENS)]

    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(client.tokens, client.answers) for client in clients]
    )
    figures(
        steps=sum(len(client.timed) for client in clients),
        repeated_by_clients=sum(client.repeated for client in clients),
        compared=compared,
    )
    assert wrong == []
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0 and compared.proved > 0
