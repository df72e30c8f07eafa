"""Who is resident: session by session, and by the sizes of a population."""

from __future__ import annotations

import numpy as np
import pytest

from research.scaling.memory import Found, Population, StateCache
from research.scaling.skew import resident, skew, weights

USES = 40_000


def test_a_state_cache_drops_who_was_unused_for_longest() -> None:
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
def test_a_population_finds_as_many_resident_as_a_state_cache_with_names(room: int) -> None:
    random = np.random.default_rng(0)
    cache, population = StateCache(room), Population(1000, room, np.random.default_rng(1))
    named = [cache.use(int(session)) for session in random.integers(0, 1000, USES)]
    counted = [population.use(0) for _ in range(USES)]
    share = named[USES // 2 :].count(Found.RESIDENT) / (USES // 2)
    assert share == pytest.approx(room / 1000, abs=0.02)
    assert counted.count(Found.RESIDENT) / USES == pytest.approx(share, abs=0.02)


def test_sessions_that_join_are_away_until_they_step_and_go_as_they_are() -> None:
    population = Population(100, 1000, np.random.default_rng(0))
    population.join(100)
    assert (population.sessions, population.away, population.resident) == (200, 100, 100)
    found = [population.use(0) for _ in range(2000)]
    assert found.count(Found.AWAY) == 100
    assert (population.away, population.resident) == (0, 200)
    population.leave(50)
    assert (population.sessions, population.resident) == (150, 150)


@pytest.mark.parametrize("exponent", [0.6, 1.0])
def test_the_approximation_for_hot_sessions_is_what_a_state_cache_does(exponent: float) -> None:
    first, rest = weights(2000, exponent)
    assert first.sum() + rest == pytest.approx(1.0)
    cache, random = StateCache(200), np.random.default_rng(0)
    found = [cache.use(int(session)) for session in random.choice(2000, USES, p=first)]
    share = found[USES // 2 :].count(Found.RESIDENT) / (USES // 2)
    assert resident(first, rest, 2000, 200) == pytest.approx(share, abs=0.02)


def test_shares_of_ranks_that_are_not_placed_one_by_one_add_up() -> None:
    first, rest = weights(3_000_000, 0.8)
    whole = np.arange(1, 3_000_001, dtype=np.float64) ** -0.8
    assert rest == pytest.approx(whole[1_000_000:].sum() / whole.sum(), rel=1e-6)
    assert first[0] == pytest.approx(whole[0] / whole.sum(), rel=1e-6)


def test_no_session_steps_more_often_than_one_step_after_another() -> None:
    found = skew(100_000, 10, 5000.0, 1.2, most_per_s=200.0)
    assert found.hottest_per_s == pytest.approx(200.0)
    assert 1.0 < found.busiest < skew(100_000, 10, 5000.0, 1.2).busiest
