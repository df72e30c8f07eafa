"""Compares the simulation of one replica with the simulation of a whole fleet, which simulates every session."""

from __future__ import annotations

import numpy as np
import pytest

from research.scaling.fleet import Fleet, Shape
from research.scaling.sample import Sample
from research.scaling.shard import response_times
from tests.research.scaling.costs import ROUND

SESSIONS, REPLICAS, RATE, HELD = 10_000, 10, 0.4, 256
LOST_S, UNTIL_S = 6.0, 16.0


@pytest.fixture(scope="module")
def whole() -> Fleet:
    """Simulates each of ten thousand sessions on ten replicas. One replica is lost."""
    shape = Shape(replicas=REPLICAS, sessions=SESSIONS, rate=RATE, tokens=HELD)
    fleet = Fleet(ROUND, shape, 0)
    fleet.run(UNTIL_S, [(LOST_S, lambda: fleet.kill(1, back=False))])
    return fleet


@pytest.fixture(scope="module")
def sampled_replicas(whole: Fleet) -> list[Sample]:
    """Simulates one of the nine remaining replicas several times. The inputs of this simulation are the durations of
    trips to the store and the number of sessions that move to the replica."""
    shard = whole.shards[0]
    trips = sum(replica.trips for replica in whole.replicas.values()) / UNTIL_S
    trips_s = response_times(ROUND, trips, shard.commands / UNTIL_S / trips, 20_000, 0)
    more = round(SESSIONS / REPLICAS / (REPLICAS - 1))
    made = []
    for seed in range(4):
        sample = Sample(
            ROUND,
            sessions=SESSIONS // REPLICAS,
            away=0,
            rate=RATE,
            capacity=SESSIONS,
            held=HELD,
            trips_s=trips_s,
            seed=seed,
        )
        sample.run(UNTIL_S, [(LOST_S, lambda sample=sample: sample.states.join(more))])  # type: ignore[misc]
        made.append(sample)
    return made


@pytest.mark.parametrize(("begin_s", "end_s"), [(1.0, LOST_S), (LOST_S + 0.5, UNTIL_S)])
def test_latencies_agree_before_and_after_a_replica_is_lost(
    whole: Fleet, sampled_replicas: list[Sample], begin_s: float, end_s: float
) -> None:
    full = whole.record.between(begin_s, end_s)
    some = [sample.record.between(begin_s, end_s) for sample in sampled_replicas]
    assert np.mean([one["p50_ms"] for one in some]) == pytest.approx(full["p50_ms"], rel=0.08)
    assert np.mean([one["p99_ms"] for one in some]) == pytest.approx(full["p99_ms"], rel=0.15)


def test_both_simulations_rebuild_as_many_states(whole: Fleet, sampled_replicas: list[Sample]) -> None:
    full = whole.record.between(LOST_S, UNTIL_S)
    some = [sample.record.between(LOST_S, UNTIL_S) for sample in sampled_replicas]
    moved = np.mean([one["rebuilt"] for one in some]) * (REPLICAS - 1)
    assert moved == pytest.approx(full["rebuilt"], rel=0.12)
    assert full["rebuilt"] == pytest.approx(SESSIONS / REPLICAS * -np.expm1(-RATE * (UNTIL_S - LOST_S)), rel=0.1)


def test_both_simulations_answer_as_many_steps(whole: Fleet, sampled_replicas: list[Sample]) -> None:
    full = whole.record.between(1.0, LOST_S)["steps_per_s"]
    some = [sample.record.between(1.0, LOST_S)["steps_per_s"] for sample in sampled_replicas]
    assert np.mean(some) * REPLICAS == pytest.approx(full, rel=0.05)


def test_no_step_is_lost_or_counted_twice(sampled_replicas: list[Sample]) -> None:
    for sample in sampled_replicas:
        assert sample.record.answered + sample.record.refused == sample.record.asked
        states = sample.states
        assert states.away >= 0 and states.resident + states.away == states.sessions


def test_the_same_seed_gives_the_same_result() -> None:
    def one(seed: int) -> list[float]:
        trips_s = np.array([1e-3])
        sample = Sample(ROUND, sessions=100, away=50, rate=1.0, capacity=100, held=HELD, trips_s=trips_s, seed=seed)
        return sample.run(5.0).taken_s

    assert one(1) == one(1) != one(2)
