"""Tests of the simulation's costs (per batch, per step, of windows, of fleets), of a replica's planned load, and of the
commands that wait for Redis's writes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from research.scaling.capacity import Plan, at, plan
from research.scaling.costs import Limits, Prices, two_parts
from research.scaling.shard import response_times
from research.scaling.sizing import saturated_at, size, worth_keeping_s
from tests.research.scaling.costs import ROUND

PLAN = Plan(steps_per_s=1000, loop_s=500e-6, runner_s=50e-6, trips=0.5, p99_ms=5.0)


def test_two_loads_separate_the_costs_of_a_batch_and_a_step() -> None:
    alone, crowded = {"us": 700.0, "batches": 1.0}, {"us": 550.0, "batches": 0.25}
    batch, step = two_parts(alone, crowded, "us", "batches")
    assert (batch, step) == pytest.approx((200.0, 500.0))


def test_a_window_s_run_is_interpolated_linearly() -> None:
    assert ROUND.window_s(64) == pytest.approx(700e-6)
    assert ROUND.window_s(288) == pytest.approx((700e-6 + 6e-3) / 2)
    assert ROUND.window_s(1024) == pytest.approx(12e-3)


def test_the_cost_of_a_million_sessions_does_not_depend_on_the_size_of_the_fleet() -> None:
    limits, prices = Limits(), Prices()
    costs = [
        size(ROUND, PLAN, limits, sessions, 20.0).per_million(size(ROUND, PLAN, limits, sessions, 20.0).cost(prices))
        for sessions in (1e6, 1e8)
    ]
    assert costs[0] == pytest.approx(costs[1], rel=0.02)


def test_doubling_both_prices_doubles_the_cost() -> None:
    one = size(ROUND, PLAN, Limits(), 1e6, 20.0)
    assert one.cost(Prices(0.08, 0.01)) == pytest.approx(2 * one.cost(Prices(0.04, 0.005)))


def test_the_event_loop_s_time_limits_the_sessions_of_a_replica() -> None:
    found = saturated_at(ROUND, PLAN, Limits(load=0.6), 10.0)
    assert found["replica's event loop"] == pytest.approx(0.6 / 500e-6 * 10)


def test_a_state_that_costs_more_to_rebuild_is_worth_keeping_longer() -> None:
    prices, limits = Prices(), Limits()
    dearer = replace(ROUND, loop_rebuilt_s=2 * ROUND.loop_rebuilt_s + ROUND.window_s(64))
    assert worth_keeping_s(dearer, prices, limits) == pytest.approx(2 * worth_keeping_s(ROUND, prices, limits))


def test_a_replica_is_planned_with_the_given_load() -> None:
    trips_s = np.array([1e-3])
    planned = plan(ROUND, Limits(load=0.5), trips_s)
    assert planned.loop_s * planned.steps_per_s == pytest.approx(0.5, abs=0.02)
    assert at(ROUND, 1.5 * planned.steps_per_s, trips_s)["loop_share"] > 0.5


def test_all_commands_of_a_round_wait_for_one_write() -> None:
    slow = replace(ROUND, write_s={**ROUND.write_s, "always": (5e-3,)})
    taken_s = response_times(slow, 2000.0, 1.0, 10_000, 0)
    # The store works in rounds. A round lasts as long as one write to the disk and the execution of the commands that
    # arrive during one round.
    round_s = 5e-3 / (1 - 2000 * 70e-6)
    # On average, a command waits for the rest of the current round, which is half a round, and then for its own round.
    assert np.median(taken_s) == pytest.approx(1.5 * round_s, rel=0.05)
    # Ten trips arrive during one write, but all of them wait for the same next write.
    assert taken_s.max() < 3 * round_s
    assert response_times(slow, 2000.0, 1.0, 5000, 0, fsync="everysec").max() < 2e-3
