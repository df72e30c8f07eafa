"""Tests that a simulated fleet loses no step, counts no step twice, and has the same result with the same seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from research.scaling.fleet import Fleet, Shape
from tests.research.scaling.costs import ROUND

SHAPE = Shape(replicas=3, sessions=300, rate=2.0, shards=2)
UNTIL_S = 20.0


def with_kills(seed: int, shape: Shape = SHAPE) -> Fleet:
    """Runs a fleet in which each replica is killed once."""
    fleet = Fleet(ROUND, shape, seed)
    fleet.run(UNTIL_S, [(5.0 * number, lambda number=number: fleet.kill(number)) for number in (1, 2, 3)])  # type: ignore[misc]
    return fleet


def test_every_step_is_answered_once_despite_killed_replicas() -> None:
    fleet = with_kills(0)
    record = fleet.record
    assert record.asked > 0.9 * SHAPE.sessions * SHAPE.rate * UNTIL_S
    assert record.answered + record.refused == record.asked
    assert not any(fleet.on_way.values())
    assert fleet.lost > 0


def test_only_sessions_of_the_killed_replica_are_rebuilt_on_other_replicas() -> None:
    fleet = Fleet(ROUND, SHAPE, 3)
    own = int((fleet.owners == 1).sum())
    record = fleet.run(UNTIL_S, [(5.0, lambda: fleet.kill(1, back=False))])
    due, _, rebuilt = record.arrays()
    assert not rebuilt[due < 4.9].any()
    assert 0.9 * own <= rebuilt.sum() <= own
    assert set(np.unique(fleet.owners)) == {2, 3}


def test_sessions_that_return_to_a_restarted_replica_are_rebuilt_again() -> None:
    fleet = Fleet(ROUND, SHAPE, 3)
    own = int((fleet.owners == 1).sum())
    record = fleet.run(40.0, [(5.0, lambda: fleet.kill(1))])
    assert 1.5 * own <= record.arrays()[2].sum() <= 2.1 * own


def test_simulated_times_depend_only_on_the_seed() -> None:
    first, again, other = (with_kills(seed).record for seed in (7, 7, 8))
    assert first.due_s == again.due_s
    assert first.taken_s == again.taken_s
    assert first.taken_s != other.taken_s


def test_a_closed_loop_has_one_step_in_flight_per_connection() -> None:
    shape = Shape(sessions=64, closed=8, cores=2, client=True)
    record = Fleet(ROUND, shape, 0).run(5.0)
    _, taken, _ = record.arrays()
    # Little's law: the mean number of steps in flight is their rate times their mean duration.
    assert record.answered / 5.0 * taken.mean() == pytest.approx(8, rel=0.02)


def test_the_share_of_steps_with_a_rebuild_equals_the_share_of_evicted_states() -> None:
    shape = Shape(replicas=1, sessions=400, rate=1.0, capacity=100)
    record = Fleet(ROUND, shape, 0).run(60.0)
    found = record.between(20.0, 60.0)
    assert found["rebuilt"] / found["steps"] == pytest.approx(0.75, abs=0.02)


def test_excess_steps_are_refused_and_leave_no_state() -> None:
    few = replace(ROUND, max_queue=4, windows=((1.0, 50e-3), (64.0, 50e-3), (512.0, 50e-3)))
    shape = Shape(replicas=1, sessions=200, rate=2.0, warm=False)
    fleet = Fleet(few, shape, 0)
    record = fleet.run(3.0)
    assert record.refused > 0
    assert record.answered + record.refused == record.asked
    assert fleet.replicas[1].states.resident == sum(record.rebuilt) < shape.sessions
