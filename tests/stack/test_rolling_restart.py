"""Tests that no request fails while replicas are restarted one after another, as for a new version."""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepped, stepping
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 100
RATE = 1.0


async def test_no_request_fails_or_is_retried_while_all_replicas_restart(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    codes = []
    async with open_clients(stack.port, [40] * SESSIONS, retries=False) as clients:
        async with stepping(clients, RATE):
            for replica in stack.replicas:
                replica.terminate()
                codes.append(await asyncio.to_thread(replica.wait))
                replica.start()
                await asyncio.to_thread(replica.wait_ready)
                await until(stack.operations, **{replica.name.replace("-", "_"): "UP"})
                await stepped(clients)
        figures(steps=sum(len(client.timed) for client in clients), longest_gap_s=longest_gap_s(clients))
        assert codes == [0, 0, 0]
        assert failures(clients) == []
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []
