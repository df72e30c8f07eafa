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

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import (
    Box,
    ComputedNormalised,
    ComputedRows,
    Inputs,
    Normalised,
    Rows,
    has_readout,
)
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, product_above
from wane.models.certificate.layer_bound import Layer
from wane.models.layer_parts import load
from wane.models.weights import CellWeights, Weights

BuildLayer = Callable[[CellWeights, Inputs], Layer]
Furthest = Callable[[CellWeights, Vector], Vector]


def build_layers(architecture: Architecture, weights: Weights) -> list[Layer]:
    """Builds every layer with fading memory, bottom to top. The bounds of each layer's output bound the next layer's
    inputs."""
    layers: list[Layer] = []
    for index, placed in enumerate(architecture.placed(finite=False)):
        build_layer: BuildLayer = load("certificate", placed.layer.module).build_layer
        inputs = inputs_of(architecture, weights, index, layers)
        layers.append(build_layer(CellWeights.of(placed, weights), inputs))
    return layers


def inputs_of(architecture: Architecture, weights: Weights, layer: int, below: list[Layer]) -> Inputs:
    """Returns the admissible inputs of the cell of a layer with fading memory. Above layers with finite memory, these
    are all outputs of a LayerNorm."""
    gain, shift = f"layers.{layer}.norm.weight", f"layers.{layer}.norm.bias"
    residual = architecture.residual
    if layer == 0 and not architecture.finite:
        rows = _float64(weights, "embedding.weight")
        if not residual:
            return Rows(rows)
        norm = _float64(weights, gain), _float64(weights, shift)
        if has_readout(architecture):
            cell = CellWeights.of(architecture.placed(finite=False)[layer], weights)
            return ComputedRows.of(rows, norm, architecture.norm_epsilon, cell.input)
        return Rows.normalised(rows, *norm, architecture.norm_epsilon)
    if residual:
        kind = ComputedNormalised if has_readout(architecture) else Normalised
        return kind(_float64(weights, gain), _float64(weights, shift))
    return Box(below[-1].bound.reach[0] if below else furthest_stream(architecture, weights))


def furthest_stream(architecture: Architecture, weights: Weights) -> Vector:
    """Returns the greatest absolute value of each unit of the stream above the layers with finite memory, (H).

    Their output at a token depends on this token and the `reach` tokens before it. In a window of more than `reach`
    tokens it is therefore that of the uninterrupted run, exactly. Before, the two may be any two outputs within this
    bound.
    """

    def tensor(name: str) -> Matrix:
        return np.abs(weights[name].astype(np.float64))

    bound: Vector = tensor("embedding.weight").max(axis=0)
    for placed in architecture.placed(finite=True):
        layer, name, root = placed.layer, placed.name, float(np.sqrt(architecture.hidden))
        fed = bound
        if layer.block != "plain":
            fed = (tensor(f"{name}.norm.weight") * root + tensor(f"{name}.norm.bias")) * UP
        of_cell: Furthest = load("certificate", layer.module).furthest
        y = of_cell(CellWeights.of(placed, weights), fed)
        if layer.block == "plain":
            bound = y
            continue
        if layer.block == "residual":
            bound = (bound + product_above(tensor(f"{name}.mix.weight"), y)) * UP
            if not layer.feed_forward:
                continue
            gain, shift = (tensor(f"{name}.feed_forward_norm.{part}") for part in ("weight", "bias"))
            y = (gain * root + shift) * UP
        inner = product_above(tensor(f"{name}.feed_forward_in.weight"), y) + tensor(f"{name}.feed_forward_in.bias")
        outer = product_above(tensor(f"{name}.feed_forward_out.weight"), inner * UP)
        bound = (bound + outer + tensor(f"{name}.feed_forward_out.bias")) * UP
    return bound


def _float64(weights: Weights, name: str) -> Matrix:
    return weights[name].astype(np.float64)
