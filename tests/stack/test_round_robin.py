"""Tests that every answer is correct if HAProxy routes by round robin, without session affinity."""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import failures, histories, open_clients, stepped, stepping
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
LONG = 10
RATE = 1.0
STEPS = 4


async def test_sessions_whose_steps_all_go_to_different_replicas_are_correct(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack(balance="roundrobin")
    await asyncio.to_thread(stack.start)
    first = [SESSION_HISTORY_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with open_clients(stack.port, first) as clients:
        async with stepping(clients, RATE):
            await stepped(clients, STEPS)
        assert failures(clients) == []
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []
    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(client.tokens, client.answers) for client in clients]
    )
    figures(compared=compared)
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0 and compared.proved > 0
