"""The GRU in torch."""

from __future__ import annotations

from torch import Tensor, nn

from wane.models.cells import State
from wane.models.manifest import Architecture


class GruCell(nn.GRU):
    """torch's own GRU, one layer (the reset gate acts after the matrix)."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        y, h = super().forward(x, state[0].unsqueeze(0))
        return y, (h.squeeze(0),)


def build(architecture: Architecture, layer: int) -> GruCell:
    """The cell of one layer."""
    return GruCell(architecture.cell_inputs(layer), architecture.cell_units)
