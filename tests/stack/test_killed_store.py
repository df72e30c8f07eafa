"""Tests that kill Redis and restart it with its append-only file."""

from __future__ import annotations

import asyncio

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
)
from tests.stack.harness.session_client import SessionClient
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
RATE = 1.0
UP, DOWN = {f"wane_{number}": "UP" for number in (1, 2, 3)}, {f"wane_{number}": "DOWN" for number in (1, 2, 3)}


async def test_steps_fail_until_redis_is_back_and_no_step_is_lost(make_stack: MakeStack, figures: Figures) -> None:
    stack = make_stack()
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


def outcomes(clients: list[SessionClient]) -> set[Outcome]:
    return {append.outcome for client in clients for append in client.history}
