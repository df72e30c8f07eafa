"""Compares the mixture with transition tables with a simple implementation of its definition."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from tests.training.test_ranking import QUERIES, SIZE, train
from wane.training.rankings.transitions import LENGTHS, PARTS, Transitions, fit, lengths_of, mixed


def shares(lists: list[list[int]], query: list[int], part: str) -> list[float]:
    """Returns the distribution of one part after `query`, as the module's docstring defines it."""
    after: dict[tuple[int, int], float] = defaultdict(float)
    near: dict[tuple[int, int], float] = defaultdict(float)
    for events in lists:
        for at, event in enumerate(events):
            for other in range(len(events)):
                if 0 < abs(other - at) <= 10:
                    near[event, events[other]] += 1 / abs(other - at)
            if at:
                after[events[at - 1], event] += 1

    def share(table: dict[tuple[int, int], float], event: int, other: int) -> float:
        return table[event, other]

    if part == "next":
        found = [share(after, query[-1], event) for event in range(SIZE)]
    elif part == "near":
        found = [share(near, query[-1], event) for event in range(SIZE)]
    elif part == "before":
        earlier = query[-2:-10:-1]
        found = [sum(share(near, one, event) / lag for lag, one in enumerate(earlier, 1)) for event in range(SIZE)]
    else:
        ages = list(enumerate(reversed(query), start=1))
        found = [sum(1 / age for age, one in ages if one == event) for event in range(SIZE)]
    total = sum(found)
    return [value / total for value in found] if total else found


@pytest.mark.parametrize("part", PARTS[1:])
def test_each_part_equals_its_definition(part: str) -> None:
    sessions, lists = train()
    found = Transitions(sessions, SIZE).shares([np.array(query) for query in QUERIES], part)
    for row, query in enumerate(QUERIES):
        assert found[row].tolist() == pytest.approx(shares(lists, query, part))


def test_the_mixture_is_a_distribution_and_a_part_without_counts_leaves_its_weight_to_the_model() -> None:
    sessions, lists = train()
    tables, queries = Transitions(sessions, SIZE), [np.array(query) for query in QUERIES]
    weights = ((0.4, 0.1, 0.2, 0.1, 0.2),) * LENGTHS
    model = np.log(np.random.default_rng(1).dirichlet(np.ones(SIZE), len(QUERIES)))
    found = np.exp(mixed(tables, weights, queries, model))
    assert found.sum(1) == pytest.approx(np.ones(len(QUERIES)))
    for row, query in enumerate(QUERIES):
        parts = [shares(lists, query, part) for part in PARTS[1:]]
        left = 0.4 + sum(weight for weight, own in zip(weights[0][1:], parts, strict=True) if not any(own))
        expected = left * np.exp(model[row]) + weights[0][1:] @ np.array(parts)
        assert found[row].tolist() == pytest.approx(expected.tolist())
    assert lengths_of(queries).tolist() == [0, 1, 0, 3, 3]


def test_the_fit_finds_the_weights_that_made_the_positions() -> None:
    random, made = np.random.default_rng(2), np.array([0.5, 0.1, 0.2, 0.15, 0.05])
    chosen = random.choice(len(PARTS), 4000, p=made)
    parts = np.where(np.arange(len(PARTS)) == chosen[:, None], 0.5, 1e-6)
    fitted = np.array(fit(parts, np.zeros(4000, np.int64)))
    assert fitted[0] == pytest.approx(made, abs=0.03)
    some = np.array(fit(parts, np.zeros(4000, np.int64), ("model", "own")))
    assert some[0, 1:4].tolist() == [0, 0, 0]
    assert some[0].sum() == pytest.approx(1)
