"""The GRU in torch."""

from __future__ import annotations

from torch import nn

from wane.models.architecture import Placed
from wane.models.cells.rnn import OneState


class GruCell(OneState, nn.GRU):  # type: ignore[misc]
    """torch's GRU with one layer. In the candidate, the reset gate multiplies the product of the recurrent matrix and
    the state, not the state itself."""


def build(placed: Placed) -> GruCell:
    """Builds the cell of one layer."""
    return GruCell(placed.inputs, placed.layer.units)
