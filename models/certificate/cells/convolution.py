"""The causal convolution. Its output depends on the last tokens only, so nothing is left beyond its reach.

|sigmoid| and |tanh| are at most 1, and |tanh(a)| and |max(0, a)| are at most |a|. A unit's output is therefore at most
`|b| + sum_j |K_j| |x|`, and with tanh at most 1.

`rounding`: an error e of each input moves a sum by at most `sum_j |K_j| e`. The slopes of relu and tanh are at most 1,
and that of the sigmoid at most 1/4, so `|a sigmoid(g) - a~ sigmoid(g~)| <= |a - a~| + |a~| min(1, |g - g~| / 4)`.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import FUNCTION
from wane.models.certificate.interval_rounding import UP, Vector, gamma
from wane.models.layer_registry import Convolution
from wane.models.weights import CellWeights


def furthest(cell: CellWeights, inputs: Vector) -> Vector:
    """Returns the greatest absolute value of each unit of the output. inputs: those of the cell's input."""
    layer, weight = cell.layer, np.abs(cell.tensors["weight"])
    assert isinstance(layer, Convolution)
    weight = weight[:, : layer.units].sum(axis=0)
    sums = weight * inputs if layer.channels == "depthwise" else weight @ inputs
    if "bias" in cell.tensors:
        sums = sums + np.abs(cell.tensors["bias"][: layer.units])
    result: Vector = np.minimum(sums * UP, 1.0) if layer.activation in ("tanh", "wavenet") else sums * UP
    return result


def rounding(cell: CellWeights, inputs: Vector, error: Vector, unit: float) -> Vector:
    """Returns the greatest error of each unit of a computed output. inputs: the greatest absolute values of the cell's
    input, error: its greatest errors, (I). unit: the unit roundoff."""
    layer, weight = cell.layer, np.abs(cell.tensors["weight"])
    assert isinstance(layer, Convolution)
    terms, weight = layer.kernel_size, weight.sum(axis=0)

    def summed(values: Vector) -> Vector:
        depthwise = layer.channels == "depthwise"
        sums: Vector = weight * np.tile(values, layer.rows // layer.units) if depthwise else weight @ values
        return sums

    if layer.channels == "full":
        terms *= weight.shape[1]
    sizes = summed(inputs + error) + np.abs(cell.tensors.get("bias", np.zeros(layer.rows)))
    off = gamma(terms + 2, unit) * sizes + summed(error)
    value, size = off[: layer.units], sizes[: layer.units]
    if layer.activation in ("tanh", "wavenet"):
        value, size = value + FUNCTION * unit, np.ones(layer.units)
    if layer.activation in ("glu", "wavenet"):
        value = value + size * (np.minimum(1.0, off[layer.units :] / 4) + (FUNCTION + 2) * unit)
    result: Vector = value * UP
    return result
