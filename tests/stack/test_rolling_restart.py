"""Replicas that are stopped and started one after another, as for a new version: no request fails."""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import TAIL_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import crowd, failures, histories, longest_gap_s, playing, stepped
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 100
RATE = 1.0


async def test_no_request_fails_while_all_replicas_are_restarted_and_no_client_asks_twice(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    codes = []
    async with crowd(stack.port, [40] * SESSIONS, retries=False) as players:
        async with playing(players, RATE):
            for replica in stack.replicas:
                replica.terminate()
                codes.append(await asyncio.to_thread(replica.wait))
                replica.start()
                await asyncio.to_thread(replica.wait_ready)
                await until(stack.operations, **{replica.name.replace("-", "_"): "UP"})
                await stepped(players)
        figures(steps=sum(len(player.timed) for player in players), longest_gap_s=longest_gap_s(players))
        assert codes == [0, 0, 0]
        assert failures(players) == []
        assert await histories(players, stack.store, TAIL_TOKENS) == []
