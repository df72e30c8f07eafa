"""The recurrent layers of a model, bottom to top, with the proofs of each.

A layer's state map `s' = phi(s, x)` is contractive if `|phi(s, x) - phi(s~, x)| <= factor |s - s~|` with factor < 1, in
a fixed norm, for every input x that a token can cause, and for all states s and s~ that can be reached from the zero
state.

The rules are theorems about the float32 weights in exact arithmetic. Their bounds are computed in float64 and rounded
outward. The terms of pre-activations may cancel, so their rounding is bounded explicitly
(`models/certificate/admissible.py`). Products and sums of non-negative numbers have a relative margin
(`models/certificate/interval_rounding.py`). `models/certificate/cells/` has the rules of each cell.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wane.models.cell_registry import load
from wane.models.certificate.admissible import (
    Box,
    ComputedNormalised,
    ComputedRows,
    Inputs,
    Normalised,
    Rows,
    has_readout,
)
from wane.models.certificate.interval_rounding import Matrix
from wane.models.certificate.layer_bound import Layer
from wane.models.manifest import Architecture
from wane.models.weights import CellWeights, Weights

BuildLayer = Callable[[CellWeights, Inputs], Layer]


def build_layers(architecture: Architecture, weights: Weights) -> list[Layer]:
    """Builds every layer, bottom to top. The bounds of each layer's output bound the next layer's inputs."""
    layers: list[Layer] = []
    build_layer: BuildLayer = load("certificate", architecture.cell).build_layer
    for layer in range(architecture.layers):
        inputs = inputs_of(architecture, weights, layer, layers)
        layers.append(build_layer(CellWeights.of(architecture, layer, weights), inputs))
    return layers


def inputs_of(architecture: Architecture, weights: Weights, layer: int, below: list[Layer]) -> Inputs:
    """Returns the admissible inputs of a layer's cell. Above the convolution blocks, these are all outputs of a
    LayerNorm."""
    gain, shift = f"layers.{layer}.norm.weight", f"layers.{layer}.norm.bias"
    residual = architecture.block == "residual"
    if layer == 0 and architecture.front is None:
        rows = _float64(weights, "embedding.weight")
        if not residual:
            return Rows(rows)
        norm = _float64(weights, gain), _float64(weights, shift)
        if has_readout(architecture):
            cell = CellWeights.of(architecture, layer, weights)
            return ComputedRows.of(rows, norm, architecture.norm_epsilon, cell.input)
        return Rows.normalised(rows, *norm, architecture.norm_epsilon)
    if residual:
        kind = ComputedNormalised if has_readout(architecture) else Normalised
        return kind(_float64(weights, gain), _float64(weights, shift))
    return Box(below[-1].bound.reach[0])


def _float64(weights: Weights, name: str) -> Matrix:
    return weights[name].astype(np.float64)
