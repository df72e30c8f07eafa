"""Tests the theorem: if a LayerNorm's input changes by at most a given bound, linear functions of its output change by
at most the computed bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from wane.models.certificate.deviation import Linear
from wane.models.certificate.layer_norm import Between, Normalised

Matrix = NDArray[np.float64]

ONE = np.zeros(1, np.intp)
FLOAT64 = 1e-12
ALL_BUT = 1 - 1e-6


def normalised(x: Matrix, epsilon: float) -> Matrix:
    """Returns the LayerNorm of x, (..., H)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    result: Matrix = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    return result


def corners(box: Matrix) -> Matrix:
    """Returns the corners of a box around 0, (2^I, I). `box` has the largest absolute value of each of the I
    coordinates."""
    return np.array(list(itertools.product((-1.0, 1.0), repeat=len(box)))) * box


def within(box: Matrix, generator: np.random.Generator) -> Matrix:
    """Returns all corners of the box, the same number of points on its edges and faces, and the same number of points
    inside it."""
    edges = corners(box)
    inner = generator.uniform(-1, 1, edges.shape)
    faces = np.where(generator.random(edges.shape) < 0.5, inner * box, edges)
    return np.concatenate([edges, faces, inner * box])


def unit(vector: Matrix) -> Matrix:
    """Returns the vector without its mean, scaled to length 1."""
    centred = vector - vector.mean(axis=-1, keepdims=True)
    result: Matrix = centred / np.linalg.norm(centred, axis=-1, keepdims=True)
    return result


SIZES = {
    "seed": st.integers(0, 2**32 - 1),
    "hidden": st.integers(2, 6),
    "units": st.integers(1, 7),
    "size": st.floats(-3, 1.5),
    "epsilon": st.sampled_from((1e-5, 0.01, 0.25)),
    "offset": st.sampled_from((0.0, 1.0, 1e6)),
}


@settings(max_examples=200, deadline=None)
@given(**SIZES, besides=st.sampled_from((0.0, 0.1, 1.0)))
def test_the_change_of_each_input_of_the_next_layer_is_within_its_bound(
    seed: int, hidden: int, units: int, size: float, epsilon: float, offset: float, besides: float
) -> None:
    """Samples perturbations `S d + e` of the LayerNorm's input x, for each row of a batch. `S` is the matrix of
    `source`, `d` is a point in the box, and the length of `e` is `rest`. Some perturbations are tiny, and some reverse
    the sign of x."""
    generator = np.random.default_rng(seed)
    source, inner = Linear(generator.normal(size=(hidden, units))), generator.normal(size=(3, hidden))
    reader = Linear.behind_norm(inner, np.zeros(3), generator.normal(size=hidden), generator.normal(size=hidden))
    x = generator.normal(size=(2, hidden)) + offset
    box = 10**size * generator.uniform(0, 1, (2, units))
    rest = besides * 10**size * generator.uniform(0, 1, 2)
    norm = Normalised(x, epsilon, source.furthest(box) + rest)
    said = norm.seen_by(Between(reader, source), box, rest, np.arange(len(reader.weight)))
    for row in range(2):
        moved = within(box[row], generator) @ source.weight.T
        besides_it = generator.normal(size=moved.shape)
        moved += rest[row] * besides_it / np.linalg.norm(besides_it, axis=1, keepdims=True)
        seen = (normalised(x[row] + moved, epsilon) - normalised(x[row], epsilon)) @ reader.weight.T
        slack = FLOAT64 * (1 + offset) * reader.rows / np.sqrt(epsilon)
        assert (np.abs(seen).max(axis=0) <= said[row] + slack).all()


@settings(max_examples=200, deadline=None)
@given(**SIZES)
def test_a_function_s_change_is_within_its_gradient_and_second_order(
    seed: int, hidden: int, units: int, size: float, epsilon: float, offset: float
) -> None:
    """Checks two bounds of the change of a linear function of the output. One is the bound of the first-order part,
    plus the bound of the second-order part that `pull` returns. The other is `turned`, which is given the bounds of the
    first-order part and of the change in the direction of x."""
    generator = np.random.default_rng(seed)
    source = Linear(generator.normal(size=(hidden, units)))
    x = generator.normal(size=(1, hidden)) + offset
    box = 10**size * generator.uniform(0, 1, units)
    norm = Normalised(x, epsilon, source.furthest(box[None]))
    g = generator.normal(size=(4, hidden)) * 10 ** generator.uniform(-2, 2, (4, 1))
    rows = np.zeros(4, np.intp)
    gradient, left = norm.pull(g, rows)
    first = np.abs(gradient @ source.weight) @ box
    along = np.repeat(np.abs(norm.along(ONE) @ source.weight) @ box, 4)
    said = np.minimum(first + left, norm.turned(g, rows, first, along))
    moved = within(box, generator) @ source.weight.T
    seen = (normalised(x + moved, epsilon) - normalised(x, epsilon)) @ g.T
    slack = FLOAT64 * (1 + offset) * np.linalg.norm(g, axis=1) / np.sqrt(epsilon)
    assert (np.abs(seen).max(axis=0) <= said + slack).all()


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0, 5.0])
def test_a_move_perpendicular_to_x_attains_the_bound(share: float) -> None:
    """Moves x perpendicularly to itself. In the direction of x, the output then has no first-order change, and its
    whole change attains the bound."""
    generator = np.random.default_rng(0)
    lead, across = unit(generator.normal(size=(2, 8)))
    across = unit(across - lead * (lead @ across))
    x, r = 3 * lead[None], 3 * share
    norm = Normalised(x, 1e-12, np.array([r]))
    said = norm.turned(lead[None], ONE, np.zeros(1), np.zeros(1))[0]
    seen = abs((normalised(x + r * across, 1e-12) - normalised(x, 1e-12)) @ lead)[0]
    assert ALL_BUT * said < seen <= said
    assert seen == pytest.approx(np.sqrt(8) * (1 - 1 / np.sqrt(1 + share**2)))


@pytest.mark.parametrize("closer", [0.1, 0.5, 0.9])
def test_a_move_towards_the_origin_magnifies_the_first_order_part(closer: float) -> None:
    """Shortens x by the share `closer` of its length, and then moves it perpendicularly by a thousandth of the
    remaining length. The resulting change of the output is nearly equal to the bound."""
    generator = np.random.default_rng(1)
    back, across = unit(generator.normal(size=(2, 8)))
    across = unit(across - back * (back @ across))
    x, along, aside = 2 * back[None], 2 * closer, 2e-3 * (1 - closer)
    norm = Normalised(x, 1e-12, np.array([np.hypot(along, aside)]))
    gradient, _ = norm.pull(across[None], ONE)
    first = np.abs(gradient @ across) * aside
    said = norm.turned(across[None], ONE, first, np.array([along]))[0]
    seen = abs((normalised(x - along * back + aside * across, 1e-12) - normalised(x, 1e-12)) @ across)[0]
    assert 0.999 * said < seen <= said
    assert seen > first[0] / (1 - closer) * 0.999


def test_a_direction_is_unbounded_if_x_may_reach_the_origin() -> None:
    generator = np.random.default_rng(2)
    x, g = generator.normal(size=(1, 4)), generator.normal(size=(1, 4))
    norm = Normalised(x, 1e-5, np.array([1e3]))
    assert norm.turned(g, ONE, np.array([1.0]), np.array([1e3]))[0] == np.inf
    _, left = norm.pull(g, ONE)
    assert np.isfinite(left[0]), "the change must be bounded, because the length of a normalised vector is bounded"


def test_a_large_mean_adds_only_its_rounding() -> None:
    """Checks that subtracting the mean a second time removes the rounding error of the first mean."""
    x = np.random.default_rng(3).normal(size=(1, 6))
    near, far = (Normalised(x + offset, 1e-5, np.full(1, 1e-3)) for offset in (0.0, 2.0**30))
    assert far.remainder[0] == pytest.approx(near.remainder[0], rel=1e-3)
    np.testing.assert_allclose(far.value.sum(axis=1), 0, atol=1e-14)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 8), units=st.integers(1, 8))
def test_furthest_bounds_the_image_of_every_corner_of_a_box(seed: int, rows: int, units: int) -> None:
    generator = np.random.default_rng(seed)
    matrix, box = Linear(generator.normal(size=(rows, units))), generator.exponential(size=(3, units))
    said = matrix.furthest(box)
    farthest = [np.linalg.norm(corners(each) @ matrix.weight.T, axis=1).max() for each in box]
    assert (farthest <= said * (1 + 1e-14)).all()
    assert (said <= np.linalg.norm(box @ matrix.magnitude.T, axis=1) * (1 + 1e-14)).all(), (
        "the bound must be at most the length of the vector of the outputs' largest absolute values"
    )


@pytest.mark.parametrize("matrix", [np.diag([1.0, -2, 3]), np.array([[1.0, 2, 3], [4, 5, 6]])], ids=["right", "sharp"])
def test_orthogonal_and_parallel_columns_attain_furthest(matrix: Matrix) -> None:
    box = np.array([0.5, 1, 2])
    assert Linear(matrix).furthest(box[None])[0] == pytest.approx(np.linalg.norm(matrix @ box), rel=1e-14)
