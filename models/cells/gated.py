"""The gated cell in torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells import State
from wane.models.parallel_scan import linear_recurrence

if TYPE_CHECKING:
    from wane.models.architecture import Placed
    from wane.models.layer_registry import InputGated


class GatedCell(nn.Module):
    """`s' = f(x) * s + (1 - f(x)) * z(x)`, `f = cap * sigmoid(W_f x + b_f)`, `z = tanh(W_z x + b_z)`, or `W_z x + b_z`
    or its positive function (see `InputGated`).

    The gates depend on the input only, so a parallel scan computes all steps of a sequence. The state is a convex
    combination of values in (-1, 1). Each step multiplies the influence of the previous state by f. Related: SRU, QRNN,
    minGRU. If `remember` is true, `gates` keeps the forget gates of the latest forward pass, (T, B, H), for training.
    The initial biases give the units memories of 2 to 50 tokens, limited by the cap.
    """

    def __init__(self, inputs: int, hidden: int, gate_cap: float, candidate: str = "tanh") -> None:
        super().__init__()
        self.gate_cap = gate_cap
        self.candidate = candidate
        self.remember = False
        self.gates: Tensor | None = None
        self.weight = nn.Parameter(torch.randn(2 * hidden, inputs) / math.sqrt(inputs))
        memory = torch.exp(torch.linspace(math.log(2), math.log(50), hidden))
        share = ((1 - 1 / memory) / gate_cap).clamp(max=0.95)
        self.bias = nn.Parameter(torch.cat([torch.logit(share), torch.zeros(hidden)]))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        gate, candidate = self._driven(x)
        f = self.gate_cap * torch.sigmoid(gate)
        self.gates = f if self.remember else None
        z = self._function(candidate)
        y = linear_recurrence(f, (1 - f) * z, state[0])
        return y, (y[-1],)

    def _function(self, x: Tensor) -> Tensor:
        """Returns the candidates for their pre-activations x."""
        if self.candidate == "positive":
            return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))
        return torch.tanh(x) if self.candidate == "tanh" else x

    def _driven(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the pre-activations of the gates and of the candidates, (T, B, H) each."""
        gate, candidate = functional.linear(x, self.weight, self.bias).float().chunk(2, dim=-1)
        return gate, candidate


def build(placed: Placed) -> GatedCell:
    """Builds the cell of one layer."""
    spec = cast("InputGated", placed.layer)
    return GatedCell(placed.inputs, spec.units, spec.cap, spec.candidate)
