"""The certificate: for each layer, a factor by which two states come closer at every token.

A layer's state map `s' = phi(s, x)` is contractive if `|phi(s, x) - phi(s~, x)| <= factor |s - s~|` with factor < 1,
in a norm that does not change, for every input x that a token can cause and all states s, s~ that are reached
from zero. These are theorems about the float32 weights in exact arithmetic; they are evaluated in float64 and
rounded outward: pre-activations, where terms may cancel, by a bound on their rounding
(`models/certificate/admissible.py`), and what is made of them, products and sums of non-negative numbers, by a relative margin far above float64's error.

Rules, by cell (rounding of float32 runs is not part of them):

- linear, rnn: `|phi(s) - phi(s~)|_2 <= L |W|_2 |s - s~|_2`, L = 1 for the identity, tanh and relu alike.
- gated: `s' = f(x) * s + (1 - f(x)) * z(x)` shrinks every unit's difference by f: the factor is its maximum
  over units and inputs, and never more than the cap: the larger of the manifest's and its float32 rounding, which
  is what multiplies.
- lstm, gru: `models/certificate/lstm.py`, `models/certificate/gru.py`.

A stack of contractive layers forgets too: the layers below it drive a layer's error down to zero, and its own
factor then does the rest. How fast is another theorem, which needs the layers' gains; it is not claimed here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.certificate.admissible import Box, Inputs, Matrix, Normalised, Rows
from models.certificate.gru import gru_bound
from models.certificate.layer_bound import LayerBound
from models.certificate.lstm import lstm_bound
from models.manifest import Architecture
from models.reference import sigmoid
from models.weights import Weights

MARGIN = 1e-10
"""Relative; float64 evaluates every rule here to about 1e-13, given intervals for the pre-activations."""


def layer_bounds(architecture: Architecture, weights: Weights) -> list[LayerBound]:
    """What is proved of each layer, bottom to top; factors are rounded outward."""
    bounds: list[LayerBound] = []
    for layer in range(architecture.layers):
        inputs = _inputs(architecture, weights, layer, bounds)
        bound = _layer_bound(architecture, weights, layer, inputs)
        bound = replace(bound, factor=bound.factor * (1 + MARGIN))
        cap = gate_cap(architecture, layer)
        if architecture.cell == "gated" and bound.factor >= cap:
            bound = replace(bound, factor=cap, rule="gate_cap")
        bounds.append(bound)
    return bounds


def gate_cap(architecture: Architecture, layer: int) -> float:
    """What a layer's gate really is at most: networks and graphs multiply by it in float32, which may be larger."""
    cap = architecture.gate_cap(layer)
    return max(cap, float(np.float32(cap)))


def _inputs(architecture: Architecture, weights: Weights, layer: int, below: list[LayerBound]) -> Inputs:
    """What the cell of a layer reads."""
    gain, shift = f"layers.{layer}.norm.weight", f"layers.{layer}.norm.bias"
    residual = architecture.block == "residual"
    if layer == 0:
        rows = _float64(weights, "embedding.weight")
        if not residual:
            return Rows(rows)
        return Rows.normalised(rows, _float64(weights, gain), _float64(weights, shift), architecture.norm_epsilon)
    if residual:
        return Normalised(_float64(weights, gain), _float64(weights, shift))
    return Box(below[-1].reach[0])


def _layer_bound(architecture: Architecture, weights: Weights, layer: int, inputs: Inputs) -> LayerBound:
    prefix = f"layers.{layer}.cell."
    if architecture.cell == "gated":
        weight, bias = _float64(weights, prefix + "weight"), _float64(weights, prefix + "bias")
        reach = inputs.reach(weight, bias)
        gate, candidate = reach[: architecture.hidden], reach[architecture.hidden :]
        widest = gate_cap(architecture, layer) * float(sigmoid(gate.high).max())
        # the state is a convex combination of candidates, so it is never larger than the largest of them
        return LayerBound(widest, "gate_maximum", "inf", (np.tanh(candidate.magnitude()),))

    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    w_ih, w_hh, b_ih, b_hh = (_float64(weights, prefix + name) for name in names)
    if architecture.cell == "lstm":
        return lstm_bound(w_ih, w_hh, b_ih + b_hh, inputs)
    if architecture.cell == "gru":
        return gru_bound(w_ih, w_hh, b_ih, b_hh, inputs)
    reached = 1.0 if architecture.cell == "rnn_tanh" else np.inf  # its own factor does not ask what comes in
    return LayerBound(float(np.linalg.norm(w_hh, 2)), "spectral_norm", "2", (np.full(architecture.hidden, reached),))


def _float64(weights: Weights, name: str) -> Matrix:
    return weights[name].astype(np.float64)
