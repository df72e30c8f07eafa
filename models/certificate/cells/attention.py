"""Causal attention over the last tokens. Nothing is left beyond its window. The output is a convex combination of the
values, so each unit is at most the greatest value of the unit."""

from __future__ import annotations

import numpy as np

from wane.models.certificate.interval_rounding import UP, Vector, product_above
from wane.models.weights import CellWeights


def furthest(cell: CellWeights, inputs: Vector) -> Vector:
    """Returns the greatest absolute value of each unit of the output. inputs: those of the cell's input."""
    units = cell.layer.units
    weight, bias = np.abs(cell.tensors["weight"][-units:]), np.abs(cell.tensors["bias"][-units:])
    result: Vector = (product_above(weight, inputs) + bias) * UP
    return result
