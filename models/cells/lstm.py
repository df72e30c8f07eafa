"""The LSTM in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells import State

if TYPE_CHECKING:
    from wane.models.architecture import Placed


class LstmCell(nn.LSTM):
    """torch's LSTM with one layer. The forget gate's bias starts at 1 (Jozefowicz et al. 2015).

    In training, entries of the recurrent matrix are dropped with the probability `weight_dropout`, the same for a whole
    sequence (Merity et al. 2017, arXiv 1708.02182).
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__(inputs, hidden)
        self.weight_dropout = 0.0
        with torch.no_grad():
            for bias, start in ((self.bias_ih_l0, 1.0), (self.bias_hh_l0, 0.0)):
                assert isinstance(bias, Tensor)
                bias[hidden : 2 * hidden] = start

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        before = state[0].unsqueeze(0), state[1].unsqueeze(0)
        if self.training and self.weight_dropout:
            weights: list[Tensor] = list(self.parameters())  # W_ih, W_hh, b_ih, b_hh
            weights[1] = functional.dropout(weights[1], self.weight_dropout)
            y, h, c = torch.lstm(x, before, weights, True, 1, 0.0, True, False, False)
        else:
            y, (h, c) = super().forward(x, before)
        return y, (h.squeeze(0), c.squeeze(0))


def build(placed: Placed) -> LstmCell:
    """Builds the cell of one layer."""
    return LstmCell(placed.inputs, placed.layer.units)
