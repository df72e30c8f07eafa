"""The GRU's contraction, proved by comparison. As in torch, the reset gate r multiplies q, the product of matrix and
state plus a bias:

    r = sigma(U_r x + W_r h + d_r),  z = sigma(U_z x + W_z h + d_z),  q = W_n h + d_n
    n = tanh(U_n x + b_n + r * q),   h' = (1 - z) * n + z * h

**The box.** h' is a convex combination of n and h. From the zero state, |h| is therefore at most n^, the greatest |n|,
unit by unit. The box is computed by iteration from |n| < 1: the bound of h bounds r and q, the bounds of r and q bound
n, and the bound of n bounds h. No iteration enlarges the box.

**Two states** h, h~ in the box, inputs x and x~. Let `dh = h - h~`, and likewise for the other values. Then

    h' - h~' = z (h - h~) + (1 - z) (n - n~) + (z - z~) (h~ - n~) = z~ (h - h~) + (1 - z~) (n - n~) + (z - z~) (h - n)

By symmetry, z may be taken as the smaller of its two values. Let m be its pre-activation and Z(m) the sigmoid's
greatest slope at or above m. Then `|z - z~| <= Z(m) y_z` (`gates.py`), where y_z <= |W_z dh| + |U_z dx| unit by
unit. y_r and y_n are defined likewise. R is the greatest slope of r's sigmoid within the box and N that of tanh. q^,
r^, h^ and n^ are the greatest |q|, r, |h| and |n|, so |h - n| <= h^ + n^. Then

    |n - n~| <= N (|U_n dx| + r^ |W_n dh| + q^ R y_r),   as r q - r~ q~ = r (q - q~) + q~ (r - r~)

**Elementwise comparison**: `|dh'| <= max over m of z(m) |dh| + (1 - z(m)) |dn| + (h^ + n^) Z(m) y_z` unit by unit. This
map reduces a maximum norm that is weighted by unit (`models/certificate/perron_vector.py`).

**2-norm**: z^ and z_ are the greatest and the least z. z is at most max z^ in the first term, and 1 - z is at most
max(1 - z_) in the second. The factor adds the worst cases of the terms, although they may not occur together:

    factor = max z^ + |(1 - z_) N r^ W_n| + |(1 - z_) N q^ R W_r| + |Z (h^ + n^) W_z|

Related: Bonassi, Farina, Scattolini, "On the stability properties of gated recurrent units neural networks" (2021).

**One step in a window** (`moved`): the bound is that of the gated cell (`gated.py`), with z in place of f and n in
place of z. n depends on `r * q`, whose distance from the run's value is at most `r~ dq + |q| dr`. Here dq and dr bound
the distances of q and r from the run's values, and r~ is the greatest possible value of r in the run.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import Inputs, Reach, Rows
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States, mixed
from wane.models.certificate.deviation import ULP, sigmoid_rise, sigmoid_slope, tanh_rise, tanh_slope
from wane.models.certificate.gates import GatePieces
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, product_above, roundoff
from wane.models.certificate.layer_bound import Errors, Layer, LayerBound, Proof
from wane.models.certificate.norm import Norm
from wane.models.certificate.perron_vector import perron_vector
from wane.models.certificate.perturbation import LinearMap, Perturbation
from wane.models.reference.functions import sigmoid
from wane.models.weights import CellWeights

ITERATIONS = 100
SETTLED = 1e-13


class GruLayer:
    """The proofs of one GRU layer. weight_ih: (3H, I), weight_hh: (3H, H), biases: (3H). The gates' rows are in the
    order r, z, n."""

    def __init__(self, weight_ih: Matrix, weight_hh: Matrix, bias_ih: Vector, bias_hh: Vector, inputs: Inputs) -> None:
        self.hidden = hidden = weight_hh.shape[1]
        r, z, q, n, self.h = _box(weight_ih, weight_hh, bias_ih, bias_hh, inputs)
        self.gate = GatePieces.of(z)
        self.range = (self.h + np.tanh(n.magnitude())) * UP
        self.slope_n = n.tanh_slope() * sigmoid(r.high) * UP, n.tanh_slope() * UP
        self.recalled = q.magnitude()
        self.slope_r = n.tanh_slope() * q.magnitude() * r.sigmoid_slope() * UP
        self.maps = tuple(LinearMap(block) for block in np.split(weight_hh, 3))
        self.into = None if isinstance(inputs, Rows) else tuple(map(inputs.seen_by, np.split(weight_ih, 3)))
        self.enter = np.minimum(sigmoid(-z.low) * UP, 1.0)
        self.kept = min(float(sigmoid(z.high).max()) * UP, 1.0)
        self.switch = self.range * z.sigmoid_slope() * UP
        recurrent = self._scaled(self.maps, self.slope_n[0])
        self.recurrent_gain = sum(each.norm for each in recurrent) * UP
        self.inward = self._scaled(self.into, self.slope_n[1]) if self.into else ()
        two = (self.kept + self.recurrent_gain) * UP
        rows, ones = self._comparison(np.ones(hidden)), np.ones(hidden)
        weighted, weights = perron_vector(self._comparison, hidden)
        proofs = (
            Proof("gru_comparison_2", Norm("2"), two),
            Proof("gru_comparison_inf", Norm("inf"), float(np.max(rows / ones)) * UP),
            Proof("gru_elementwise", Norm("inf", (weights,)), weighted),
        )
        gain = sum(each.norm for each in self.inward) * UP if self.into else None
        self.bound = LayerBound(proofs, (self.h,), gain)
        self.cap = Perturbation.within(2 * self.h)

    def _scaled(self, maps: tuple[LinearMap, ...], slope_n: Vector) -> tuple[LinearMap, ...]:
        """Returns the linear maps from dh to dh' through r, z and n. Each row is scaled by the greatest slopes of its
        unit and, for r and n, by the unit's greatest 1 - z."""
        r, z, n = maps
        return (r.scaled(self.enter * self.slope_r), z.scaled(self.switch), n.scaled(self.enter * slope_n))

    def _comparison(self, bounds: Vector) -> Vector:
        """Returns unit-by-unit bounds of dh after one step, from the bounds before it, for equal inputs. If the bounds
        before the step are multiplied by a positive number, the result is multiplied by the same number."""
        r, z, n = (each.magnitude @ bounds for each in self.maps)
        return self._combined(bounds, (self.slope_n[0] * n + self.slope_r * r) * UP, z)

    def _combined(self, h: Vector, n: Vector, z: Vector) -> Vector:
        ends = [keep * h + (1 - keep) * n for keep in (self.gate.low, self.gate.high)]
        bound: Vector = np.max(np.maximum(*ends) + self.gate.slope * (self.range * z), axis=0) * UP
        return bound

    def start(self) -> Errors:
        return Errors((Perturbation.within(self.h),))

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        h = errors.perturbations[0]
        r, z, n = (each.rows_of(h) for each in self.maps)
        n = self.slope_n[0] * n
        ball = self.kept * h.ball + self.recurrent_gain * h.ball
        if self.into is not None and fed is not None:
            fed_r, fed_z, fed_n = (each.rows_of(fed) for each in self.into)
            r, z, n = r + fed_r, z + fed_z, n + self.slope_n[1] * fed_n
            ball += sum(each(fed).ball for each in self.inward)
        moved = np.minimum((n + self.slope_r * r) * UP, self.range)
        after = Perturbation.within(self._combined(h.box, moved, z), ball * UP)
        return Errors((after.cut(self.cap),), (), errors.steps + 1)

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        return Errors(perturbations)

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        r, z, n = np.split(before_gates, 3)
        reset = self.slope_r * r + self.slope_n[1] * self.recalled * (function + 2 * unit)
        candidate = self.slope_n[1] * n + reset + function
        return (Perturbation.within(candidate + self.range * (self.gate.slope.max(axis=0) * z + function) + 4 * unit),)


def _box(
    weight_ih: Matrix, weight_hh: Matrix, bias_ih: Vector, bias_hh: Vector, inputs: Inputs
) -> tuple[Reach, Reach, Reach, Reach, Vector]:
    """Returns the ranges of the pre-activations of r, z and n, the range of q, and the greatest |h|, for all states
    reached from the zero state."""
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
        reached = np.minimum(np.tanh(n.magnitude()) * UP, 1.0)
        settled = bool(np.all(h - reached <= SETTLED))
        h = np.minimum(h, reached)
        if settled:
            break
    return r, z, q, n, h


def _candidate(driven: Reach, r: Reach, q: Reach) -> Reach:
    """Returns the range of `driven + r * q`. r is positive, so the extremes of the product are at the ends of the
    ranges of r and q."""
    opens = sigmoid(r.low), sigmoid(r.high)
    low = np.minimum(opens[0] * q.low, opens[1] * q.low)
    high = np.maximum(opens[0] * q.high, opens[1] * q.high)
    product = Reach(low, high)
    return driven.plus(product.wider(roundoff(1) * product.magnitude()))


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    (w_ih, b_ih), (w_hh, b_hh) = cell.input, cell.recurrent
    return GruLayer(w_ih, w_hh, b_ih, b_hh, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    h = state[0]
    recalled = [Pre.of(linear, h, error[0]) for linear in step.recurrent]
    reset, keep, q = pre[0] + recalled[0], pre[1] + recalled[1], recalled[2]
    r, dr = sigmoid(reset.value), sigmoid_rise(reset.value, reset.radius)
    widest = sigmoid(reset.value + reset.radius)
    rounding = ULP * (np.abs(pre[2].value) + np.abs(q.value))
    value = pre[2].value + r * q.value
    radius = pre[2].radius + widest * q.radius + dr * np.abs(q.value) + rounding
    slope = tanh_slope(value, radius)
    resetting = np.abs(q.value) * sigmoid_slope(reset.value, reset.radius)
    switching = sigmoid_slope(keep.value, keep.radius)
    return mixed(
        (h, error[0]),
        (
            sigmoid(keep.value),
            sigmoid_rise(keep.value, keep.radius),
            np.tanh(value),
            tanh_rise(value, radius),
        ),
        lambda scale: keep.ball(scale * switching),
        lambda scale: (
            pre[2].ball(scale * slope)
            + q.ball(scale * slope * widest)
            + reset.ball(scale * slope * resetting)
            + np.linalg.norm(scale * slope * rounding, axis=1)
        ),
    )
