"""The gated cell: `s' = f(x) * s + (1 - f(x)) * z(x)`.

**The box.** s' lies between s and z. From the zero state, each unit therefore stays between min(0, the least z) and
max(0, the greatest z).

**Equal inputs.** A step multiplies the difference of two states by f, unit by unit. In the maximum norm the contraction
factor is the largest f over units and inputs, which is never larger than the cap.

**Different inputs.** The inputs of the two trajectories x and x~ differ if the layer below has an error:

    s' - s~' = f (s - s~) + (1 - f) (z - z~) + (f - f~) (s~ - z~) = f~ (s - s~) + (1 - f~) (z - z~) + (f - f~) (s - z)

By symmetry, f may be taken as the smaller of the two gates. Let m be its pre-activation and F(m) the greatest slope of
the sigmoid at or above m. Then `|f - f~| <= F(m) |W_f dx|`. Where f is large, F is small (`gates.py`). |s - z| is
at most the width of the box.

**First layer.** All units read the same sequence of tokens x_1 .. x_k. Let r_i be the error of unit i at the cut, where
the window starts. By Hoelder's inequality, the squared error k tokens after the cut,

    sum_i r_i^2 prod_t f_i(x_t)^2 <= prod_t (sum_i r_i^2 f_i(x_t)^(2k))^(1/k) <= max_x sum_i r_i^2 f_i(x)^(2k),

is largest if the k tokens are all equal. `gates.py` computes the maximum over the vocabulary exactly.

**One step in a window** (`moved`). The window's values are known. The run's values have a tilde. ds, df and dz bound
the distances of s, f and z from the run's values. The error is linear in f~:

    s~' - s' = f~ (s~ - s) + (f~ - f) (s - z) + (1 - f~) (z~ - z)

Hence `ds' <= f ds + (1 - f) dz + df (|s - z| + |ds - dz|)`.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import FUNCTION, UNIT_FLOAT32, ComputedNormalised, ComputedRows, Inputs, Rows
from wane.models.certificate.cell_step import CellStep, Deviations, Moved, Pre, States, mixed
from wane.models.certificate.deviation import sigmoid_rise, sigmoid_slope, tanh_rise, tanh_slope
from wane.models.certificate.gates import GatePieces, GateProducts
from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.certificate.layer_bound import Errors, Layer, LayerBound, Proof
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation
from wane.models.layer_registry import InputGated
from wane.models.reference.functions import candidate as candidate_of
from wane.models.reference.functions import sigmoid
from wane.models.weights import CellWeights

SMALLEST_GATE = 2.0**-6
"""The bounds of a first layer's error replace smaller gates by this value. The relative rounding error of all gates is
then small, so that the bounds also hold for computed gates (`models/certificate/readout.py`)."""

NEAR_1 = 1 - 2.0**-18
"""A computed gate of at least this value is taken for 1, because rounding may raise its states without limit."""

JOINT_TABLE = 4_000_000
"""The first layer's exact maximum needs a table (V, H) of the gates of all tokens and units. This is the largest number
of the table's entries (32 MB) for which the maximum is computed."""


class GatedLayer:
    """The proofs of one layer of the gated cell. weight: (2H, I) and bias: (2H), with the gates' rows first. cap: the
    greatest value of a gate. function: see `InputGated.candidate`. All functions rise, with a slope of at most 1."""

    def __init__(self, weight: Matrix, bias: Vector, inputs: Inputs, cap: float, function: str = "tanh") -> None:
        self.hidden = len(bias) // 2
        reach = inputs.reach(weight, bias)
        self.positive = function == "positive"
        gate, candidate = reach[: self.hidden], reach[self.hidden :]
        self.computed = isinstance(inputs, ComputedRows | ComputedNormalised)
        low, high = (candidate_of(function, end) for end in (candidate.low, candidate.high))
        self.low = np.minimum(0.0, low * np.where(low < 0, UP, 1))
        self.high = np.maximum(0.0, high * np.where(high > 0, UP, 1))
        self.gate = np.minimum(cap * sigmoid(gate.high) * UP, cap)
        if self.computed:
            if self.gate.max() >= NEAR_1:
                self.gate, cap = np.ones(self.hidden), 1.0
            off, more = FUNCTION * UNIT_FLOAT32, _growth(float(self.gate.max()))
            self.low, self.high = (self.low - off) * more, (self.high + off) * more
        self.width = (self.high - self.low) * UP
        self.kept = np.maximum(self.gate, SMALLEST_GATE)
        self.pieces = GatePieces.of(gate, cap)
        self.slope = candidate.tanh_slope() * UP if function == "tanh" else np.ones(self.hidden)
        self.into = None
        if not isinstance(inputs, Rows):
            gates, candidates = inputs.seen_by(weight[: self.hidden]), inputs.seen_by(weight[self.hidden :])
            self.into = gates, candidates
        table: Matrix | None = None
        if isinstance(inputs, Rows) and len(inputs.rows) * self.hidden <= JOINT_TABLE:
            each = inputs.each(weight[: self.hidden], bias[: self.hidden])
            table = np.maximum(np.minimum(cap * sigmoid(each) * UP, cap), SMALLEST_GATE) * UP
        widest = float(self.gate.max())
        proofs = [Proof("gate_maximum", Norm("inf"), widest), Proof("gate_cap", Norm("inf"), cap)]
        if widest >= cap:
            proofs.reverse()
        self.bound = LayerBound(tuple(proofs), (np.maximum(-self.low, self.high),), self._input_gain())
        self._joint = None if table is None else GateProducts(table, self.bound.reach[0])

    def _input_gain(self) -> float | None:
        if self.into is None:
            return None
        gates, candidates = self.into
        slope = self.pieces.slope.max(axis=0)
        enter = 1 - self.pieces.low.min(axis=0)
        return (
            gates.scaled(slope * self.width).norm + candidates.scaled(np.minimum(enter, 1.0) * self.slope).norm
        ) * UP

    def start(self) -> Errors:
        return Errors((Perturbation.within(self.bound.reach[0]),))

    def step(self, errors: Errors, fed: Perturbation | None) -> Errors:
        before, steps = errors.perturbations[0], errors.steps + 1
        if fed is None:
            joint = self._joint(steps) if self._joint is not None and errors.cut_only else np.inf
            after = Perturbation.within(
                self.kept * before.box * UP, min(joint, float(self.kept.max()) * before.ball * UP)
            )
            return Errors((after,), (), steps, errors.cut_only)
        assert self.into is not None, (
            "`fed` is given, but the layer's inputs are embeddings, which are equal in both runs: this is a bug"
        )
        if self.computed:
            return Errors((Perturbation.within(self.width),), (), steps, cut_only=False)
        gates, candidates = self.into
        moved = np.minimum(self.slope * candidates.rows_of(fed) * UP, self.width)
        off = self.width * gates.rows_of(fed) * UP
        ends = [keep * before.box + (1 - keep) * moved for keep in (self.pieces.low, self.pieces.high)]
        box = np.max(np.maximum(*ends) + self.pieces.slope * off, axis=0) * UP
        return Errors((Perturbation.within(np.minimum(box, self.width)),), (), steps, cut_only=False)

    def at_least(self, perturbations: tuple[Perturbation, ...]) -> Errors:
        return Errors(perturbations, cut_only=False)

    def local(self, before_gates: Vector, function: float, unit: float) -> tuple[Perturbation, ...]:
        gate, candidate = before_gates[: self.hidden], before_gates[self.hidden :]
        off = self.width * (self.pieces.slope.max(axis=0) * gate + function)
        roundings = 5 if self.positive else 4  # the sum x + 0.5 is one more
        size = self.bound.reach[0]
        return (Perturbation.within(off + self.slope * candidate + function + roundings * unit * size),)


def _growth(gate: float) -> float:
    """Returns a factor by which the computed states may exceed the range of the candidates if no gate is above `gate`.

    A token multiplies a state by the gate and adds at most (1 - gate) of the greatest candidate. The roundings of one
    token raise the result by less than 8 u of itself, so the rises of all tokens are at most 16 u / (1 - gate - 16 u).
    """
    off = 2 * FUNCTION * UNIT_FLOAT32
    return 1 + off / (1 - gate - off) if gate < NEAR_1 else 1.0


def build_layer(cell: CellWeights, inputs: Inputs) -> Layer:
    """Builds the proofs of a layer for all admissible inputs."""
    assert isinstance(cell.layer, InputGated)
    return GatedLayer(*cell.input, inputs, cell.layer.cap, cell.layer.candidate)


def moved(step: CellStep, pre: list[Pre], state: States, error: Deviations) -> Moved:
    """Computes the cell's next state in a window, and bounds of the distance between this state and the uninterrupted
    run's state (see `Moved`)."""
    gate, candidate = pre
    f, df = step.layer.cap * sigmoid(gate.value), step.layer.cap * sigmoid_rise(gate.value, gate.radius)
    assert isinstance(step.layer, InputGated)
    tanh = step.layer.candidate == "tanh"
    z = candidate_of(step.layer.candidate, candidate.value)
    dz = tanh_rise(candidate.value, candidate.radius) if tanh else candidate.radius
    turning = step.layer.cap * sigmoid_slope(gate.value, gate.radius)
    slope = tanh_slope(candidate.value, candidate.radius) if tanh else np.ones_like(z)
    return mixed(
        (state[0], error[0]),
        (f, df, z, dz),
        lambda scale: gate.ball(scale * turning),
        lambda scale: candidate.ball(scale * slope),
    )
