"""Redis killed and started again, with its append-only file: what was acknowledged as durable is there, whatever
replicas do while it is away."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.stack.conftest import TAIL_TOKENS, Figures, MakeStack
from tests.stack.harness.connection import Connection
from tests.stack.harness.history import Outcome
from tests.stack.harness.load_generator import crowd, failures, histories, longest_gap_s, playing, stepped, until_each
from tests.stack.harness.session_client import SessionClient
from tests.stack.harness.states import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
RATE = 1.0
UP, DOWN = {f"wane_{number}": "UP" for number in (1, 2, 3)}, {f"wane_{number}": "DOWN" for number in (1, 2, 3)}


async def test_rejecting_replicas_refuse_steps_until_redis_is_back_and_nothing_is_lost(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack({"WANE_STORE_FAILURE_MODE": "reject"})
    await asyncio.to_thread(stack.start)
    redis = stack.processes["redis"]
    async with crowd(stack.port, [40] * SESSIONS) as players:
        async with playing(players, RATE):
            await stepped(players)
            await asyncio.to_thread(redis.kill)
            await until(stack.operations, **DOWN)
            asking = Connection(stack.port)
            refused = await asking.ask("POST", f"/v1/sessions/{players[0].session}/tokens", {"tokens": [1]})
            predicted = await asking.ask("POST", "/v1/predict", {"tokens": [1, 2, 3]})
            asking.close()
            redis.start()
            await until(stack.operations, **UP)
            await stepped(players, 2)

        assert (refused.status, refused.document["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert predicted.status == 200, "what needs no session needs no store"
        figures(
            steps=sum(len(player.timed) for player in players),
            repeated_by_clients=sum(player.repeated for player in players),
            longest_gap_s=longest_gap_s(players),
        )
        assert failures(players) == []
        assert outcomes(players) == {Outcome.ACKNOWLEDGED}
        assert await histories(players, stack.store, TAIL_TOKENS) == []


async def test_degrading_replicas_go_on_and_say_so_and_redis_has_the_last_word(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack({"WANE_STORE_FAILURE_MODE": "degrade"})
    await asyncio.to_thread(stack.start)
    redis, victim = stack.processes["redis"], stack.replicas[0]
    async with crowd(stack.port, [40] * SESSIONS, yields=True) as players:
        async with playing(players, RATE):
            await stepped(players)
            await asyncio.to_thread(redis.kill)
            await until_each(players, has_undurable)
            # What it alone has is lost with it: histories differ.
            await asyncio.to_thread(victim.kill)
            victim.start()
            before = {player.session: (len(player.history), player.repeated) for player in players}
            await until_each(players, lambda player: went_on(player, before[player.session]))
            redis.start()
            await asyncio.to_thread(redis.wait_ready)
            await asyncio.to_thread(victim.wait_ready)
            await until(stack.operations, **UP)
            await stepped(players, 2)
        for player in players:  # every session ends with a durable step, or would be looked at too early
            await player.step((Random(player.session).randrange(1, player.vocabulary),))
            if player.history[-1].outcome is Outcome.UNKNOWN:
                await player.step((Random(player.session).randrange(1, player.vocabulary),))

        found = Counter(append.outcome for player in players for append in player.history)
        figures(
            durable=found[Outcome.ACKNOWLEDGED],
            not_durable=found[Outcome.NOT_DURABLE],
            conflicts=sum(player.conflicts for player in players),
            repeated_by_clients=sum(player.repeated for player in players),
        )
        assert failures(players) == []
        assert all(player.history[-1].outcome is Outcome.ACKNOWLEDGED for player in players)
        assert sum(player.conflicts for player in players) > 0
        assert await histories(players, stack.store, TAIL_TOKENS) == []


def has_undurable(player: SessionClient) -> bool:
    """Whether a step was answered that is not durable."""
    return any(append.outcome is Outcome.NOT_DURABLE for append in player.history)


def went_on(player: SessionClient, before: tuple[int, int]) -> bool:
    """Whether a step has ended, or had to be sent again, since the numbers of both were `before`."""
    return len(player.history) > before[0] or player.repeated > before[1]


def outcomes(players: list[SessionClient]) -> set[Outcome]:
    return {append.outcome for player in players for append in player.history}
