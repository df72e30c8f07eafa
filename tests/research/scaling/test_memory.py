"""Tests of the two simulations of the resident states. One simulates an LRU cache of the states of individual sessions.
The other only counts how many sessions of a population have a resident state, and how many have none."""

from __future__ import annotations

import numpy as np
import pytest

from research.scaling.memory import Found, Population, StateCache
from research.scaling.skew import resident, skew, weights

USES = 40_000


def test_a_state_cache_evicts_the_least_recently_used_session() -> None:
    cache = StateCache(2)
    assert [cache.use(session) for session in (1, 2, 1, 3, 2)] == [
        Found.AWAY,
        Found.AWAY,
        Found.RESIDENT,
        Found.AWAY,
        Found.REMEMBERED,
    ]
    assert cache.resident == 2


@pytest.mark.parametrize("room", [100, 500, 900])
def test_a_population_has_the_hit_rate_of_a_state_cache(room: int) -> None:
    random = np.random.default_rng(0)
    cache, population = StateCache(room), Population(1000, room, np.random.default_rng(1))
    named = [cache.use(int(session)) for session in random.integers(0, 1000, USES)]
    counted = [population.use(0) for _ in range(USES)]
    share = named[USES // 2 :].count(Found.RESIDENT) / (USES // 2)
    assert share == pytest.approx(room / 1000, abs=0.02)
    assert counted.count(Found.RESIDENT) / USES == pytest.approx(share, abs=0.02)


def test_joining_sessions_have_no_resident_state_until_they_step_and_leave_in_proportion() -> None:
    population = Population(100, 1000, np.random.default_rng(0))
    population.join(100)
    assert (population.sessions, population.away, population.resident) == (200, 100, 100)
    found = [population.use(0) for _ in range(2000)]
    assert found.count(Found.AWAY) == 100
    assert (population.away, population.resident) == (0, 200)
    population.leave(50)
    assert (population.sessions, population.resident) == (150, 150)


@pytest.mark.parametrize("exponent", [0.6, 1.0])
def test_the_approximation_for_unequal_session_rates_matches_a_state_cache(exponent: float) -> None:
    first, rest = weights(2000, exponent)
    assert first.sum() + rest == pytest.approx(1.0)
    cache, random = StateCache(200), np.random.default_rng(0)
    found = [cache.use(int(session)) for session in random.choice(2000, USES, p=first)]
    share = found[USES // 2 :].count(Found.RESIDENT) / (USES // 2)
    assert resident(first, rest, 2000, 200) == pytest.approx(share, abs=0.02)


def test_the_share_of_all_remaining_ranks_is_correct() -> None:
    first, rest = weights(3_000_000, 0.8)
    whole = np.arange(1, 3_000_001, dtype=np.float64) ** -0.8
    assert rest == pytest.approx(whole[1_000_000:].sum() / whole.sum(), rel=1e-6)
    assert first[0] == pytest.approx(whole[0] / whole.sum(), rel=1e-6)


def test_one_session_s_rate_is_limited_by_its_sequential_steps() -> None:
    found = skew(100_000, 10, 5000.0, 1.2, most_per_s=200.0)
    assert found.hottest_per_s == pytest.approx(200.0)
    assert 1.0 < found.busiest < skew(100_000, 10, 5000.0, 1.2).busiest
