"""Constrains LSTM and GRU to a contraction: caps the memory gate and shrinks the recurrent matrix.

The set of weights that the certificate accepts is not convex, and no cheap projection to its nearest point is known.
Weights beyond the limit are changed to feasible ones in two steps. Each step shrinks the weights as little as it can:

1. The memory gate (LSTM forget, GRU update) is kept under a cap for every input. The cap limits its bias and the rows
   of its input matrix, which leaves room for the recurrent matrix. The caps of the units are spread from a memory of
   two tokens to the longest memory that the limit allows. A unit that forgets fast leaves more room for the state's
   influence.
2. The recurrent matrix is shrunk in three ways, and the result nearest to the original is kept. Two of them project row
   by row onto weighted l1 balls. One uses bounds by unit that suit this matrix (Perron's), the other uses bounds that
   suit any matrix. The third way multiplies the whole matrix by one factor, which is best if the rule in the 2-norm
   allows the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wane.models.constraints.comparison import Comparison, Drive, perron_vector
from wane.models.constraints.layer import Recurrence

ROOM = 1.0
"""The distance of the memory gate's bias below the cap's pre-activation, so that the input can still open the gate."""

LEAST_MEMORY = 0.5
"""The smallest cap, as a share of the contraction."""

MOST_MEMORY = 0.97
"""The greatest cap, as a share of the contraction. The rest is room for the recurrent matrix."""

TOUCHED = 2e-5
"""The relative excess over the target above which a layer is changed. Float32 rounding stays below it."""

ROUNDS = 4
"""The number of times that the rows are shrunk. After each time, the matrix has a smaller box, and other cases of its
gates may decide."""

LEAST_HALVINGS = 2.0**-9
"""The first exponent that is tried. It shrinks the matrix by 0.14 %. One optimiser step rarely needs more."""

MOST_HALVINGS = 128
"""The largest exponent that is tried. Float32's largest values are about 2^128."""

BISECTIONS = 6
STEPS_BACK = 4


def hold(recurrence: Recurrence, target: float, make: Callable[[Drive, Tensor], Comparison]) -> Tensor:
    """Makes a layer contractive by at most `target`, in place. Returns the greatest |h| of each unit, (H) float64.

    make: builds the cell's comparison from a recurrent matrix.
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
    """Keeps the part of the memory gate (rows H..2H) that input and biases determine under the unit's cap.

    The gate's bias is kept ROOM below the cap. Then the rows of the input matrix that still exceed the cap are shrunk.
    Lowering only the bias would close the gate for all tokens because of one token that opens it.
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
    """Returns the feasible matrix that is nearest to `matrix` among the candidates."""

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
    # The search for a common factor runs only if its result can be closer to the matrix than `best`.
    as_far = float((best - matrix).norm() / matrix.norm())
    return shrink(matrix, by_any_rule) if by_any_rule((1 - as_far) * matrix) else best


def way_back(held: Tensor, matrix: Tensor, fitting: Callable[[Tensor], bool]) -> Tensor:
    """Moves from `held`, which is feasible, towards `matrix` as far as the result stays feasible, to a sixteenth of the
    distance."""
    kept, lost = 0.0, 1.0
    for _ in range(STEPS_BACK):
        middle = (kept + lost) / 2
        kept, lost = (middle, lost) if fitting(held.lerp(matrix, middle)) else (kept, middle)
    return held.lerp(matrix, kept)


def shrink(matrix: Tensor, fitting: Callable[[Tensor], bool]) -> Tensor:
    """Returns the matrix times approximately the largest feasible scale 2^-t <= 1, or zeros if no scale is feasible.

    Doubles t until the result is feasible, then bisects.
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
