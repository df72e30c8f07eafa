"""Tests of `GateProducts`. A vector is multiplied elementwise k times by the same row of a table of gates. For each k,
`GateProducts` finds the greatest length of the product over all rows of the table. The test computes the length of the
product for every row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wane.models.certificate.gates import GateProducts
from wane.models.reference.functions import sigmoid


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 60),
    units=st.integers(1, 12),
    spread=st.floats(0.05, 6),
    level=st.floats(-3, 6),
    cap=st.sampled_from([0.9, 1.0]),
    closed=st.booleans(),
)
def test_the_longest_product_is_found(
    seed: int, rows: int, units: int, spread: float, level: float, cap: float, closed: bool
) -> None:
    generator = np.random.default_rng(seed)
    table = np.minimum(sigmoid(spread * generator.normal(size=(rows, units)) + level), cap)
    table[:, :1] *= not closed
    start = generator.uniform(0, 1, units)
    length, powers = GateProducts(table, start), np.tile(start, (rows, 1))
    for k in range(1, 201):
        powers = powers * table
        expected = float(np.linalg.norm(powers, axis=1).max())
        assert expected * (1 - 1e-12) <= length(k) <= expected * (1 + 1e-9) + 1e-138
