"""Tests the theorem: the change of a feed-forward layer's output is within its bound, and so is the difference between
this change and that of the linear approximation."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.models.certificate.test_layer_norm import within
from wane.models.certificate.deviation import Linear
from wane.models.certificate.feed_forward import FeedForward

FLOAT64 = 1e-12


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    hidden=st.integers(1, 6),
    wide=st.integers(1, 8),
    size=st.floats(-3, 1.5),
    batch=st.sampled_from((1, 3)),
    by_unit=st.booleans(),
)
def test_the_output_and_its_non_linearity_are_within_the_bounds(
    seed: int, hidden: int, wide: int, size: float, batch: int, by_unit: bool
) -> None:
    """Samples inputs in a box. In some cases, the layer is also given a bound of the change of each hidden unit."""
    generator = np.random.default_rng(seed)
    inner = Linear(generator.normal(size=(wide, hidden)), generator.normal(size=wide))
    layer = FeedForward(inner, Linear(generator.normal(size=(hidden, wide)), generator.normal(size=hidden)))
    x = generator.normal(size=(batch, hidden))
    box = 10**size * generator.uniform(0, 1, (batch, hidden))
    units = box @ inner.magnitude.T
    fed = layer(x, np.linalg.norm(box, axis=1), (lambda entries: units[:, entries]) if by_unit else None)

    def run(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return layer.outer(np.maximum(layer.inner(rows), 0))

    g = generator.normal(size=(batch, hidden))
    linear, left = fed.pull(g, np.arange(batch))
    for row in range(batch):
        moved = within(box[row], generator)
        apart = run(x[row] + moved) - fed.value[row]
        scale = FLOAT64 * 10 ** max(size, 0)
        assert np.linalg.norm(apart, axis=1).max() <= fed.ball[row] + scale * np.linalg.norm(layer.outer.weight)
        beside = apart @ g[row] - moved @ linear[row]
        assert np.abs(beside).max() <= left[row] + scale * np.linalg.norm(g[row])


def test_a_relu_unit_that_changes_sign_attains_its_bound() -> None:
    layer = FeedForward(Linear(np.ones((1, 1))), Linear(np.ones((1, 1))))
    fed = layer(np.array([[0.5]]), np.array([2.0]))
    slope, left = fed.pull(np.ones((1, 1)), np.zeros(1, np.intp))
    np.testing.assert_allclose((slope[0, 0], left[0]), (2.5 / 4, 1.5 / 2), rtol=1e-12)
    seen = [max(0.5 + moved, 0) - 0.5 - slope[0, 0] * moved for moved in (-2.0, -0.5, 2.0)]
    np.testing.assert_allclose(seen, (0.75, -0.1875, 0.75), rtol=1e-12)
