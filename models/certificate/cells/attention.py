"""Causal attention over the last tokens. Nothing is left beyond its window. The output is a convex combination of the
values, so each unit is at most the greatest value of the unit.

`rounding`: if no score is further than e from its exact value, the logarithm of the ratio of two weights moves by at
most 2 e. So the total variation of the weights is at most `tanh(e / 2)`, and the output moves by at most
`2 tanh(e / 2) |v|` besides the error of the values.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.admissible import FUNCTION
from wane.models.certificate.interval_rounding import UP, Vector, gamma, product_above
from wane.models.layer_registry import Attention
from wane.models.weights import CellWeights


def furthest(cell: CellWeights, inputs: Vector) -> Vector:
    """Returns the greatest absolute value of each unit of the output. inputs: those of the cell's input."""
    units = cell.layer.units
    weight, bias = np.abs(cell.tensors["weight"][-units:]), np.abs(cell.tensors["bias"][-units:])
    result: Vector = (product_above(weight, inputs) + bias) * UP
    return result


def rounding(cell: CellWeights, inputs: Vector, error: Vector, unit: float) -> Vector:
    """Returns the greatest error of each unit of a computed output. inputs: the greatest absolute values of the cell's
    input, error: its greatest errors, (I). unit: the unit roundoff."""
    layer, weight = cell.layer, np.abs(cell.tensors["weight"])
    assert isinstance(layer, Attention)
    sizes = product_above(weight, inputs + error) + np.abs(cell.tensors["bias"])
    off = gamma(len(inputs) + 2, unit) * sizes + product_above(weight, error)
    heads = (layer.heads, layer.units // layer.heads)
    query, key = (part.reshape(heads) for part in np.split(sizes, 3)[:2])
    query_off, key_off = (part.reshape(heads) for part in np.split(off, 3)[:2])
    scale, positions = np.sqrt(heads[1]), np.abs(cell.tensors["positions"]).max(axis=1)
    largest = (query * key).sum(axis=1) / scale + positions
    score = (query_off * key + query * key_off).sum(axis=1) / scale + gamma(heads[1] + 6, unit) * largest
    # The greatest score is subtracted before exp.
    score = score + 2 * unit * (largest + score)
    moved = 2 * np.tanh(score / 2) + 2 * (FUNCTION * unit + gamma(layer.window + 4, unit))
    result: Vector = (np.repeat(moved, heads[1]) * sizes[-layer.units :] + off[-layer.units :]) * UP
    return result
