"""Replicas that are killed under load: nothing is lost, and nothing is there twice.

`python -m benchmarks.outages` measures how long clients wait meanwhile.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import BUNDLE, TAIL_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import crowd, failures, histories, playing, stepped
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 200
LONG = 20
RATE = 1.25
KILLS = 6


async def test_two_hundred_sessions_outlive_replicas_that_are_killed_one_after_another(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    # A tenth of the sessions is longer than what is kept of one: their states can only be rebuilt within a bound.
    first = [TAIL_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with crowd(stack.port, first) as players:
        async with playing(players, RATE):
            for number in range(KILLS):
                await stepped(players)
                victim = stack.replicas[number % len(stack.replicas)]
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
            await stepped(players, 2)
        wrong = [*failures(players), *await histories(players, stack.store, TAIL_TOKENS)]

    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(player.tokens, player.answers) for player in players]
    )
    figures(
        steps=sum(len(player.timed) for player in players),
        repeated_by_clients=sum(player.repeated for player in players),
        compared=compared,
    )
    assert wrong == []
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0 and compared.proved > 0
