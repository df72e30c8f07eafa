"""The recurrent cells, in torch. Every cell reads time-major input and carries its state explicitly.

    forward(x: float32 (T, B, I), state: tuple of (B, H)) -> (y: (T, B, H), state after the last step)

Parameters have torch's own names, layouts and gate orders, because the bundle's weights file keeps them.
Equations: `models/reference.py`, which is the independent oracle of these modules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.manifest import STATE_NAMES, Architecture
from wane.models.parallel_scan import linear_recurrence

State = tuple[Tensor, ...]


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


class RnnCell(nn.RNN):
    """`h' = rho(W h + U x + b)`, rho = tanh or relu: torch's own RNN, one layer."""

    def __init__(self, inputs: int, hidden: int, nonlinearity: str) -> None:
        super().__init__(inputs, hidden, nonlinearity=nonlinearity)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        y, h = super().forward(x, state[0].unsqueeze(0))
        return y, (h.squeeze(0),)


class GruCell(nn.GRU):
    """torch's own GRU, one layer (the reset gate acts after the matrix)."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        y, h = super().forward(x, state[0].unsqueeze(0))
        return y, (h.squeeze(0),)


class LstmCell(nn.LSTM):
    """torch's own LSTM, one layer. The forget gate's bias starts at 1 (Jozefowicz et al. 2015)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(inputs, hidden)
        with torch.no_grad():
            for bias, start in ((self.bias_ih_l0, 1.0), (self.bias_hh_l0, 0.0)):
                assert isinstance(bias, Tensor)
                bias[hidden : 2 * hidden] = start

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        y, (h, c) = super().forward(x, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
        return y, (h.squeeze(0), c.squeeze(0))


class GatedCell(nn.Module):
    """`s' = f(x) * s + (1 - f(x)) * z(x)`, `f = cap * sigmoid(W_f x + b_f)`, `z = tanh(W_z x + b_z)`.

    The gates see the input only, so all steps of a sequence are solved at once by a parallel scan; the state is
    a convex combination of values in (-1, 1) and forgets by the factor f at each step. Kin: SRU, QRNN, minGRU.
    With `remember`, the forget gates of the latest run are kept in `gates`, (T, B, H), for whoever trains by them.
    The gates' biases start so that the units' memories reach from 2 to 50 tokens or as far as the cap lets them.
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


def build_cell(architecture: Architecture, layer: int, inputs: int) -> nn.Module:
    """The cell of one layer, reading `inputs` features."""
    hidden = architecture.cell_units
    match architecture.cell:
        case "linear":
            return LinearCell(inputs, hidden)
        case "rnn_tanh":
            return RnnCell(inputs, hidden, "tanh")
        case "rnn_relu":
            return RnnCell(inputs, hidden, "relu")
        case "gru":
            return GruCell(inputs, hidden)
        case "lstm":
            return LstmCell(inputs, hidden)
        case "gated":
            return GatedCell(inputs, hidden, architecture.gate_cap(layer))


def state_width(architecture: Architecture) -> int:
    """How many tensors one layer's state has."""
    return len(STATE_NAMES[architecture.cell])
