"""Tests the theorem: the total variation of distributions is bounded by the changes of their logits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wane.models.certificate.total_variation import variation_by_token

FLOAT64 = 1e-14


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(2, 12),
    spread=st.floats(0, 6),
    size=st.floats(-4, 1.2),
    loose=st.sampled_from((1.0, 1.5)),
    off=st.sampled_from((0.0, 1e-3, 0.3)),
)
def test_every_move_within_its_bounds_is_within_the_variation(
    seed: int, tokens: int, spread: float, size: float, loose: float, off: float
) -> None:
    """Uses the largest moves within their bounds, up or down, corrected by their mean."""
    generator = np.random.default_rng(seed)
    shares = np.exp(generator.normal(size=tokens) * spread)
    shares /= shares.sum()
    moves = 10**size * np.sign(generator.normal(size=(200, tokens))) * generator.uniform(0.2, 1, (200, tokens))
    moves += off * generator.uniform(-1, 1, (200, 1)) - (moves @ shares)[:, None]
    for move in moves:
        other = shares * np.exp(move)
        other /= other.sum()
        seen = np.abs(other - shares).sum() / 2
        said = variation_by_token(shares, loose * np.abs(move), off)
        assert seen <= said + FLOAT64
        assert said <= 1 + 1e-8


def test_two_tokens_that_swap_attain_the_bound() -> None:
    shares = np.array([0.5, 0.5])
    assert variation_by_token(shares, np.array([0.7, 0.7])) == pytest.approx(np.tanh(0.35), rel=1e-8)


def test_small_moves_count_by_half_their_mean() -> None:
    generator = np.random.default_rng(0)
    shares, moved = generator.dirichlet(np.ones(50)), generator.uniform(0, 2e-6, 50)
    assert variation_by_token(shares, moved) == pytest.approx(shares @ moved / 2, rel=1e-5)


def test_a_rare_token_with_a_large_move_costs_its_possible_share() -> None:
    """Uses a token of probability 0.001 that may grow by e^2, and others that hardly move."""
    shares, moved = np.array([0.6, 0.399, 0.001]), np.array([1e-3, 1e-3, 2.0])
    said = variation_by_token(shares, moved)
    assert said < 0.001 * (np.exp(2) - 1)
    assert said < np.tanh(1) / 100


@pytest.mark.parametrize("moved", [np.array([0.0, 800.0]), np.array([np.inf, 0.0])])
def test_an_unbounded_move_gives_a_variation_of_one(moved: np.ndarray) -> None:
    assert variation_by_token(np.array([0.5, 0.5]), moved) == 1


def test_without_moves_the_variation_is_zero() -> None:
    assert variation_by_token(np.array([0.25, 0.75]), np.zeros(2)) == 0
