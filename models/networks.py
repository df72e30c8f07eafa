"""The torch network of an architecture: embedding, recurrent layers, output layer.

Its `state_dict` is the bundle's weights file, name for name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cells import State, build_cell, state_width
from models.manifest import Architecture


class PlainLayer(nn.Module):
    """A cell that reads the layer below."""

    def __init__(self, architecture: Architecture, index: int, dropout: float) -> None:
        super().__init__()
        self.cell = build_cell(architecture, index, architecture.hidden if index else architecture.embedding)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.dropout(x), state)
        return y, state


class ResidualLayer(nn.Module):
    """`x + mix(cell(norm(x)))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, architecture: Architecture, index: int, dropout: float) -> None:
        super().__init__()
        hidden, width, epsilon = architecture.hidden, architecture.feed_forward, architecture.norm_epsilon
        self.norm = nn.LayerNorm(hidden, epsilon)
        self.cell = build_cell(architecture, index, hidden)
        self.mix = nn.Linear(hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.has_feed_forward = width > 0
        if self.has_feed_forward:
            self.feed_forward_norm = nn.LayerNorm(hidden, epsilon)
            self.feed_forward_in = nn.Linear(hidden, width)
            self.feed_forward_out = nn.Linear(width, hidden)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.norm(x), state)
        x = x + self.dropout(self.mix(y))
        if self.has_feed_forward:
            y = torch.relu(self.feed_forward_in(self.feed_forward_norm(x)))
            x = x + self.dropout(self.feed_forward_out(y))
        return x, state


class Network(nn.Module):
    """A recurrent next-token model. `dropout` acts in training only and is no part of the architecture."""

    def __init__(self, architecture: Architecture, dropout: float = 0.0) -> None:
        super().__init__()
        self.architecture = architecture
        residual = architecture.block == "residual"
        self.embedding = nn.Embedding(architecture.vocabulary_size, architecture.embedding)
        nn.init.normal_(self.embedding.weight, std=architecture.embedding**-0.5 if architecture.tied else 1.0)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            ResidualLayer(architecture, index, dropout) if residual else PlainLayer(architecture, index, dropout)
            for index in range(architecture.layers)
        )
        self.norm = nn.LayerNorm(architecture.hidden, architecture.norm_epsilon) if residual else nn.Identity()
        self.head = nn.Linear(architecture.hidden, architecture.vocabulary_size)
        nn.init.zeros_(self.head.bias)
        if architecture.tied:
            self.head.weight = self.embedding.weight

    def zero_state(self, batch: int) -> list[Tensor]:
        """The state before any token: zeros, each (batch, hidden), in the manifest's order."""
        count = self.architecture.layers * state_width(self.architecture)
        return [self.embedding.weight.new_zeros(batch, self.architecture.hidden) for _ in range(count)]

    def forward(self, tokens: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """tokens: int64 (T, B). Returns hidden, float32 (T, B, H), the output layer's input, and the state after."""
        if state is None:
            state = self.zero_state(tokens.shape[1])
        x = functional.embedding(tokens, self.embedding.weight)
        if self.architecture.block == "residual":
            x = self.dropout(x)
        width, after = state_width(self.architecture), []
        for index, layer in enumerate(self.layers):
            x, layer_state = layer(x, tuple(state[index * width : (index + 1) * width]))
            after.extend(layer_state)
        return self.norm(x), after

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., H) -> logits (..., V)."""
        output: Tensor = self.head(self.dropout(hidden) if self.architecture.block == "plain" else hidden)
        return output

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the weights file: the state_dict, a tied output matrix left out."""
        skip = {"head.weight"} if self.architecture.tied else set()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in skip}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The reverse of `weights`. Raises RuntimeError where a name is missing, unknown or of another shape."""
        tied = {"head.weight": weights["embedding.weight"]} if self.architecture.tied else {}
        self.load_state_dict(weights | tied)
