"""The linear cell in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.architecture import Placed
from wane.models.cells import State


class LinearCell(nn.Module):
    """`h' = W h + U x + b`."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(hidden)
        self.weight_ih_l0 = nn.Parameter(torch.empty(hidden, inputs).uniform_(-bound, bound))
        self.weight_hh_l0 = nn.Parameter(torch.empty(hidden, hidden).uniform_(-bound, bound))
        self.bias_ih_l0 = nn.Parameter(torch.zeros(hidden))
        self.bias_hh_l0 = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        driven = functional.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        h, outputs = state[0], []
        for inflow in driven.unbind(0):
            h = inflow + functional.linear(h, self.weight_hh_l0)
            outputs.append(h)
        return torch.stack(outputs), (h,)


def build(placed: Placed) -> LinearCell:
    """Builds the cell of one layer."""
    return LinearCell(placed.inputs, placed.layer.units)
