"""The torch network of an architecture: embedding, layers, output layer.

Its `state_dict` has the names of the bundle's weights file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from wane.models.cells import State
from wane.models.cells.lstm import LstmCell
from wane.models.layer_parts import load

if TYPE_CHECKING:
    from wane.models.architecture import Architecture, Placed
    from wane.models.layer_registry import Block


def build_cell(placed: Placed) -> nn.Module:
    """Builds the cell of one layer. `models/cells/__init__.py` describes its interface."""
    cell: nn.Module = load("torch", placed.layer.module).build(placed)
    return cell


class LockedDropout(nn.Dropout):
    """Dropout with one mask for all time steps of a sequence (Gal and Ghahramani 2016, arXiv 1512.05287)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (T, B, H)."""
        return x * super().forward(x.new_ones(1, *x.shape[1:])) if self.training and self.p else x


class PlainLayer(nn.Module):
    """A cell that reads the output of the layer below."""

    def __init__(self, architecture: Architecture, placed: Placed, dropout: float) -> None:
        del architecture
        super().__init__()
        self.cell = build_cell(placed)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.dropout(x), state)
        return y, state


class FrontBlock(nn.Module):
    """The block `x + feed_forward(cell(norm(x)))`. The cell's name among the parameters is that of its kind."""

    def __init__(self, architecture: Architecture, placed: Placed, dropout: float) -> None:
        super().__init__()
        hidden, width = architecture.hidden, placed.layer.feed_forward
        self.norm = nn.LayerNorm(hidden, architecture.norm_epsilon)
        self._cell = placed.layer.kind
        self.add_module(self._cell, build_cell(placed))
        self.feed_forward_in = nn.Linear(hidden, width)
        self.feed_forward_out = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)

    @property
    def cell(self) -> nn.Module:
        """The cell."""
        return self.get_submodule(self._cell)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.cell(self.norm(x), state)
        y = self.feed_forward_out(torch.relu(self.feed_forward_in(y)))
        return x + self.dropout(y), state


class ResidualLayer(nn.Module):
    """The residual block: `x + mix(cell(norm(x)))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, architecture: Architecture, placed: Placed, dropout: float) -> None:
        super().__init__()
        hidden, width, epsilon = architecture.hidden, placed.layer.feed_forward, architecture.norm_epsilon
        self.norm = nn.LayerNorm(hidden, epsilon)
        self.cell = build_cell(placed)
        self.mix = nn.Linear(placed.layer.units, hidden, bias=False)
        if getattr(placed.layer, "skip", False):
            self.skip = nn.Linear(placed.layer.units, hidden, bias=False)
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


BLOCKS: dict[Block, type[nn.Module]] = {"plain": PlainLayer, "residual": ResidualLayer, "front": FrontBlock}


class Network(nn.Module):
    """A next-token model: a stack of causal layers. `front` has the layers with finite memory, `layers` those with
    fading memory. All arguments besides the architecture are dropout, which applies only in training:
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
        self.embedding = nn.Embedding(architecture.vocabulary_size, architecture.embedding)
        nn.init.normal_(self.embedding.weight, std=architecture.embedding**-0.5 if architecture.tied else 1.0)
        self.dropout = nn.Dropout(dropout)
        blocks = [
            (placed.layer.finite, BLOCKS[placed.layer.block](architecture, placed, dropout))
            for placed in architecture.placed()
        ]
        self.front = nn.ModuleList(block for finite, block in blocks if finite)
        self.layers = nn.ModuleList(block for finite, block in blocks if not finite)
        residual = architecture.residual
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
        if self.architecture.residual:
            x = self.dropout(x)
        after: list[Tensor] = []
        skipped = x.new_zeros(())
        for placed, block in zip(self.architecture.placed(), [*self.front, *self.layers], strict=True):
            count = len(placed.layer.states)
            before = tuple(state[len(after) : len(after) + count])
            if getattr(placed.layer, "skip", False):
                y, layer_state = block.cell(block.norm(x), before)
                x, skipped = block.above(x, y), skipped + block.skip(y)
            else:
                x, layer_state = block(x, before)
            after.extend(layer_state)
        if skipped.ndim:
            x = x + skipped
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
        if self.architecture.residual or self._drops_whole_output:
            return hidden
        dropped: Tensor = self.dropout(hidden)
        return dropped

    @property
    def _drops_whole_output(self) -> bool:
        """Whether the output's dropout has one mask for all time steps, so that it applies before the steps are chosen
        that have a target."""
        return isinstance(self.dropout, LockedDropout) and not self.architecture.residual

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
