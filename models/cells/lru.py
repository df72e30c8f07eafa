"""The linear recurrent unit in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.architecture import Placed
from wane.models.cells import State

LEAST, GREATEST = 0.4, 0.99
"""The range of the initial |lambda|."""


class LruCell(nn.Module):
    """`s' = lambda * s + U x + b`, `lambda = exp(-exp(nu) + i exp(theta))`. s is complex. Its real and imaginary parts
    are the two halves of the units. |lambda|^2 is initially uniform, the phases are at most pi / 10, and the rows of U
    are scaled by sqrt(1 - |lambda|^2) (Orvieto et al. 2023, section 3)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        half = hidden // 2
        square = torch.empty(half).uniform_(LEAST**2, GREATEST**2)
        scale = torch.sqrt(1 - square).repeat(2)[:, None]
        self.weight = nn.Parameter(scale * torch.randn(hidden, inputs) / math.sqrt(2 * inputs))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.nu = nn.Parameter(torch.log(-0.5 * torch.log(square)))
        self.theta = nn.Parameter(torch.log(torch.empty(half).uniform_(1e-3, math.pi / 10)))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        real, imaginary = functional.linear(x, self.weight, self.bias).float().chunk(2, dim=-1)
        decay = torch.polar(torch.exp(-torch.exp(self.nu)), torch.exp(self.theta))
        y = _recurrence(decay, torch.complex(real, imaginary), torch.complex(*state[0].chunk(2, dim=-1)))
        out = torch.cat([y.real, y.imag], dim=-1)
        return out, (out[-1],)


def _recurrence(decay: Tensor, inflow: Tensor, start: Tensor) -> Tensor:
    """Returns the states (T, B, N) of `s' = decay * s + inflow`, in log2(T) parallel sweeps: after sweep i, each state
    contains the inflow of the last 2^i tokens. decay: (N). inflow: (T, B, N). start: (B, N)."""
    states = torch.cat([(inflow[0] + decay * start)[None], inflow[1:]])
    distance = 1
    while distance < len(states):
        states = torch.cat([states[:distance], states[distance:] + decay**distance * states[:-distance]])
        distance *= 2
    return states


def build(placed: Placed) -> LruCell:
    """Builds the cell of one layer."""
    return LruCell(placed.inputs, placed.layer.units)
