"""Constrains an LSTM or a GRU to a contraction factor: limits the memory gate and shrinks the recurrent matrix.

The set of weights that the certificate accepts is not convex, and no cheap projection to its nearest point is known.
Weights that the certificate would not accept are changed to feasible ones in two steps. Each step shrinks the weights
as little as its method allows:

1. The part of the memory gate (LSTM forget, GRU update) that input and biases determine is limited to a cap, for every
   input. To this end, the gate's bias and the rows of its input matrix are reduced. The cap is below the target
   contraction factor, so that the recurrent matrix need not be zero. The units have different caps, from a memory of
   two tokens to the longest memory that the target allows. A unit that forgets fast may have larger entries in the
   recurrent matrix.
2. The recurrent matrix is shrunk in three ways, and the result nearest to the original is kept. Two of them project row
   by row onto weighted l1 balls. One uses the Perron vector of this matrix as weights, the other uses weights that suit
   any matrix. The third way multiplies the whole matrix by one factor. It is best if the rule in the 2-norm gives the
   smallest factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wane.models.constraints.comparison import Comparison, Drive, perron_vector
from wane.models.constraints.layer import Recurrence

ROOM = 1.0
"""The memory gate's bias is at least this much below the cap's pre-activation, so that the input can still raise the
gate up to the cap."""

LEAST_MEMORY = 0.5
"""The smallest cap, as a share of the target contraction factor."""

MOST_MEMORY = 0.97
"""The greatest cap, as a share of the target contraction factor. The remaining share is for the recurrent matrix."""

TOUCHED = 2e-5
"""A layer is changed if its contraction factor exceeds the target by more than this relative amount, which is larger
than float32 rounding."""

ROUNDS = 4
"""The number of times that the rows are shrunk. After each time, the states have smaller bounds, and other intervals of
the gates may give the largest bounds."""

LEAST_HALVINGS = 2.0**-9
"""The first exponent t for which `shrink` tests the scale 2^-t. The scale shrinks the matrix by 0.14 %. After one
optimiser step, a smaller scale is rarely needed."""

MOST_HALVINGS = 128
"""The largest exponent t that `shrink` tests. Float32's largest values are about 2^128."""

BISECTIONS = 6
STEPS_BACK = 4


def hold(recurrence: Recurrence, target: float, make: Callable[[Drive, Tensor], Comparison]) -> Tensor:
    """Changes a layer's weights in place so that its contraction factor is at most `target`. Returns the greatest |h|
    of each unit, (H) float64.

    make: a function that builds the cell's comparison from a recurrent matrix and the other terms of the
    pre-activations (`Drive`).
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
    """Returns whether one of the rules proves a contraction factor of at most `target`."""
    return perron_vector(comparison, target)[0] <= target or comparison.two_norm() <= target


def cap_memory_gate(recurrence: Recurrence, target: float) -> None:
    """Limits the memory gate (rows H to 2H) to each unit's cap, in place. Only the part of its pre-activation that
    input and biases determine is limited.

    The gate's bias is limited to ROOM below the cap's pre-activation. Then those rows of the input matrix for which an
    input still exceeds the cap are shrunk. If only the bias were lowered, a single token with a large input could
    require a bias so low that the gate is nearly closed for all other tokens.
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
    """Returns the nearest to `matrix` of the feasible matrices that the three ways of shrinking find."""

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
    """Returns the feasible matrix between `held`, which is feasible, and `matrix` that is nearest to `matrix`. The
    search has a resolution of a sixteenth of the distance."""
    kept, lost = 0.0, 1.0
    for _ in range(STEPS_BACK):
        middle = (kept + lost) / 2
        kept, lost = (middle, lost) if fitting(held.lerp(matrix, middle)) else (kept, middle)
    return held.lerp(matrix, kept)


def shrink(matrix: Tensor, fitting: Callable[[Tensor], bool]) -> Tensor:
    """Returns the matrix times approximately the largest scale 2^-t <= 1 for which the product is feasible. Returns
    zeros if it is feasible for no tested scale.

    Doubles t until the result is feasible, then finds t by bisection.
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
