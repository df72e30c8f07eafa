"""Tests of the axes that Reshape and other nodes move."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wane.training.audit.graph.axes import (
    AxesError,
    Dimension,
    Size,
    features,
    flatten,
    reshape,
    size,
    squeeze,
    transpose,
    unsqueeze,
)

TIME, BATCH = Dimension("tokens.0", None), Dimension("tokens.1", None)
ROWS = ((TIME,), (BATCH,), *(features(6),))


def test_a_reshape_joins_and_splits_whole_dimensions() -> None:
    flat = reshape(ROWS, [-1, 6])
    assert flat == ((TIME, BATCH), features(6))
    assert size(flat[0]) == Size(1, ("tokens.0", "tokens.1"))
    assert reshape(flat, [Size(1, ("tokens.0",)), -1, 6]) == ROWS
    assert reshape(ROWS, [0, 0, -1]) == ROWS
    assert reshape(ROWS, [0, 1, Size(1, ("tokens.1",)), 6]) == ((TIME,), (), (BATCH,), features(6))


@pytest.mark.parametrize("shape", [[-1, 3], [6, -1], [-1, 12], [0, 0, 2, 3], [Size(1, ("tokens.1",)), -1, 6], [0, 0]])
def test_a_reshape_that_splits_or_exchanges_dimensions_is_refused(shape: list[int | Size]) -> None:
    with pytest.raises(AxesError):
        reshape(ROWS, shape)


def test_features_of_width_one_are_the_last_axis() -> None:
    assert reshape(((TIME,), features(1)), [-1, 1, 1]) == ((TIME,), (), features(1))


def test_axes_of_length_one_come_and_go() -> None:
    assert squeeze(unsqueeze(ROWS, [1, -1]), [1, 4]) == ROWS
    assert flatten(ROWS, 2) == ((TIME, BATCH), features(6))
    with pytest.raises(AxesError, match="removes an axis whose length is not 1"):
        squeeze(ROWS, [0])
    with pytest.raises(AxesError, match="names the axis 3 of 3"):
        squeeze(ROWS, [3])
    with pytest.raises(AxesError, match="does not fit 3 axes"):
        transpose(ROWS, [0, 1])


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_a_reshape_that_is_followed_moves_numbers_as_numpy_does(sizes: list[int], data: st.DataObject) -> None:
    axes = tuple((Dimension(f"d{place}", each),) for place, each in enumerate(sizes))
    total = math.prod(sizes)
    shape = data.draw(st.lists(st.integers(1, 12), max_size=4).filter(lambda found: total % math.prod(found) == 0))
    shape.insert(data.draw(st.integers(0, len(shape))), -1)
    try:
        found = reshape(axes, list(shape))
    except AxesError:
        return
    array = np.arange(total).reshape(sizes).reshape(shape)
    assert array.shape == tuple(size(axis) for axis in found)
    assert [one for axis in found for one in axis] == [axis[0] for axis in axes]  # the order of the numbers is the same


def test_a_size_that_is_squared_again_and_again_is_refused() -> None:
    squared = size((TIME,))
    with pytest.raises(AxesError, match="multiplies more than 64 sizes"):
        for _ in range(64):
            squared = squared * squared
    large = Size(3, ("tokens.0",))
    with pytest.raises(AxesError, match="to a number above"):
        for _ in range(64):
            large = Size((large * large).number, ("tokens.0",))  # type: ignore[union-attr]
