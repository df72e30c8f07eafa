from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from wane.models.certificate.admissible import Box, Normalised, Reach, Rows
from wane.models.reference.functions import layer_norm, sigmoid

GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(5, 4))
BIAS = GENERATOR.normal(size=5)


def test_over_rows_the_reach_is_the_exact_extreme() -> None:
    rows = GENERATOR.normal(size=(9000, 4))  # more than are multiplied at once
    reached = rows @ WEIGHT.T + BIAS
    reach = Rows(rows).reach(WEIGHT, BIAS)
    np.testing.assert_allclose(reach.low, reached.min(axis=0))
    np.testing.assert_allclose(reach.high, reached.max(axis=0))


def test_over_a_box_the_reach_is_attained_at_a_corner() -> None:
    bound = np.array([0.5, 1.0, 2.0, 0.0])
    reach = Box(bound).reach(WEIGHT, BIAS)
    corners = np.sign(WEIGHT) * bound
    np.testing.assert_allclose(reach.high, np.sum(WEIGHT * corners, axis=1) + BIAS)
    np.testing.assert_allclose(reach.low, -np.sum(WEIGHT * corners, axis=1) + BIAS)


def test_behind_a_layer_norm_the_reach_holds_and_is_nearly_attained() -> None:
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
    """`weight x + bias` in rational arithmetic."""
    return [
        sum((Fraction(float(w)) * Fraction(float(v)) for w, v in zip(row, x, strict=True)), Fraction(float(b)))
        for row, b in zip(weight, bias, strict=True)
    ]


def test_over_rows_the_reach_holds_where_terms_cancel() -> None:
    x, bias = np.array([1e10, 30.0, 1e10]), np.array([0.1, -(2.0**60)])
    within(Rows(x[None]).reach(CANCELLING, bias), exactly(CANCELLING, x, bias))


def test_over_a_box_and_behind_a_layer_norm_the_reach_holds_where_terms_cancel() -> None:
    bound, bias = np.array([0.1, 0.7, 0.3]), np.array([-4e9, -(2.0**60)])
    for sign in (-1, 1):
        corners = sign * np.sign(CANCELLING) * bound
        extremes = [exactly(CANCELLING, corner, bias)[row] for row, corner in enumerate(corners)]
        within(Box(bound).reach(CANCELLING, bias), extremes)
    shift = np.array([1e10, 30.0, 1e10])
    within(Normalised(np.zeros(3), shift).reach(CANCELLING, bias), exactly(CANCELLING, shift, bias))


def test_behind_a_layer_norm_rows_that_hardly_vary_are_known_as_far_as_float64_knows_them() -> None:
    """A row of equal entries normalises to 0, in float64 to the rounding of its mean over sqrt(1e-5)."""
    rough = Rows.normalised(np.full((1, 23), 1e12 / 3), np.ones(23), np.zeros(23), 1e-5)
    within(rough.reach(np.eye(23), np.zeros(23)), [Fraction(0)] * 23)


def test_a_tanh_s_slope_far_out_is_not_rounded_to_nothing() -> None:
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
