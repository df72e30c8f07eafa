from __future__ import annotations

import numpy as np
import pytest

from models.admissible import Box, Normalised, Reach, Rows
from models.reference import layer_norm, sigmoid

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
    reached = layer_norm(GENERATOR.normal(size=(20_000, 4)) * 10, gain, shift) @ WEIGHT.T + BIAS
    assert np.all(reached <= reach.high)
    assert np.all(reached >= reach.low)
    worst = layer_norm(1e6 * WEIGHT * gain, gain, shift) @ WEIGHT.T + BIAS
    np.testing.assert_allclose(np.diag(worst), reach.high, rtol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(-3.0, -1.0), (-1.0, 2.0), (0.5, 4.0), (2.0, 2.0)])
def test_slopes_are_the_greatest_derivatives_on_the_interval(low: float, high: float) -> None:
    points = np.linspace(low, high, 10_001)
    reach = Reach(np.array([low]), np.array([high]))
    slopes = sigmoid(points) * (1 - sigmoid(points))
    assert reach.sigmoid_slope()[0] == pytest.approx(slopes.max(), rel=1e-6)
    assert reach.tanh_slope()[0] == pytest.approx((1 - np.tanh(points) ** 2).max(), rel=1e-6)
    assert reach.magnitude()[0] == max(abs(low), abs(high))
