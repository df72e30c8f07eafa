"""Leaky units in torch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from wane.models.architecture import Placed
from wane.models.cells.gated import GatedCell
from wane.models.layer_registry import Leaky


class LeakyCell(GatedCell):
    """The gated cell with constant gates: `f = cap * sigmoid(b_f)`. The initial gates are those of the gated cell, so
    the units have time scales of 2 to 50 tokens."""

    def __init__(self, inputs: int, hidden: int, gate_cap: float, candidate: str = "tanh") -> None:
        super().__init__(inputs, hidden, gate_cap, candidate)
        self.weight = nn.Parameter(self.weight.detach()[hidden:].clone())

    def _driven(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, bias = self.bias.chunk(2)
        candidate = functional.linear(x, self.weight, bias).float()
        return gate.float().expand_as(candidate), candidate


def build(placed: Placed) -> LeakyCell:
    """Builds the cell of one layer."""
    spec = placed.layer
    assert isinstance(spec, Leaky)
    return LeakyCell(placed.inputs, spec.units, spec.cap, spec.candidate)
