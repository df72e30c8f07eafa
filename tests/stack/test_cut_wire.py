"""Tests of a replica that cannot reach Redis, while the other replicas can."""

from __future__ import annotations

import asyncio

import pytest

from tests.stack.conftest import SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepped, stepping
from tests.stack.harness.states import until
from tests.stack.harness.wire import wire

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
RATE = 1.0


async def test_a_replica_without_the_store_gets_no_requests_until_it_reaches_the_store_again(
    make_stack: MakeStack, figures: Figures
) -> None:
    async with wire() as carrying:
        store = {"WANE_STORE": f"redis://127.0.0.1:{carrying.port}/0", "WANE_STORE_TIMEOUT_MS": "1000"}
        stack = make_stack(own={"wane-2": store})
        carrying.behind = stack.processes["redis"].port
        await asyncio.to_thread(stack.start)
        async with open_clients(stack.port, [40] * SESSIONS) as clients:
            async with stepping(clients, RATE):
                await stepped(clients)
                carrying.cut()
                await until(stack.operations, wane_2="DOWN")
                await stepped(clients, 2)
                carrying.mend()
                await until(stack.operations, wane_2="UP")
                await stepped(clients, 2)
            figures(
                steps=sum(len(client.timed) for client in clients),
                repeated_by_clients=sum(client.repeated for client in clients),
                longest_gap_s=longest_gap_s(clients),
            )
            assert failures(clients) == []
            assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []
