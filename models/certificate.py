"""The certificate: for each layer, a factor by which two states come closer at every token.

A layer's state map `s' = phi(s, x)` is contractive if `|phi(s, x) - phi(s~, x)| <= factor |s - s~|` with factor < 1,
in a norm that does not change, for every input x that a token can cause and all states s, s~ that are reached
from zero. These are theorems about the float32 weights in exact arithmetic; they are analysed in float64 and
rounded outward by a margin far above float64's error.

Rules, by cell (rounding of float32 runs is not part of them):

- linear, rnn: `|phi(s) - phi(s~)|_2 <= L |W|_2 |s - s~|_2`, L = 1 for the identity, tanh and relu alike.
- gated: `s' = f(x) * s + (1 - f(x)) * z(x)` shrinks every unit's difference by f: the factor is its maximum
  over units and inputs, and never more than the cap.
- lstm, gru: `models/lstm_bound.py`, `models/gru_bound.py`.

A stack of contractive layers forgets too: the layers below it drive a layer's error down to zero, and its own
factor then does the rest. How fast is another theorem, which needs the layers' gains; it is not claimed here.
"""

from __future__ import annotations

import numpy as np

from models.admissible import Box, Inputs, Matrix, Normalised, Rows, Vector
from models.gru_bound import gru_bound
from models.lstm_bound import lstm_bound
from models.manifest import Architecture, Certificate, Contraction
from models.reference import layer_norm, sigmoid
from models.weights import Weights

MARGIN = 1e-10
"""Relative; float64 evaluates every rule here to about 1e-13."""


def contraction(architecture: Architecture, weights: Weights) -> Certificate:
    """The certificate of these weights: every layer's factor by the simple bounds, certified or not."""
    layers: list[Contraction] = []
    inputs: Inputs = _first_inputs(architecture, weights)
    for layer in range(architecture.layers):
        if layer and architecture.block == "residual":
            inputs = Normalised(*(_float64(weights, f"layers.{layer}.norm.{n}") for n in ("weight", "bias")))
        factor, rule, norm, reach = _layer(architecture, weights, layer, inputs)
        layers.append(Contraction(layer=layer, factor=factor, rule=rule, norm=norm))
        inputs = Box(reach)
    return Certificate(contractive=all(layer.factor < 1 for layer in layers), layers=tuple(layers))


def gated_bounds(weight: Matrix, bias: Vector, gate_cap: float, inputs: Inputs) -> tuple[Vector, Vector]:
    """The greatest forget gate of each unit, (H), and the greatest |s|, (H), of a gated layer.

    |s| never passes the greatest |z|: the state is a convex combination of candidates.
    """
    reach = inputs.reach(weight, bias)
    hidden = len(bias) // 2
    return gate_cap * sigmoid(reach.high[:hidden]), np.tanh(reach[slice(hidden, None)].magnitude())


def _layer(architecture: Architecture, weights: Weights, layer: int, inputs: Inputs) -> tuple[float, str, str, Vector]:
    """Factor, rule and norm of one layer, and the box that its output stays in (H)."""
    prefix = f"layers.{layer}.cell."
    if architecture.cell == "gated":
        gates, reach = gated_bounds(
            _float64(weights, prefix + "weight"), _float64(weights, prefix + "bias"), architecture.gate_cap, inputs
        )
        factor = _outward(float(gates.max()))
        if factor >= architecture.gate_cap:
            return architecture.gate_cap, "gate_cap", "|s|_inf", reach
        return factor, "gate_maximum", "|s|_inf", reach

    w_ih, w_hh, b_ih, b_hh = (
        _float64(weights, prefix + name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    if architecture.cell == "lstm":
        lstm = lstm_bound(w_ih, w_hh, b_ih + b_hh, inputs)
        return _outward(lstm.factor), lstm.rule, lstm.norm, lstm.output_bound
    if architecture.cell == "gru":
        gru = gru_bound(w_ih, w_hh, b_ih, b_hh, inputs)
        return _outward(gru.factor), gru.rule, gru.norm, gru.output_bound
    # Nothing above a linear or an rnn layer asks how far its output reaches: its own factor is |W|_2 whatever comes in.
    unbounded = np.full(architecture.hidden, np.inf)
    return _outward(float(np.linalg.norm(w_hh, 2))), "spectral_norm", "|h|_2", unbounded


def _first_inputs(architecture: Architecture, weights: Weights) -> Rows:
    rows = _float64(weights, "embedding.weight")
    if architecture.block == "residual":
        rows = layer_norm(rows, _float64(weights, "layers.0.norm.weight"), _float64(weights, "layers.0.norm.bias"))
    return Rows(rows)


def _float64(weights: Weights, name: str) -> Matrix:
    return weights[name].astype(np.float64)


def _outward(factor: float) -> float:
    return factor * (1 + MARGIN)
