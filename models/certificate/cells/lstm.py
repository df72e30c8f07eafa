"""The LSTM's contraction, proved by comparison with non-negative matrices.

**The box.** x^ denotes an upper bound of |x|. |h| < 1 bounds the gates and the candidate g: f <= f^, i <= i^, o <= o^,
|g| <= g^. Hence |c| <= c^ = i^ g^ / (1 - f^) and |h| <= h^ = o^ tanh(c^). This bound of |h| is smaller than 1, and from
it the same steps are repeated. Every iteration's box contains all states that are reached from zero, for all admissible
inputs.

**Two states** (c, h) and (c~, h~) in the box, inputs x and x~. Let `df = f - f~`, and likewise for the other values.
Then

    dc' = f dc + c~ df + g di + i~ dg = f~ dc + c df + ...     dh' = o dt + t~ do = o~ dt + t do,   t = tanh(c')

By symmetry, f and o may each be taken as the smaller of its two values. Let m be its pre-activation and F(m) the
sigmoid's greatest slope at or above m. Then `|df| <= F(m) |y_f|` (`gates.py`) and `|y_f| <= |W_f dh| + |U_f dx|`
unit by unit. y_i, y_g and y_o are defined likewise. I is the greatest slope of i's sigmoid within the box and G that of
g's tanh, so |di| <= I |y_i| and |dg| <= G |y_g|. Unit by unit, therefore,

    |dc'| <= max over m of  f(m) |dc| + c^ F(m) y_f  +  g^ I y_i + i^ G y_g
    |dh'| <= max over m of  o(m) |dt| + t^ O(m) y_o,    |dt| <= min(|dc'|, 2 tanh(|dc'| / 2)),   t^ = tanh(c^)

**Elementwise comparison**: with |dt| <= |dc'|, this map of (|dh|, |dc|) reduces a maximum norm that is weighted by unit
(`models/certificate/perron_vector.py`). Its factor is at most that of the 2 x 2 comparison in the maximum norm.

**2 x 2 comparison**: here |.| is the 2-norm or the maximum norm, of a vector and of a matrix. A product of a vector and
a matrix scales the matrix's rows.

    |dc'| <= max(f^) |dc| + a |dh|,                  a = |c^ F W_f| + |g^ I W_i| + |i^ G W_g|
    |dh'| <= max(o^ f^) |dc| + (a_o + b) |dh|,       b = |t^ O W_o|

a_o is like a, with each matrix's rows also scaled by o^.

The 2 x 2 matrix of these factors maps bounds of (|dc|, |dh|) to bounds of (|dc'|, |dh'|). Let p > 0 be its Perron
vector and r its spectral radius. Then each step multiplies max(|dc| / p_1, |dh| / p_2) by at most r.

**Miller and Hardt** ("Stable recurrent models", 2019), in the maximum norm, with f the largest forget gate. If |W_i|,
|W_o| < 1 - f, |W_g| <= (1 - f) / 4 and |W_f| < (1 - f)^2, then |dc'| <= f |dc| + b |dh| with b = |W_f| / (4 (1 - f)) +
|W_i| / 4 + |W_g| < 1 - f, and |dh'| <= |dc'| + |W_o| / 4 |dh|. Hence a step multiplies max(|dc|, |dh|) by at most
f + b + |W_o| / 4. This rule is a baseline for comparison. The factors of the rules above are never larger, except for
the effect of `POSITIVE`.

If a forget gate may come within `SATURATED` of 1 (`LstmBox`), c has no useful bound. No rule, including that of Miller
and Hardt, then states a factor below 1.

Related: Bonassi, Terzi, Farina, Scattolini, "LSTM neural networks: input to state stability" (2020).

**One step in a window** (`moved`): a value with a tilde belongs to the uninterrupted run, and d denotes a bound of the
distance between the two values (`cell_step.py`). f~, i~ and o~ are replaced by their greatest possible values.

    dc' <= f~ dc + |c| df + i~ dg + |g| di,     dh' <= o~ d(tanh c') + |tanh c'| do
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.admissible import Inputs, Reach, Rows
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States
from wane.models.certificate.deviation import longest, sigmoid_rise, sigmoid_slope, tanh_rise, tanh_slope
from wane.models.certificate.gates import GatePieces
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, norm_above, product_above
from wane.models.certificate.layer_bound import Errors, Layer, LayerBound, Proof
from wane.models.certificate.norm import Norm, Order
from wane.models.certificate.perron_vector import perron_vector, perron_vector_2x2
from wane.models.certificate.perturbation import LinearMap, Perturbation
from wane.models.reference.functions import sigmoid
from wane.models.weights import CellWeights

RULES: dict[Order, str] = {"2": "lstm_comparison_2", "inf": "lstm_comparison_inf"}

POSITIVE = 1e-9
"""This number is added to the entries of the 2 x 2 comparison matrix. The matrix's Perron vector is then positive and
defines a norm."""

ITERATIONS = 100
SETTLED = 1e-13

SATURATED = 1e-9
"""If a forget gate may come this close to 1, c has no useful bound. The stated contraction factor is then at least 1.
"""


@dataclass(frozen=True, slots=True)
class LstmBox:
    """The bounds of every unit over all states that are reached from the zero state.

    reach: the ranges of the pre-activations of i, f, g, o.
    c, h: the greatest |c| and |h|, (H) each.
    saturated: (H), whether the unit's forget gate may come within `SATURATED` of 1.
    """

    reach: tuple[Reach, Reach, Reach, Reach]
    c: Vector
    h: Vector
    saturated: NDArray[np.bool_]

    @classmethod
    def settle(cls, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Inputs) -> LstmBox:
        """Shrinks the bounds iteratively from |h| < 1 to their fixed point."""
        hidden = weight_hh.shape[1]
        driven, magnitude = inputs.reach(weight_ih, bias), np.abs(weight_hh)
        h = np.ones(hidden)
        for _ in range(ITERATIONS):
            reach = driven.wider(product_above(magnitude, h))
            i, f, g, o = (reach[rows : rows + hidden] for rows in range(0, 4 * hidden, hidden))
            room = sigmoid(-f.high)  # equal to 1 - f^, but computed without cancellation
            saturated = room < SATURATED
            c = sigmoid(i.high) * np.tanh(g.magnitude()) / np.where(saturated, SATURATED, room) * UP
            shown = np.where(saturated, 1.0, np.tanh(c))
            box = cls((i, f, g, o), c, np.minimum(sigmoid(o.high) * shown * UP, 1.0), saturated)
            if np.all(h - box.h <= SETTLED):
                break
            h = np.minimum(h, box.h)
        return box._token_by_token(weight_ih, weight_hh, bias, inputs) if isinstance(inputs, Rows) else box

    def _token_by_token(self, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Rows) -> LstmBox:
        """Returns the box with smaller bounds of c, from the gates and the candidate at the same token.

        `|c'| <= f(x) |c| + i(x) |g(x)|`, so |c| is at most the greatest `i |g| / (1 - f)` over x.
        """
        recalled = product_above(np.abs(weight_hh), self.h)
        mirrored = np.split(-weight_ih, 4)[2], np.split(recalled - bias, 4)[2]
        c = np.zeros_like(self.c)
        for part in inputs.parts():
            i, f, g, _ = np.split(inputs.each(weight_ih, bias + recalled, part), 4, axis=1)
            g = np.maximum(np.abs(g), inputs.each(*mirrored, part))
            room = np.maximum(sigmoid(-f) / UP, SATURATED)
            c = np.maximum(c, (sigmoid(i) * np.tanh(g) / room).max(axis=0) * UP)
        return replace(self, c=np.where(self.saturated, self.c, np.minimum(c, self.c)))


class LstmLayer:
    """The proofs of one LSTM layer. weight_ih: (4H, I), weight_hh: (4H, H). bias: (4H), the sum of both biases. The
    gates' rows are in the order i, f, g, o."""

    def __init__(self, weight_ih: Matrix, weight_hh: Matrix, bias: Vector, inputs: Inputs) -> None:
        self.hidden = hidden = weight_hh.shape[1]
        self.box = box = LstmBox.settle(weight_ih, weight_hh, bias, inputs)
        i, f, g, o = box.reach
        self.forget, self.output = GatePieces.of(f), GatePieces.of(o)
        self.open_i, self.open_f, self.open_o = (np.minimum(sigmoid(gate.high) * UP, 1) for gate in (i, f, o))
        self.shown = np.tanh(box.c) * UP
        slopes = (np.tanh(g.magnitude()) * i.sigmoid_slope(), box.c * f.sigmoid_slope(), self.open_i * g.tanh_slope())
        self.cell_slopes = tuple(slope * UP for slope in slopes)  # the factors of y_i, y_f, y_g in |dc'|
        self.output_slope = self.shown * o.sigmoid_slope() * UP
        self.maps = tuple(LinearMap(block) for block in np.split(weight_hh, 4))
        self.into = None if isinstance(inputs, Rows) else tuple(map(inputs.seen_by, np.split(weight_ih, 4)))
        self.in_cell, self.in_output = self._scaled(self.maps)
        self.into_cell: tuple[LinearMap, ...] = ()
        self.into_output: LinearMap | None = None
        if self.into is not None:
            self.into_cell, self.into_output = self._scaled(self.into)
        self.kept, self.kept_shown = float(self.open_f.max()), float((self.open_o * self.open_f).max()) * UP
        self.cell_gain = sum(each.norm for each in self.in_cell) * UP
        self.shown_gain = (sum(each.scaled(self.open_o).norm for each in self.in_cell) + self.in_output.norm) * UP
        weighted, weights = perron_vector(self._comparison, 2 * hidden)
        proofs = [
            *(self._two_by_two(order) for order in RULES),
            Proof("lstm_elementwise", Norm("inf", (weights[:hidden], weights[hidden:])), weighted),
        ]
        proofs.append(_miller_hardt(np.split(np.abs(weight_hh), 4), inputs.reach(weight_ih, bias).high[hidden:]))
        if box.saturated.any():
            proofs = [
                proof if proof.factor is None else replace(proof, factor=max(proof.factor, 1.0)) for proof in proofs
            ]
        self.bound = LayerBound(tuple(proofs), (box.h, np.where(box.saturated, np.inf, box.c)), self._input_gain())
        self.caps = Perturbation.within(2 * box.h), Perturbation.within(2 * self.bound.reach[1])

    def _scaled(self, maps: tuple[LinearMap, ...]) -> tuple[tuple[LinearMap, ...], LinearMap]:
        """Returns the linear maps from dh to dc' through i, f and g, and the linear map from dh to dh' through o, each
        with scaled rows."""
        cell = tuple(each.scaled(slope) for each, slope in zip(maps[:3], self.cell_slopes, strict=True))
        return cell, maps[3].scaled(self.output_slope)

    def _input_gain(self) -> float | None:
        if self.into_output is None:
            return None
        moved = sum(each.norm for each in self.into_cell) * UP
        return float(np.hypot(moved, float(self.open_o.max()) * moved + self.into_output.norm)) * UP

    def _comparison(self, bounds: Vector) -> Vector:
        """Returns unit-by-unit bounds of (dh, dc) after one step, from the bounds before it, for equal inputs. If the
        bounds before the step are multiplied by a positive number, the result is multiplied by the same number."""
        h, c = bounds[: self.hidden], bounds[self.hidden :]
        y = tuple(each.magnitude @ h for each in self.maps)
        cell = self._cell(c, y)
        return np.concatenate([self._shown(cell, y[3]), cell])

    def _cell(self, c: Vector, y: tuple[Vector, ...]) -> Vector:
        kept = np.max(self.forget.high * c + self.forget.slope * (self.box.c * y[1]), axis=0)
        bound: Vector = (kept + self.cell_slopes[0] * y[0] + self.cell_slopes[2] * y[2]) * UP
        return bound

    def _shown(self, moved: Vector, y: Vector) -> Vector:
        bound: Vector = np.max(self.output.high * moved + self.output.slope * (self.shown * y), axis=0) * UP
        return bound

    def _two_by_two(self, order: Order) -> Proof:
        if order == "2":
            cell, shown = self.cell_gain, self.shown_gain
        else:
            rows = np.sum([each.magnitude.sum(axis=1) for each in self.in_cell], axis=0)
            cell = float(rows.max())
            shown = float((self.open_o * rows + self.in_output.magnitude.sum(axis=1)).max())
        matrix = np.array([[self.kept, cell], [self.kept_shown, shown]]) * UP + POSITIVE
        factor, weights = perron_vector_2x2(matrix)
        return Proof(RULES[order], Norm(order, (float(weights[1]), float(weights[0]))), factor)

    def start(self) -> Errors:
        return Errors(tuple(Perturbation.within(reach) for reach in self.bound.reach))

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        h, c = errors.perturbations
        y = tuple(each.rows_of(h) for each in self.maps)
        fed_cell = fed_output = 0.0
        if self.into is not None and self.into_output is not None and fed is not None:
            y = tuple(old + each.rows_of(fed) for old, each in zip(y, self.into, strict=True))
            fed_cell = sum(each(fed).ball for each in self.into_cell)
            fed_output = self.into_output(fed).ball
        ball = self.kept * c.ball + self.cell_gain * h.ball + fed_cell
        after_c = Perturbation.within(self._cell(c.box, y), ball * UP).cut(self.caps[1])
        moved = np.minimum(after_c.box, 2 * np.tanh(after_c.box / 2) * UP)
        widest = float(self.open_o.max())
        through_c = widest * min(after_c.ball, norm_above(moved)) + self.in_output.norm * h.ball
        at_once = self.kept_shown * c.ball + self.shown_gain * h.ball + widest * fed_cell
        ball = min(through_c, at_once) + fed_output
        after_h = Perturbation.within(self._shown(moved, y[3]), ball * UP).cut(self.caps[0])
        return Errors((after_h, after_c), (), errors.steps + 1)

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        return Errors(perturbations)

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        i, f, g, o = np.split(before_gates, 4)
        cell = self.cell_slopes[0] * i + self.cell_slopes[1] * f + self.cell_slopes[2] * g
        cell = cell + function * (self.box.c + 2) + unit * (3 * self.box.c + 2)
        shown = self.open_o * (cell + function) + self.output_slope * o + function + unit
        return Perturbation.within(shown), Perturbation.within(cell)


def _miller_hardt(weights: list[Matrix], forget_driven: Vector) -> Proof:
    """Returns the proof by the rule of Miller and Hardt, for |h_i| <= 1. weights: |W_i|, |W_f|, |W_g|, |W_o|.
    forget_driven: the greatest value of the part of f's pre-activation that input and biases determine."""
    hidden = len(weights[0])
    i, f, g, o = (float(weight.sum(axis=1).max()) * UP for weight in weights)
    forget = float(sigmoid(forget_driven[:hidden] + weights[1].sum(axis=1)).max()) * UP
    room = 1 - forget
    holds = room > 0 and i < room and o < room and g <= room / 4 and f < room**2
    factor = (forget + f / (4 * room) + i / 4 + g + o / 4) * UP if holds else None
    return Proof("miller_hardt_inf", Norm("inf", (1.0, 1.0)), factor)


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    (w_ih, b_ih), (w_hh, b_hh) = cell.input, cell.recurrent
    return LstmLayer(w_ih, w_hh, b_ih + b_hh, inputs)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    h, c = state
    i, f, g, o = (part + Pre.of(linear, h, error[0]) for part, linear in zip(pre, step.recurrent, strict=True))
    enter, keep, show = (sigmoid(gate.value) for gate in (i, f, o))
    entered, kept, shown = (np.minimum(1, sigmoid(gate.value + gate.radius)) for gate in (i, f, o))
    candidate = np.tanh(g.value)
    new = keep * c + enter * candidate
    box = kept * error[1].box + np.abs(c) * sigmoid_rise(f.value, f.radius)
    box = box + entered * tanh_rise(g.value, g.radius) + np.abs(candidate) * sigmoid_rise(i.value, i.radius)
    inner = (
        (f, np.abs(c) * sigmoid_slope(f.value, f.radius)),
        (g, entered * tanh_slope(g.value, g.radius)),
        (i, np.abs(candidate) * sigmoid_slope(i.value, i.radius)),
    )
    ball = longest(kept, error[1]) + np.sum([gate.ball(scale) for gate, scale in inner], axis=0)
    box = np.minimum(np.minimum(box, ball[:, None]), np.abs(new) + step.reach[1])

    squashed, steep = np.tanh(new), shown * tanh_slope(new, box)
    shown_box = shown * tanh_rise(new, box) + np.abs(squashed) * sigmoid_rise(o.value, o.radius)
    shown_ball = longest(steep * kept, error[1])
    shown_ball = shown_ball + np.sum([gate.ball(steep * scale) for gate, scale in inner], axis=0)
    shown_ball = shown_ball + o.ball(np.abs(squashed) * sigmoid_slope(o.value, o.radius))
    return (show * squashed, new), (shown_box, box), (shown_ball, ball)
