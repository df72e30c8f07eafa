"""Tests the theorem: if the change of each logit is bounded, the total variation of the distributions before and after
the change is at most the computed bound."""

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
def test_every_change_of_the_logits_within_their_bounds_is_within_the_bound_of_the_variation(
    seed: int, tokens: int, spread: float, size: float, loose: float, off: float
) -> None:
    """Changes the logits up and down within their bounds. The mean of the changes, weighted with the probabilities, is
    at most `off` in absolute value."""
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


def test_the_bound_for_small_changes_is_half_of_their_mean() -> None:
    generator = np.random.default_rng(0)
    shares, moved = generator.dirichlet(np.ones(50)), generator.uniform(0, 2e-6, 50)
    assert variation_by_token(shares, moved) == pytest.approx(shares @ moved / 2, rel=1e-5)


def test_a_large_change_of_a_rare_token_adds_at_most_its_possible_probability() -> None:
    """Uses a token whose probability of 0.001 may grow by the factor e^2. The probabilities of the other tokens hardly
    change."""
    shares, moved = np.array([0.6, 0.399, 0.001]), np.array([1e-3, 1e-3, 2.0])
    said = variation_by_token(shares, moved)
    assert said < 0.001 * (np.exp(2) - 1)
    assert said < np.tanh(1) / 100


@pytest.mark.parametrize("moved", [np.array([0.0, 800.0]), np.array([np.inf, 0.0])])
def test_an_unbounded_change_has_the_bound_one(moved: np.ndarray) -> None:
    assert variation_by_token(np.array([0.5, 0.5]), moved) == 1


def test_the_bound_is_zero_if_no_logit_changes() -> None:
    assert variation_by_token(np.array([0.25, 0.75]), np.zeros(2)) == 0
