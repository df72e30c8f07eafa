"""Language models that do not use Wane: plain torch modules."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wane.models.layer_registry import KINDS, Kind
from wane.models.networks import Network
from wane.training.audit.checkpoint import read_checkpoint
from wane.training.audit.foreign_model import ForeignModel
from wane.training.audit.model import import_model

TORCH_CELLS = {cell: getattr(nn, info.module.upper()) for cell, info in KINDS.items() if "audit" not in info.missing}
"""For each cell that an audit supports, the class of torch.nn that implements it. It is torch.nn.RNN for both
`rnn_tanh` and `rnn_relu`. A checkpoint of torch.nn.RNN does not record the nonlinearity."""

VOCABULARY = 13


class Plain(nn.Module):
    """A model with an embedding, recurrent layers and a linear head. `names` are the names of these three modules."""

    def __init__(
        self,
        cell: Kind = "lstm",
        names: tuple[str, str, str] = ("embedding", "rnn", "fc"),
        width: int = 6,
        hidden: int = 6,
        tied: bool = False,
        head_bias: bool = True,
        **keys: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        if cell == "rnn_relu":
            keys["nonlinearity"] = "relu"
        self.names = names
        self.add_module(names[0], nn.Embedding(VOCABULARY, width))
        self.add_module(names[1], TORCH_CELLS[cell](width, hidden, **keys))
        self.add_module(names[2], nn.Linear(hidden, VOCABULARY, bias=head_bias))
        if tied:
            self.get_submodule(names[2]).weight = self.get_submodule(names[0]).weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, B) -> logits (T, B, V)."""
        embedding, rnn, head = (self.get_submodule(name) for name in self.names)
        logits: Tensor = head(rnn(embedding(tokens))[0])
        return logits


class OfCells(nn.Module):
    """A stack of one torch.nn.LSTMCell for each of `sizes`, the cells' numbers of units."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.emb = nn.Embedding(VOCABULARY, sizes[0])
        below = (sizes[0], *sizes[:-1])
        self.cells = nn.ModuleList(nn.LSTMCell(one, other) for one, other in zip(below, sizes, strict=True))
        self.out = nn.Linear(sizes[-1], VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, B) -> logits (T, B, V)."""
        state: list[Any] = [None] * len(self.cells)
        outputs = []
        for column in self.emb(tokens):
            x = column
            for index, cell in enumerate(self.cells):
                state[index] = cell(x, state[index])
                x = state[index][0]
            outputs.append(self.out(x))
        return torch.stack(outputs)


class Gru4Rec(nn.Module):
    """A GRU over one-hot events, as in GRU4Rec. If `width` is not None, a Linear with this number of outputs is between
    the one-hot events and the GRU. If `projected` is not None, a Linear with this number of outputs is between the GRU
    and the head. With `activation`, a ReLU follows this Linear."""

    def __init__(
        self,
        width: int | None = None,
        hidden: int = 5,
        *,
        names: tuple[str, str] = ("fc1", "fc2"),
        bias: bool = True,
        projected: int | None = None,
        activation: bool = False,
        events: int = VOCABULARY,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.events, self.names = events, names
        if width is not None:
            self.add_module(names[0], nn.Linear(events, width, bias=bias))
        self.gru = nn.GRU(width or events, hidden)
        self.between = None if projected is None else nn.Linear(hidden, projected)
        self.activation = activation
        self.add_module(names[1], nn.Linear(projected or hidden, events))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, B) -> logits (T, B, V)."""
        x = nn.functional.one_hot(tokens, self.events).float()
        if hasattr(self, self.names[0]):
            x = self.get_submodule(self.names[0])(x)
        x = self.gru(x)[0]
        if self.between is not None:
            x = torch.relu(self.between(x)) if self.activation else self.between(x)
        logits: Tensor = self.get_submodule(self.names[1])(x)
        return logits


class WeightDrop(nn.Module):
    """A wrapper of an LSTM. As in awd-lstm, the LSTM's recurrent matrix has the name `weight_hh_l0_raw` in the wrapper.
    In training, dropout is applied to a copy of this matrix."""

    def __init__(self, module: nn.LSTM) -> None:
        super().__init__()
        self.module = module
        matrix = module.get_parameter("weight_hh_l0")
        del module._parameters["weight_hh_l0"]
        self.weight_hh_l0_raw = nn.Parameter(matrix.data)

    def forward(self, x: Tensor) -> Tensor:
        dropped = nn.functional.dropout(self.weight_hh_l0_raw, 0.5, self.training)
        parts = [getattr(self.module, f"{part}_l0") for part in ("weight_ih", "bias_ih", "bias_hh")]
        zeros = torch.zeros(1, x.shape[1], self.module.hidden_size)
        weights = [parts[0], dropped, *parts[1:]]
        y: Tensor = torch.lstm(x, (zeros, zeros), weights, True, 1, 0.0, False, False, False)[0]
        return y


class AwdLstm(nn.Module):
    """Three LSTMs in WeightDrop, as in awd-lstm. The last LSTM is as wide as the embedding, because the embedding is
    tied to the decoder."""

    def __init__(self, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        torch.manual_seed(8)
        sizes = (width, hidden, hidden, width)
        self.encoder = nn.Embedding(VOCABULARY, width)
        self.rnns = nn.ModuleList(WeightDrop(nn.LSTM(below, units)) for below, units in pairwise(sizes))
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (T, B) -> logits (T, B, V)."""
        x = self.encoder(tokens)
        for rnn in self.rnns:
            x = rnn(x)
        logits: Tensor = self.decoder(x)
        return logits


def saved(path: Path, tensors: object) -> Path:
    """Saves tensors with torch.save. Returns the path."""
    torch.save(tensors, path)
    return path


def imported(path: Path, **options: Any) -> ForeignModel:
    """Reads a checkpoint and imports its model."""
    return import_model(read_checkpoint(path), **options)


def logits_of(model: ForeignModel, tokens: Tensor) -> Tensor:
    """Returns the logits of Wane's network with the imported weights."""
    network = Network(model.architecture).eval()
    network.load_weights({name: torch.from_numpy(tensor) for name, tensor in model.weights.items()})
    with torch.no_grad():
        return network.logits(network(tokens)[0])


def some_tokens() -> Tensor:
    """Returns random tokens (9, 4)."""
    return torch.randint(VOCABULARY, (9, 4), generator=torch.Generator().manual_seed(1))
