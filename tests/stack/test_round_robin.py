"""Without a replica of its own for each session everything is as correct as with one."""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import BUNDLE, TAIL_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import crowd, failures, histories, playing, stepped
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
LONG = 10
RATE = 1.0
STEPS = 4


async def test_sessions_whose_every_step_goes_to_another_replica_are_right(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack(balance="roundrobin")
    await asyncio.to_thread(stack.start)
    first = [TAIL_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with crowd(stack.port, first) as players:
        async with playing(players, RATE):
            await stepped(players, STEPS)
        assert failures(players) == []
        assert await histories(players, stack.store, TAIL_TOKENS) == []
    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(player.tokens, player.answers) for player in players]
    )
    figures(compared=compared)
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0 and compared.proved > 0
