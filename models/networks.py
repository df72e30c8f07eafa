"""The torch network of an architecture: embedding, recurrent layers, output layer.

Its `state_dict` has the names of the bundle's weights file.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cell_registry import CELLS, load
from wane.models.cells import State
from wane.models.cells.lstm import LstmCell

if TYPE_CHECKING:
    from wane.models.manifest import Architecture, Front


def build_cell(architecture: Architecture, layer: int) -> nn.Module:
    """Builds the cell of one layer. `models/cells/__init__.py` describes its interface."""
    cell: nn.Module = load("torch", architecture.cell).build(architecture, layer)
    return cell


class LockedDropout(nn.Dropout):
    """Dropout with one mask for all time steps of a sequence (Gal and Ghahramani 2016, arXiv 1512.05287)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, B, H)."""
        return x * super().forward(x.new_ones(1, *x.shape[1:])) if self.training and self.p else x


class PlainLayer(nn.Module):
    """A cell that reads the output of the layer below."""

    def __init__(self, architecture: Architecture, index: int, dropout: float) -> None:
        super().__init__()
        self.cell = build_cell(architecture, index)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.dropout(x), state)
        return y, state


class CausalConvolution(nn.Module):
    """A depthwise causal convolution: `c_t = sum_j weight_j * x_(t - K + 1 + j)`, weight (K, H). It is initialised near
    the identity."""

    def __init__(self, hidden: int, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.randn(kernel_size, hidden) / math.sqrt(kernel_size))
        with torch.no_grad():
            self.weight[-1] += 0.5

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x: (T, B, H). before: the K - 1 inputs before x, (B, K - 1, H), oldest first. Returns the outputs (T, B, H)
        and the value of `before` for the next call."""
        seen = torch.cat([before.transpose(0, 1), x.float()])
        time = len(x)
        y = self.weight[0] * seen[:time]
        for j in range(1, self.kernel_size):
            y = torch.addcmul(y, self.weight[j], seen[j : j + time])
        return y, seen[time:].transpose(0, 1)


class FrontBlock(nn.Module):
    """The convolution block `x + feed_forward(convolution(norm(x)))`."""

    def __init__(self, architecture: Architecture, front: Front, dropout: float) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.norm = nn.LayerNorm(hidden, architecture.norm_epsilon)
        self.convolution = CausalConvolution(hidden, front.kernel_size)
        self.feed_forward_in = nn.Linear(hidden, front.feed_forward)
        self.feed_forward_out = nn.Linear(front.feed_forward, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        y, after = self.convolution(self.norm(x), before)
        y = self.feed_forward_out(torch.relu(self.feed_forward_in(y)))
        return x + self.dropout(y), after


class ResidualLayer(nn.Module):
    """The residual block: `x + mix(cell(norm(x)))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, architecture: Architecture, index: int, dropout: float) -> None:
        super().__init__()
        hidden, width, epsilon = architecture.hidden, architecture.feed_forward, architecture.norm_epsilon
        self.norm = nn.LayerNorm(hidden, epsilon)
        self.cell = build_cell(architecture, index)
        self.mix = nn.Linear(architecture.cell_units, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.has_feed_forward = width > 0
        if self.has_feed_forward:
            self.feed_forward_norm = nn.LayerNorm(hidden, epsilon)
            self.feed_forward_in = nn.Linear(hidden, width)
            self.feed_forward_out = nn.Linear(width, hidden)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.norm(x), state)
        return self.above(x, y), state

    def above(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes the block's output (..., H) from the block's input x, (..., H), and its cell's output y, (...,
        units)."""
        x = x + self.dropout(self.mix(y))
        if self.has_feed_forward:
            y = torch.relu(self.feed_forward_in(self.feed_forward_norm(x)))
            x = x + self.dropout(self.feed_forward_out(y))
        return x


class Network(nn.Module):
    """A recurrent next-token model. All arguments besides the architecture are dropout, which applies only in training:
    see the keys of `ModelConfig` with these names."""

    def __init__(
        self,
        architecture: Architecture,
        dropout: float = 0.0,
        *,
        embedding_dropout: float = 0.0,
        weight_dropout: float = 0.0,
        locked: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.embedding_dropout = embedding_dropout
        residual = architecture.block == "residual"
        self.embedding = nn.Embedding(architecture.vocabulary_size, architecture.embedding)
        nn.init.normal_(self.embedding.weight, std=architecture.embedding**-0.5 if architecture.tied else 1.0)
        self.dropout = nn.Dropout(dropout)
        front = architecture.front
        blocks = [] if front is None else [FrontBlock(architecture, front, dropout) for _ in range(front.blocks)]
        self.front = nn.ModuleList(blocks)
        self.layers = nn.ModuleList(
            ResidualLayer(architecture, index, dropout) if residual else PlainLayer(architecture, index, dropout)
            for index in range(architecture.layers)
        )
        self.norm = nn.LayerNorm(architecture.hidden, architecture.norm_epsilon) if residual else nn.Identity()
        self.head = nn.Linear(architecture.hidden, architecture.vocabulary_size)
        nn.init.zeros_(self.head.bias)
        if architecture.tied:
            self.head.weight = self.embedding.weight
        if locked:
            for module in self.modules():
                if isinstance(getattr(module, "dropout", None), nn.Dropout):
                    module.dropout = LockedDropout(dropout)
        for layer in self.layers:
            if isinstance(layer.cell, LstmCell):
                layer.cell.weight_dropout = weight_dropout

    def zero_state(self, batch: int) -> list[Tensor]:
        """Returns the state before any token: zero tensors, (batch, *shape) each, in the manifest's order."""
        tensors = self.architecture.state_tensors()
        return [self.embedding.weight.new_zeros(batch, *tensor.shape) for tensor in tensors]

    def forward(self, tokens: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """tokens: int64 (T, B). Returns hidden, the output layer's input, float32 (T, B, H), and the final state."""
        if state is None:
            state = self.zero_state(tokens.shape[1])
        x = self._embedded(tokens)
        if self.architecture.block == "residual":
            x = self.dropout(x)
        after = []
        for block, before in zip(self.front, state, strict=False):
            x, inputs = block(x, before)
            after.append(inputs)
        width = len(CELLS[self.architecture.cell].states)
        for layer in self.layers:
            x, layer_state = layer(x, tuple(state[len(after) : len(after) + width]))
            after.extend(layer_state)
        hidden = self.norm(x)
        return self.dropout(hidden) if self._drops_whole_output else hidden, after

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings of `tokens`. In training, tokens are dropped with all their occurrences (Gal and
        Ghahramani 2016, arXiv 1512.05287)."""
        x = functional.embedding(tokens, self.embedding.weight)
        if self.training and self.embedding_dropout:
            kept = functional.dropout(x.new_ones(self.architecture.vocabulary_size), self.embedding_dropout)
            x = x * kept[tokens].unsqueeze(-1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the output layer: hidden (..., H) -> logits (..., V)."""
        output: Tensor = self.head(self.dropped(hidden))
        return output

    def dropped(self, hidden: Tensor) -> Tensor:
        """Applies the dropout of training to the output layer's input `hidden`, if the blocks are plain. Residual
        blocks apply their own dropout."""
        if self.architecture.block != "plain" or self._drops_whole_output:
            return hidden
        dropped: Tensor = self.dropout(hidden)
        return dropped

    @property
    def _drops_whole_output(self) -> bool:
        """Whether the output's dropout has one mask for all time steps, so that it applies before the steps are chosen
        that have a target."""
        return isinstance(self.dropout, LockedDropout) and self.architecture.block == "plain"

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensors of the weights file: those of the `state_dict`, without the output matrix if it is tied
        to the embedding."""
        skip = {"head.weight"} if self.architecture.tied else set()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in skip}

    def digest(self) -> str:
        """Returns the SHA-256 of the weights."""
        found = hashlib.sha256()
        for tensor in self.weights().values():
            found.update(tensor.cpu().numpy().tobytes())
        return found.hexdigest()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Loads tensors with the names that the method `weights` returns. Raises RuntimeError if a tensor is missing,
        unknown, or has another shape."""
        tied = {"head.weight": weights["embedding.weight"]} if self.architecture.tied else {}
        self.load_state_dict(weights | tied)
