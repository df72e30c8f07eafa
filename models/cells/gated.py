"""The gated cell in torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells import State
from wane.models.parallel_scan import linear_recurrence

if TYPE_CHECKING:
    from wane.models.manifest import Architecture


class GatedCell(nn.Module):
    """`s' = f(x) * s + (1 - f(x)) * z(x)`, `f = cap * sigmoid(W_f x + b_f)`, `z = tanh(W_z x + b_z)`.

    The gates depend on the input only, so a parallel scan computes all steps of a sequence. The state is a convex
    combination of values in (-1, 1). Each step multiplies the influence of the previous state by f. Related: SRU, QRNN,
    minGRU. If `remember` is true, `gates` keeps the forget gates of the latest forward pass, (T, B, H), for training.
    The initial biases give the units memories of 2 to 50 tokens, limited by the cap.
    """

    def __init__(self, inputs: int, hidden: int, gate_cap: float) -> None:
        super().__init__()
        self.gate_cap = gate_cap
        self.remember = False
        self.gates: Tensor | None = None
        self.weight = nn.Parameter(torch.randn(2 * hidden, inputs) / math.sqrt(inputs))
        memory = torch.exp(torch.linspace(math.log(2), math.log(50), hidden))
        share = ((1 - 1 / memory) / gate_cap).clamp(max=0.95)
        self.bias = nn.Parameter(torch.cat([torch.logit(share), torch.zeros(hidden)]))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        gate, candidate = functional.linear(x, self.weight, self.bias).float().chunk(2, dim=-1)
        f = self.gate_cap * torch.sigmoid(gate)
        self.gates = f if self.remember else None
        y = linear_recurrence(f, (1 - f) * torch.tanh(candidate), state[0])
        return y, (y[-1],)


def build(architecture: Architecture, layer: int) -> GatedCell:
    """Builds the cell of one layer."""
    return GatedCell(architecture.cell_inputs(layer), architecture.cell_units, architecture.gate_cap(layer))
