"""The RNN with tanh or relu in torch, and the base class of the RNN and the GRU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from wane.models.cell_registry import Cell
from wane.models.cells import State

if TYPE_CHECKING:
    from wane.models.manifest import Architecture

NONLINEARITIES: dict[Cell, str] = {"rnn_tanh": "tanh", "rnn_relu": "relu"}


class OneState(nn.RNNBase):
    """A recurrent cell of `torch.nn` with one layer, whose only state tensor is h."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, h = super().forward(x, state[0].unsqueeze(0))
        return y, (h.squeeze(0),)


class RnnCell(OneState, nn.RNN):  # type: ignore[misc]
    """`h' = rho(W h + U x + b)`, rho = tanh or relu: torch's RNN with one layer."""

    def __init__(self, inputs: int, hidden: int, nonlinearity: str) -> None:
        super().__init__(inputs, hidden, nonlinearity=nonlinearity)


def build(architecture: Architecture, layer: int) -> RnnCell:
    """Builds the cell of one layer."""
    return RnnCell(architecture.cell_inputs(layer), architecture.cell_units, NONLINEARITIES[architecture.cell])
