"""Replicas that are killed under load: nothing is lost, nothing is there twice, and nobody waits for long.

An outage is from the moment that a replica is killed until it is ready again. On a machine of few cores, what it takes
to load a model is missing elsewhere meanwhile; what is measured outside has sessions in it that move back. The p99 of
some seconds is compared with that of others: each is the median over slices, so that what else the machine did in one
of them does not decide.
"""

from __future__ import annotations

import asyncio
import statistics

import pytest

from tests.stack.conftest import BUNDLE, TAIL_TOKENS, Figures, MakeStack
from tests.stack.crowd import Span, crowd, failures, histories, longest_gap_s, p99_ms, playing
from tests.stack.twin import Twin

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 200
LONG = 20
RATE = 1.25
SETTLING_S = 5.0
UNDISTURBED_S = 15.0
LOAD_S = 60.0
KILL_EVERY_S = 10.0
SLICE_S = 5.0
GAP_S = 3.0


def slices(start_s: float, length_s: float, each_s: float) -> list[Span]:
    """A span in parts."""
    return [(start_s + number * each_s, start_s + (number + 1) * each_s) for number in range(int(length_s / each_s))]


async def test_two_hundred_sessions_outlive_a_replica_killed_every_ten_seconds(
    make_stack: MakeStack, figures: Figures
) -> None:
    stack = make_stack()
    await asyncio.to_thread(stack.start)
    clock = asyncio.get_running_loop().time
    outages: list[Span] = []
    # A tenth of the sessions is longer than what is kept of one: their states can only be rebuilt within a bound.
    first = [TAIL_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with crowd(stack.port, first) as players:
        async with playing(players, RATE):
            start_s = clock() + SETTLING_S
            calm = slices(start_s, UNDISTURBED_S, SLICE_S)
            storm = slices(start_s + UNDISTURBED_S, LOAD_S, KILL_EVERY_S)
            for number in range(int(LOAD_S / KILL_EVERY_S)):
                await asyncio.sleep(storm[number][0] - clock())
                victim = stack.replicas[number % len(stack.replicas)]
                killed_s = clock()
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
                outages.append((killed_s, clock()))
            await asyncio.sleep(storm[-1][1] - clock())
        wrong = [*failures(players), *await histories(players, stack.store, TAIL_TOKENS)]

    compared = await asyncio.to_thread(Twin(BUNDLE).compare, [(player.tokens, player.answers) for player in players])
    gap_s = longest_gap_s(players)
    before = statistics.median(p99_ms(players, [span]) for span in calm)
    beside = statistics.median(p99_ms(players, [span], outages) for span in storm)
    within = p99_ms(players, outages)
    figures(
        steps=sum(len(player.timed) for player in players),
        repeated_by_clients=sum(player.repeated for player in players),
        longest_gap_s=gap_s,
        p99_undisturbed_ms=before,
        p99_outside_outages_ms=beside,
        p99_in_outages_ms=within,
        until_ready_again_s=[round(end - begun, 1) for begun, end in outages],
        compared=compared,
    )
    assert wrong == []
    assert compared.broken == ()
    assert compared.rebuilt > 0 and compared.bounded > 0 and compared.proved > 0
    assert gap_s <= GAP_S
    assert beside <= 2 * before
