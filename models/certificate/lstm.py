"""The LSTM's contraction, by comparison with a 2 x 2 matrix.

**The box.** A unit's h is less than 1; hence its gates are at most so far open: f <= f^, i <= i^, o <= o^, |g| <= g^;
hence |c| <= c^ = i^ g^ / (1 - f^) and |h| <= o^ tanh(c^); and again, which only ever shrinks the box. Every iterate
bounds all states that are reached from zero, for all admissible inputs.

**Two states** (c, h) and (c~, h~) in the box, one input. Write `df = f - f~` and so on; then

    dc' = f dc + c~ df + g di + i~ dg        dh' = o (tanh c' - tanh c~') + tanh(c~') do

and by the mean value theorem on the box, which is convex, `|df| <= F |W_f dh|` unit by unit, F the greatest slope of
the sigmoid within reach (1/4 at most), likewise I, O, and G for tanh. So with `|.|` the 2-norm or the maximum norm,

    |dc'| <= max(f^) |dc| + a |dh|,                  a = |c^ F W_f| + |g^ I W_i| + |i^ G W_g|
    |dh'| <= max(o^ f^) |dc| + (a_o + b) |dh|,       b = |tanh(c^) O W_o|, a_o: as a, rows scaled by o^

(products of vectors and matrices scale rows). With p > 0 the Perron vector of this matrix and r its spectral radius,
max(|dc| / p_1, |dh| / p_2) shrinks by r at each step.

Kin: Bonassi, Terzi, Farina, Scattolini, "LSTM neural networks: input to state stability" (2020); Miller and Hardt,
"Stable recurrent models" (2019), whose condition in the maximum norm makes both row sums of this matrix < 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.certificate.admissible import Inputs, Matrix, Reach, Vector, product_above
from models.certificate.layer_bound import LayerBound, Norm
from models.reference import sigmoid

RULES: dict[Norm, str] = {"2": "lstm_comparison_2", "inf": "lstm_comparison_inf"}

ITERATIONS = 100
SETTLED = 1e-13

SATURATED = 1e-9
"""A forget gate that may come this close to 1 leaves c without a bound worth the name: the factor is then >= 1."""

POSITIVE = 1e-9
"""Added to the comparison matrix, so that its Perron vector is positive and weighs a norm."""


def lstm_bound(weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Inputs) -> LayerBound:
    """weight_ih: (4H, I), weight_hh: (4H, H), bias: (4H), both biases added; gates in the order i, f, g, o.

    The smaller factor of the two norms.
    """
    box = _Box.settle(weight_ih, weight_hh, bias, inputs)
    candidates = [(*perron(box.matrix(weight_hh, norm)), norm) for norm in RULES]
    factor, (cell_weight, output_weight), norm = min(candidates, key=lambda candidate: candidate[0])
    return LayerBound(
        factor=max(factor, 1.0) if box.saturated.any() else factor,
        rule=RULES[norm],
        norm=norm,
        reach=(box.h, np.where(box.saturated, np.inf, box.c)),
        weights=(float(output_weight), float(cell_weight)),
    )


def perron(matrix: Matrix) -> tuple[float, Vector]:
    """Spectral radius and Perron vector, its greatest entry 1, of a 2 x 2 matrix of positive entries."""
    (a, b), (c, d) = matrix
    half, slant = (a - d) / 2, np.hypot((a - d) / 2, np.sqrt(b) * np.sqrt(c))
    root = float((a + d) / 2 + slant)
    vector = np.array([b, slant - half]) if d > a else np.array([slant + half, c])  # root - a, or root - d
    return root, vector / vector.max()


@dataclass(frozen=True, slots=True)
class _Box:
    """What every unit stays within: gates i, f, o and candidate g (H each), and the slopes that they meet."""

    reach: tuple[Reach, Reach, Reach, Reach]
    c: Vector
    h: Vector
    saturated: NDArray[np.bool_]

    @classmethod
    def settle(cls, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Inputs) -> _Box:
        hidden = weight_hh.shape[1]
        driven, magnitude = inputs.reach(weight_ih, bias), np.abs(weight_hh)
        h = np.ones(hidden)
        for _ in range(ITERATIONS):
            reach = driven.wider(product_above(magnitude, h))
            i, f, g, o = (reach[rows : rows + hidden] for rows in range(0, 4 * hidden, hidden))
            room = sigmoid(-f.high)  # 1 - f^
            saturated = room < SATURATED
            c = sigmoid(i.high) * np.tanh(g.magnitude()) / np.where(saturated, SATURATED, room)
            shown = np.where(saturated, 1.0, np.tanh(c))
            box = cls((i, f, g, o), c, sigmoid(o.high) * shown, saturated)
            if np.all(h - box.h <= SETTLED):
                break
            h = np.minimum(h, box.h)
        return box

    def matrix(self, weight_hh: Matrix, norm: Norm) -> Matrix:
        """The comparison matrix in the norm; the maximum norm takes whole rows together."""
        i, f, g, o = self.reach
        w_i, w_f, w_g, w_o = np.split(weight_hh, 4)
        open_i, open_f, open_o = (sigmoid(gate.high) for gate in (i, f, o))
        cell = (
            (self.c * f.sigmoid_slope(), w_f),
            (np.tanh(g.magnitude()) * i.sigmoid_slope(), w_i),
            (open_i * g.tanh_slope(), w_g),
        )
        shown = (*((open_o * scale, w) for scale, w in cell), (np.tanh(self.c) * o.sigmoid_slope(), w_o))
        gain = _spectral_sum if norm == "2" else _row_sum
        matrix = np.array([[open_f.max(), gain(cell)], [(open_o * open_f).max(), gain(shown)]])
        return matrix + POSITIVE


def _spectral_sum(terms: tuple[tuple[Vector, Matrix], ...]) -> float:
    """The sum of |scale W|_2."""
    return float(sum(np.linalg.norm(scale[:, None] * weight, 2) for scale, weight in terms))


def _row_sum(terms: tuple[tuple[Vector, Matrix], ...]) -> float:
    """The greatest row sum of all |scale W| together."""
    return float(np.max(sum(scale * np.abs(weight).sum(axis=1) for scale, weight in terms)))
