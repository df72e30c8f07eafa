"""The GRU in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from wane.models.cells.rnn import OneState

if TYPE_CHECKING:
    from wane.models.manifest import Architecture


class GruCell(OneState, nn.GRU):  # type: ignore[misc]
    """torch's GRU with one layer. In the candidate, the reset gate multiplies the product of the recurrent matrix and
    the state, not the state itself."""


def build(architecture: Architecture, layer: int) -> GruCell:
    """Builds the cell of one layer."""
    return GruCell(architecture.cell_inputs(layer), architecture.cell_units)
