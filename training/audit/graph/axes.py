"""The axes of a tensor in an ONNX graph, and sizes that are known only when the graph runs.

Reshape and Transpose nodes move axes. An axis is therefore a tuple of `Dimension`s, each of which has its place in one
of the graph's inputs or is the features: an axis of batch times time consists of two, an axis of length 1 of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEATURES = "features"
"""The name of the dimension that a matrix multiplies."""


MOST_NAMES, LARGEST_NUMBER = 64, 2**63 - 1
"""The largest number of dimensions in a product of sizes, and the largest number before them, which is that of int64. A
hostile graph may square a size again and again."""


class AxesError(ValueError):
    """Raised if the axes of a node's result are not those of its input in another arrangement."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is known only when the graph runs: `number` times the sizes of the dimensions `names`, sorted."""

    number: int
    names: tuple[str, ...]

    def __mul__(self, other: object) -> int | Size:
        number, names = (other.number, other.names) if isinstance(other, Size) else (other, ())
        if not isinstance(number, int):
            return NotImplemented
        return size_of(self.number * number, (*self.names, *names))

    __rmul__ = __mul__


def size_of(number: int, names: Sequence[str]) -> int | Size:
    """Returns a product of a number and the sizes of dimensions, as a plain number if it has no dimensions. Raises
    AxesError if the product is too long or too large."""
    if len(names) > MOST_NAMES or abs(number) > LARGEST_NUMBER:
        raise AxesError(f"it multiplies more than {MOST_NAMES} sizes, or to a number above {LARGEST_NUMBER:,}")
    return Size(number, tuple(sorted(names))) if names and number else number


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of a tensor. size: its size, or None if it is known only when the graph runs."""

    name: str
    size: int | None


Axis = tuple[Dimension, ...]
Axes = tuple[Axis, ...]


def size(axis: Axis) -> int | Size:
    """Returns the size of an axis."""
    number = 1
    for dimension in axis:
        number *= dimension.size or 1
    return size_of(number, [dimension.name for dimension in axis if dimension.size is None])


def features(width: int) -> Axis:
    """Returns the axis of `width` features."""
    return (Dimension(FEATURES, width),)


def is_features(axis: Axis) -> bool:
    """Whether the axis consists of the features alone."""
    return len(axis) == 1 and axis[0].name == FEATURES


def transpose(axes: Axes, order: Sequence[int] | None) -> Axes:
    """Returns the axes in another order, the reverse one by default. Raises AxesError."""
    order = range(len(axes) - 1, -1, -1) if order is None else order
    if sorted(order) != list(range(len(axes))):
        raise AxesError(f"its order {list(order)} does not fit {len(axes)} axes")
    return tuple(axes[place] for place in order)


def squeeze(axes: Axes, places: Sequence[int]) -> Axes:
    """Returns the axes without those at `places`, which have length 1. Raises AxesError."""
    gone = {_place(place, len(axes)) for place in places}
    if any(axes[place] for place in gone):
        raise AxesError("it removes an axis whose length is not 1")
    return tuple(axis for place, axis in enumerate(axes) if place not in gone)


def unsqueeze(axes: Axes, places: Sequence[int]) -> Axes:
    """Returns the axes with axes of length 1 at `places` of the result. Raises AxesError."""
    rank = len(axes) + len(places)
    new = {_place(place, rank) for place in places}
    if len(new) < len(places):
        raise AxesError("it names an axis twice")
    others = iter(axes)
    return tuple(() if place in new else next(others) for place in range(rank))


def flatten(axes: Axes, place: int) -> Axes:
    """Returns two axes: the product of those before `place`, and the product of the others."""
    place = place + len(axes) if place < 0 else place
    return tuple(tuple(one for axis in part for one in axis) for part in (axes[:place], axes[place:]))


def reshape(axes: Axes, shape: Sequence[int | Size], *, allow_zero: bool = False) -> Axes:
    """Returns axes of the sizes `shape`. As in ONNX, -1 stands for what is left, and 0 for the size of the axis at the
    same place, unless `allow_zero`. Raises AxesError if an axis would be a part of a dimension."""
    targets = [
        size(axes[place]) if target == 0 and not allow_zero and place < len(axes) else target
        for place, target in enumerate(shape)
    ]
    left = [dimension for axis in axes for dimension in axis]
    unknown = targets.index(-1) if -1 in targets else len(targets)
    before = [_take(left, target, last=place == len(targets) - 1) for place, target in enumerate(targets[:unknown])]
    left.reverse()
    after = [_take(left, target, last=place == 0)[::-1] for place, target in enumerate(targets[:unknown:-1])]
    rest = tuple(reversed(left))
    if unknown < len(targets):
        return (*before, rest, *reversed(after))
    if rest:
        raise AxesError("it has another number of elements than its input")
    return tuple(before)


def _take(left: list[Dimension], target: int | Size, *, last: bool) -> Axis:
    """Removes the first dimensions whose product is `target` from `left`, and returns them. last: whether the axis is
    the last one, which has the features even if their width is 1."""
    taken: list[Dimension] = []
    while size(tuple(taken)) != target or (last and left and left[0].size == 1):
        if not left:
            raise AxesError("it splits or joins the axes in a way that Wane cannot follow")
        taken.append(left.pop(0))
    return tuple(taken)


def _place(place: int, rank: int) -> int:
    if not -rank <= place < rank:
        raise AxesError(f"it names the axis {place} of {rank}")
    return place % rank
