"""What a tensor of an ONNX graph is, as far as `graph.py` follows the graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.layer_registry import Kind
from wane.training.audit.graph.axes import Axes, features

Matrix = NDArray[np.floating]


LARGEST_PRODUCT = 1 << 27
"""The greatest number of elements of a product of two matrices of a file."""


def product(one: Matrix, other: Matrix) -> Matrix:
    """Returns the product of a matrix with a matrix or a vector, in float64. Raises ValueError if it has too many
    elements."""
    count = one.shape[0] * (other.shape[1] if other.ndim > 1 else 1)
    if count > LARGEST_PRODUCT:
        raise ValueError(f"the product of two matrices has {count:,} numbers, more than {LARGEST_PRODUCT:,}")
    found: Matrix = one.astype(np.float64) @ other
    return found


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that does not depend on the inputs' values. An array of objects has sizes that are known only when the
    graph runs (`axes.Size`). name: the tensor's name in the file, or the names of those that it was computed from."""

    array: NDArray[Any]
    name: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor of any shape whose elements are all `value`. source: the name of the graph's input that is replaced by
    zeros, if there is one."""

    value: float
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input, perhaps with its axes in another arrangement. whole: whether its type is an integer."""

    name: str
    axes: Axes
    whole: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent layer. weights: by torch's names (`weight_ih_l0`, ...), float32, in torch's layouts and gate orders.
    names: their names in the file. node: the name of the layer's node."""

    kind: Kind
    units: int
    weights: dict[str, Matrix]
    names: dict[str, str]
    node: str


@dataclass(frozen=True, slots=True)
class Stage:
    """What the network computes up to a tensor: the embedding, the layers, and an affine map after them.

    table: the embedding's matrix (V, E), or None if the tokens are one-hot. matrix: (outputs, inputs), or None for the
    identity. bias: (outputs), or None for zeros. names: the file's names of the table, the matrix and the bias, by
    these words. time: the name of the dimension that the layers run along. last: whether only the last token's values
    are left. ending: the function after the affine map (Softmax, LogSoftmax), or None. starts: the names of graph
    inputs that are initial states. one_hot_input: whether the graph's input is one-hot tokens, not their numbers.
    """

    tokens: Input
    vocabulary: int
    width: int
    table: Matrix | None = None
    cells: tuple[Cell, ...] = ()
    matrix: Matrix | None = None
    bias: Matrix | None = None
    names: dict[str, str] = field(default_factory=dict)
    time: str | None = None
    last: bool = False
    ending: str | None = None
    starts: tuple[str, ...] = ()
    one_hot_input: bool = False

    def multiplied(self, matrix: Constant) -> Stage:
        """Returns the stage after a product with a matrix (outputs, inputs). Products of two matrices of the file are
        computed in float64."""
        names, width = dict(self.names), len(matrix.array)
        part = "matrix" if self.cells else "table"
        names[part] = f"{matrix.name} @ {names[part]}" if part in names else matrix.name
        bias = None
        if self.bias is not None:
            bias = product(matrix.array, self.bias)
            names["bias"] = f"{matrix.name} @ {names['bias']}"
        if self.cells:
            new = matrix.array if self.matrix is None else product(matrix.array, self.matrix)
            return replace(self, matrix=new, bias=bias, names=names, width=width)
        table = matrix.array.T if self.table is None else product(self.table, matrix.array.T)
        if bias is not None:
            table = table + bias
            names["table"] += f" + {names.pop('bias')}"
        return replace(self, table=table, bias=None, names=names, width=width)

    def shifted(self, bias: Constant, sign: int = 1) -> Stage:
        """Returns the stage after the sum with a vector, or with one number for all features."""
        vector = np.broadcast_to(bias.array.reshape(-1), (self.width,)) * bias.array.dtype.type(sign)
        names, part = dict(self.names), "bias" if self.cells or self.table is None else "table"
        names[part] = f"{names[part]} {'+' if sign > 0 else '-'} {bias.name}" if part in names else bias.name
        if part == "table":
            return replace(self, table=self.table + vector, names=names)
        return replace(self, bias=vector if self.bias is None else self.bias + vector.astype(np.float64), names=names)

    def scaled(self, factors: Constant, power: int = 1) -> Stage | None:
        """Returns the stage after a product (`power` 1) or a quotient (-1) with a vector, or with one number for all
        features. Returns None for one-hot tokens."""
        vector = np.broadcast_to(factors.array.reshape(-1), (self.width,)).astype(np.float64) ** power
        if not self.cells:
            if self.table is None:
                return None
            return replace(self, table=self.table * vector, names=_times(self.names, "table", factors, power))
        matrix = np.diag(vector) if self.matrix is None else self.matrix * vector[:, None]
        bias = None if self.bias is None else self.bias * vector
        return replace(self, matrix=matrix, bias=bias, names=_times(self.names, "matrix", factors, power))


@dataclass(frozen=True, slots=True)
class Rows:
    """A computed tensor, one of whose axes is the features."""

    axes: Axes
    stage: Stage


@dataclass(frozen=True, slots=True)
class Unknown:
    """A tensor that Wane's networks do not have. reason: which node computes it, and what Wane lacks."""

    reason: str


Value = Constant | Filled | Input | Rows | Unknown


def one_hot(tokens: Input, axes: Axes, width: int, *, given: bool = False) -> Rows:
    """Returns one-hot tokens, with the features as the last axis. given: whether the graph's input is one-hot."""
    return Rows((*axes, features(width)), Stage(tokens, width, width, one_hot_input=given))


def _times(names: dict[str, str], part: str, factors: Constant, power: int) -> dict[str, str]:
    sign = "*" if power > 0 else "/"
    return names | {part: f"{names[part]} {sign} {factors.name}" if part in names else factors.name}
