"""The RNN with tanh or relu in torch, and the base class of the RNN and the GRU."""

from __future__ import annotations

from torch import Tensor, nn

from wane.models.architecture import Placed
from wane.models.cells import State

NONLINEARITIES: dict[str, str] = {"rnn_tanh": "tanh", "rnn_relu": "relu"}


class OneState(nn.RNNBase):
    """A recurrent cell of `torch.nn` with one layer, whose only state tensor is h."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, h = super().forward(x, state[0].unsqueeze(0))
        return y, (h.squeeze(0),)


class RnnCell(OneState, nn.RNN):  # type: ignore[misc]
    """`h' = rho(W h + U x + b)`, rho = tanh or relu: torch's RNN with one layer."""

    def __init__(self, inputs: int, hidden: int, nonlinearity: str) -> None:
        super().__init__(inputs, hidden, nonlinearity=nonlinearity)


def build(placed: Placed) -> RnnCell:
    """Builds the cell of one layer."""
    return RnnCell(placed.inputs, placed.layer.units, NONLINEARITIES[placed.layer.kind])
