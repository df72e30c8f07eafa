"""Language models that do not use Wane: plain torch modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wane.models.cell_registry import CELLS, Cell
from wane.models.networks import Network
from wane.training.audit.checkpoint import read_checkpoint
from wane.training.audit.model import ForeignModel, import_model

TORCH_CELLS = {cell: getattr(nn, info.module.upper()) for cell, info in CELLS.items() if "audit" not in info.missing}
"""For each cell that an audit supports, the class of torch.nn that implements it. A checkpoint does not record whether
an RNN uses tanh or ReLU."""

VOCABULARY = 13


class Plain(nn.Module):
    """A model with an embedding, recurrent layers and a linear head. `names` are the names of these three modules."""

    def __init__(
        self,
        cell: Cell = "lstm",
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
    """A stack of torch.nn.LSTMCell of the given sizes."""

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
