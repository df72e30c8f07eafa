from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from wane.models.certificate.admissible import Box, Normalised, Reach, Rows
from wane.models.reference.functions import layer_norm, sigmoid

GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(5, 4))
BIAS = GENERATOR.normal(size=5)


def test_the_reach_over_the_rows_of_an_embedding_is_exact() -> None:
    rows = GENERATOR.normal(size=(9000, 4))  # 9000 rows are computed in several batches
    reached = rows @ WEIGHT.T + BIAS
    reach = Rows(rows).reach(WEIGHT, BIAS)
    np.testing.assert_allclose(reach.low, reached.min(axis=0))
    np.testing.assert_allclose(reach.high, reached.max(axis=0))


def test_the_reach_over_a_box_is_attained_at_a_corner() -> None:
    bound = np.array([0.5, 1.0, 2.0, 0.0])
    reach = Box(bound).reach(WEIGHT, BIAS)
    corners = np.sign(WEIGHT) * bound
    np.testing.assert_allclose(reach.high, np.sum(WEIGHT * corners, axis=1) + BIAS)
    np.testing.assert_allclose(reach.low, -np.sum(WEIGHT * corners, axis=1) + BIAS)


def test_the_reach_after_a_layer_norm_holds_and_is_nearly_attained() -> None:
    gain, shift = GENERATOR.normal(size=4), GENERATOR.normal(size=4)
    reach = Normalised(gain, shift).reach(WEIGHT, BIAS)
    reached = layer_norm(GENERATOR.normal(size=(20_000, 4)) * 10, gain, shift, 1e-5) @ WEIGHT.T + BIAS
    assert np.all(reached <= reach.high)
    assert np.all(reached >= reach.low)
    worst = layer_norm(1e6 * WEIGHT * gain, gain, shift, 1e-5) @ WEIGHT.T + BIAS
    np.testing.assert_allclose(np.diag(worst), reach.high, rtol=1e-6)


CANCELLING = np.array([[1e10, 1.0, -1e10], [2.0**60, 3.0, 1.0]])


def within(reach: Reach, exact: list[Fraction]) -> None:
    for low, value, high in zip(reach.low, exact, reach.high, strict=True):
        assert Fraction(float(low)) <= value <= Fraction(float(high))


def exactly(weight: np.ndarray, x: np.ndarray, bias: np.ndarray) -> list[Fraction]:
    """Computes `weight x + bias` in rational arithmetic."""
    return [
        sum((Fraction(float(w)) * Fraction(float(v)) for w, v in zip(row, x, strict=True)), Fraction(float(b)))
        for row, b in zip(weight, bias, strict=True)
    ]


def test_the_reach_over_rows_holds_for_cancelling_terms() -> None:
    x, bias = np.array([1e10, 30.0, 1e10]), np.array([0.1, -(2.0**60)])
    within(Rows(x[None]).reach(CANCELLING, bias), exactly(CANCELLING, x, bias))


def test_the_reach_over_a_box_and_after_a_layer_norm_holds_for_cancelling_terms() -> None:
    bound, bias = np.array([0.1, 0.7, 0.3]), np.array([-4e9, -(2.0**60)])
    for sign in (-1, 1):
        corners = sign * np.sign(CANCELLING) * bound
        extremes = [exactly(CANCELLING, corner, bias)[row] for row, corner in enumerate(corners)]
        within(Box(bound).reach(CANCELLING, bias), extremes)
    shift = np.array([1e10, 30.0, 1e10])
    within(Normalised(np.zeros(3), shift).reach(CANCELLING, bias), exactly(CANCELLING, shift, bias))


def test_normalised_rows_of_equal_entries_include_their_rounding() -> None:
    """Uses a row of equal entries. The exact LayerNorm of this row is 0. In float64, the result is the rounding error
    of the mean, divided by sqrt(1e-5)."""
    rough = Rows.normalised(np.full((1, 23), 1e12 / 3), np.ones(23), np.zeros(23), 1e-5)
    within(rough.reach(np.eye(23), np.zeros(23)), [Fraction(0)] * 23)


def test_the_slope_of_a_saturated_tanh_does_not_underflow() -> None:
    slope = Reach(np.array([25.0]), np.array([30.0])).tanh_slope()[0]
    assert slope == pytest.approx(4 * np.exp(-50), rel=1e-9, abs=0)


@pytest.mark.parametrize(("low", "high"), [(-3.0, -1.0), (-1.0, 2.0), (0.5, 4.0), (2.0, 2.0)])
def test_slopes_are_the_greatest_derivatives_on_the_interval(low: float, high: float) -> None:
    points = np.linspace(low, high, 10_001)
    reach = Reach(np.array([low]), np.array([high]))
    slopes = sigmoid(points) * (1 - sigmoid(points))
    assert reach.sigmoid_slope()[0] == pytest.approx(slopes.max(), rel=1e-6)
    assert reach.tanh_slope()[0] == pytest.approx((1 - np.tanh(points) ** 2).max(), rel=1e-6)
    assert reach.magnitude()[0] == max(abs(low), abs(high))
