"""The causal convolution. Its output depends on the last tokens only, so nothing is left beyond its reach.

|sigmoid| and |tanh| are at most 1, and |tanh(a)| and |max(0, a)| are at most |a|. A unit's output is therefore at most
`|b| + sum_j |K_j| |x|`, and with tanh at most 1.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.interval_rounding import UP, Vector
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
