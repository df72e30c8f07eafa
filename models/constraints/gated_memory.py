"""Constrains LSTM and GRU to a contraction: caps the memory gate and shrinks the recurrent matrix.

The set of weights that the certificate accepts is not convex, and no cheap projection to its nearest point is known.
Weights beyond the limit are changed to feasible ones in two steps, which shrink as little as they can:

1. The memory gate (LSTM forget, GRU update) is kept under a cap for every input, by its bias and by the rows of its
   input matrix, which leaves room for the recurrent matrix. The caps are spread over the units, from a memory of two
   tokens to as long as the limit allows: a unit that forgets fast leaves more room for the state's influence.
2. The recurrent matrix is shrunk in three ways, and the result nearest to the original is kept: row by row, by
   projection onto weighted l1 balls, for the bounds by unit that suit the matrix (Perron's) or that suit any matrix;
   and as a whole by one factor, which is best if the rule in the 2-norm allows the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wane.models.constraints.comparison import Comparison, Drive, perron_vector
from wane.models.constraints.layer import Recurrence

ROOM = 1.0
"""How far the memory gate's bias stays below the cap's pre-activation, so that the input can still open the gate."""

LEAST_MEMORY = 0.5
"""The smallest cap, as a share of the contraction."""

MOST_MEMORY = 0.97
"""The greatest cap, as a share of the contraction; the rest is room for the recurrent matrix."""

TOUCHED = 2e-5
"""Relative excess over the target above which a layer is changed, so that float32 rounding changes nothing."""

ROUNDS = 4
"""Rounds of shrinking rows: a smaller matrix has a smaller box and other deciding cases of its gates."""

LEAST_HALVINGS = 2.0**-9
"""The first shrinking that is tried, by 0.14 %: one optimiser step rarely needs more."""

MOST_HALVINGS = 128
"""Lower limit of the scale: float32's largest values are about 2^128."""

BISECTIONS = 6
STEPS_BACK = 4


def hold(recurrence: Recurrence, target: float, make: Callable[[Drive, Tensor], Comparison]) -> Tensor:
    """Makes a layer contractive by at most `target`, in place; returns the greatest |h| of each unit, (H) float64.

    make: the cell's comparison with a recurrent matrix.
    """
    comparison = make(recurrence.drive(), recurrence.matrix.double())
    if fits(comparison, target * (1 + TOUCHED)):
        return comparison.h
    cap_memory_gate(recurrence, target)
    drive = recurrence.drive()
    shrunk = nearest(recurrence.matrix.double(), lambda matrix: make(drive, matrix), target)
    recurrence.matrix.copy_(shrunk)
    return make(drive, recurrence.matrix.double()).h


def fits(comparison: Comparison, target: float) -> bool:
    """Whether one of the rules proves a factor of at most `target`."""
    return perron_vector(comparison, target)[0] <= target or comparison.two_norm() <= target


def cap_memory_gate(recurrence: Recurrence, target: float) -> None:
    """Keeps the memory gate (rows H..2H), as far as input and biases determine it, under its unit's cap.

    Keeps its bias ROOM below the cap, then shrinks the rows of the input matrix that still exceed it. Lowering the
    bias alone would close the gate for all tokens because of one token that opens it.
    """
    hidden = recurrence.matrix.shape[1]
    rows = slice(hidden, 2 * hidden)
    spread = torch.linspace(math.log(1 - LEAST_MEMORY * target), math.log(1 - MOST_MEMORY * target), hidden)
    limit = torch.logit(1 - spread.exp()).to(recurrence.bias)
    input_bias = recurrence.input_bias[rows]
    bias = torch.minimum(input_bias + recurrence.bias[rows], limit - ROOM)
    recurrence.bias[rows] = bias - input_bias
    swing = (recurrence.greatest[rows] - input_bias).clamp(min=1e-12)
    shrink = ((limit - bias) / swing).clamp(max=1.0).float()
    recurrence.input_matrix[rows] *= shrink[:, None]
    for bound in (recurrence.least, recurrence.greatest):
        bound[rows] = input_bias + (bound[rows] - input_bias) * shrink


def nearest(matrix: Tensor, make: Callable[[Tensor], Comparison], target: float) -> Tensor:
    """Returns the shrunk matrix nearest to `matrix` that fits."""

    def by_unit(scaled: Tensor) -> bool:
        return perron_vector(make(scaled), target)[0] <= target

    def by_any_rule(scaled: Tensor) -> bool:
        return fits(make(scaled), target)

    comparison = make(matrix)
    best = torch.zeros_like(matrix)
    for bounds in (comparison.even(), perron_vector(comparison)[1]):
        rows = matrix
        for _ in range(ROUNDS):
            held = make(rows)
            if bool((held.step(bounds) <= target * bounds).all()):
                break
            rows = held.rows_held(bounds, target)
        rows = way_back(shrink(rows, by_unit), matrix, by_unit)
        if (rows - matrix).norm() < (best - matrix).norm():
            best = rows
    # A common factor is searched for only if it can come as close to the matrix.
    as_far = float((best - matrix).norm() / matrix.norm())
    return shrink(matrix, by_any_rule) if by_any_rule((1 - as_far) * matrix) else best


def way_back(held: Tensor, matrix: Tensor, fitting: Callable[[Tensor], bool]) -> Tensor:
    """Moves from `held`, which fits, back towards `matrix` as far as it still fits, to a sixteenth of the way."""
    kept, lost = 0.0, 1.0
    for _ in range(STEPS_BACK):
        middle = (kept + lost) / 2
        kept, lost = (middle, lost) if fitting(held.lerp(matrix, middle)) else (kept, middle)
    return held.lerp(matrix, kept)


def shrink(matrix: Tensor, fitting: Callable[[Tensor], bool]) -> Tensor:
    """Returns the matrix times about the largest scale 2^-t <= 1 that fits, or zeros if no scale fits.

    Doubles t until it is large enough, then bisects.
    """
    if fitting(matrix):
        return matrix
    few, many = 0.0, LEAST_HALVINGS
    while not fitting(matrix * math.exp2(-many)):
        few, many = many, 2 * many
        if many > MOST_HALVINGS:
            return torch.zeros_like(matrix)
    for _ in range(BISECTIONS):
        middle = (few + many) / 2
        few, many = (few, middle) if fitting(matrix * math.exp2(-middle)) else (middle, many)
    return matrix * math.exp2(-many)
