"""The GRU's contraction, by a scalar comparison. The reset gate stands after the matrix, as torch has it:

    r = sigma(U_r x + W_r h + d_r),  z = sigma(U_z x + W_z h + d_z),  q = W_n h + d_n
    n = tanh(U_n x + b_n + r * q),   h' = (1 - z) * n + z * h

**The box.** h' is a convex combination of n and h, so from the zero state |h| <= n^, the greatest |n|, unit by unit;
|n| < 1 to begin with, and then: a box for h bounds r and q, hence n, hence h; this only ever shrinks the box.

**Two states** h, h~ in the box, one input:

    h' - h~' = z (h - h~) + (1 - z) (n - n~) + (z - z~) (h~ - n~)

(check: the terms in z h~ and z n~ cancel). With R, Z the greatest slopes of the sigmoids and N that of tanh
within reach, unit by unit, and q^ the greatest |q|, r^ the greatest r:

    |n - n~| <= N |r q - r~ q~| <= N (r^ |W_n dh| + q^ R |W_r dh|),   as r q - r~ q~ = r (q - q~) + q~ (r - r~)
    |z - z~| |h~ - n~| <= Z (h^ + n^) |W_z dh|

2-norm: z <= max z^ on the first term and 1 - z <= max(1 - z_) on the second, each at its own worst,

    factor = max z^ + |(1 - z_) N r^ W_n| + |(1 - z_) N q^ R W_r| + |Z (h^ + n^) W_z|

Maximum norm: unit by unit the first two terms are z + (1 - z) A, A = N (r^ |W_n| + q^ R |W_r|) by rows, linear in z, so
greatest at an end of its range: factor = max over units of max(z^ + (1 - z^) A, z_ + (1 - z_) A) + C, C the last
term's row.

Kin: Bonassi, Farina, Scattolini, "On the stability properties of gated recurrent units neural networks" (2021).
"""

from __future__ import annotations

import numpy as np

from models.certificate.admissible import Inputs, Matrix, Reach, Vector, product_above, roundoff
from models.certificate.layer_bound import LayerBound
from models.reference import sigmoid

ITERATIONS = 100
SETTLED = 1e-13


def gru_bound(weight_ih: Matrix, weight_hh: Matrix, bias_ih: Vector, bias_hh: Vector, inputs: Inputs) -> LayerBound:
    """weight_ih: (3H, I), weight_hh: (3H, H), biases: (3H); gates in the order r, z, n. The smaller of two norms."""
    hidden = weight_hh.shape[1]
    gates = slice(0, 2 * hidden)
    added = bias_ih.copy()
    added[gates] += bias_hh[gates]
    driven, magnitude = inputs.reach(weight_ih, added), np.abs(weight_hh)
    recalled_bias = bias_hh[2 * hidden :]

    h = np.ones(hidden)
    for _ in range(ITERATIONS):
        radius = product_above(magnitude, h)
        r, z = (driven[rows].wider(radius[rows]) for rows in (slice(hidden), slice(hidden, 2 * hidden)))
        q = Reach(recalled_bias, recalled_bias).wider(radius[2 * hidden :])
        n = _candidate(driven[slice(2 * hidden, 3 * hidden)], r, q)
        n_bound = np.tanh(n.magnitude())
        if np.all(h - n_bound <= SETTLED):
            break
        h = np.minimum(h, n_bound)

    w_r, w_z, w_n = np.split(weight_hh, 3)
    keep_low, keep_high = sigmoid(z.low), sigmoid(z.high)
    slope = n.tanh_slope()
    terms = ((slope * sigmoid(r.high), w_n), (slope * q.magnitude() * r.sigmoid_slope(), w_r))
    switching = z.sigmoid_slope() * (h + n_bound)

    enter = sigmoid(-z.low)  # the greatest 1 - z
    two = float(
        keep_high.max()
        + sum(np.linalg.norm((enter * scale)[:, None] * weight, 2) for scale, weight in terms)
        + np.linalg.norm(switching[:, None] * w_z, 2)
    )
    row = np.sum([scale * np.abs(weight).sum(axis=1) for scale, weight in terms], axis=0)
    kept = np.maximum(keep_high + sigmoid(-z.high) * row, keep_low + enter * row)
    maximum = float(np.max(kept + switching * np.abs(w_z).sum(axis=1)))
    if two <= maximum:
        return LayerBound(two, "gru_comparison_2", "2", (h,))
    return LayerBound(maximum, "gru_comparison_inf", "inf", (h,))


def _candidate(driven: Reach, r: Reach, q: Reach) -> Reach:
    """How far `driven + r * q` reaches: r is positive, so the product is extreme at the corners."""
    opens = sigmoid(r.low), sigmoid(r.high)
    low = np.minimum(opens[0] * q.low, opens[1] * q.low)
    high = np.maximum(opens[0] * q.high, opens[1] * q.high)
    product = Reach(low, high)
    return driven.plus(product.wider(roundoff(1) * product.magnitude()))
