"""The networks of the paper's experiments: one recurrent layer, in one direction or two, and an output layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from research.paper.corpora import KEYS, Corpus
from wane.models.architecture import Architecture, Placed
from wane.models.certificate.admissible import Box, Inputs, Rows
from wane.models.certificate.layer_bound import LayerBound
from wane.models.certificate.layers import BuildLayer
from wane.models.constraints.layer import ConstrainedLayer
from wane.models.constraints.projection import MARGIN, Constrain
from wane.models.layer_parts import load
from wane.models.networks import build_cell
from wane.models.weights import CellWeights

Cell = Literal["rnn_tanh", "lstm"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a network. cutoffs: those of adaptive softmax (Grave et al. 2017, arXiv 1609.04309); none for a
    linear output layer. dropout: the share of the layer's inputs and outputs that training drops."""

    embedding: int
    hidden: int
    cutoffs: tuple[int, ...] = ()
    dropout: float = 0.0


class Direction(nn.Module):
    """One recurrent layer that reads sequences in one direction."""

    def __init__(self, cell: Cell, inputs: int, hidden: int) -> None:
        super().__init__()
        architecture = Architecture.model_validate(
            {"cell": cell, "vocabulary_size": 2, "embedding": inputs, "hidden": hidden, "layers": 1, "tied": False}
        )
        (self.placed,) = architecture.placed()
        self.cell = build_cell(self.placed)

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x: (T, B, I). Returns the outputs, (T, B, H), and the last state. `state` is the zero state by default."""
        if state is None:
            shapes = [tensor.shape for tensor in self.placed.state_tensors()]
            state = tuple(x.new_zeros(x.shape[1], *shape) for shape in shapes)
        y, state = self.cell(x, state)
        return y, state


class PaperNetwork(nn.Module):
    """Predicts a target at each position of a sequence."""

    def __init__(self, corpus: Corpus, cell: Cell, shape: Shape, bidirectional: bool) -> None:
        super().__init__()
        width = KEYS if corpus.inputs is None else shape.embedding
        self.embedding = None if corpus.inputs is None else nn.Embedding(corpus.inputs, width)
        self.forwards = Direction(cell, width, shape.hidden)
        self.backwards = Direction(cell, width, shape.hidden) if bidirectional else None
        self.dropout = nn.Dropout(shape.dropout)
        features = shape.hidden * (2 if bidirectional else 1)
        self.adaptive: nn.AdaptiveLogSoftmaxWithLoss | None = None
        self.head: nn.Linear | None = None
        if shape.cutoffs:
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(features, corpus.outputs, list(shape.cutoffs))
        else:
            self.head = nn.Linear(features, corpus.outputs)

    def embedded(self, inputs: Tensor) -> Tensor:
        """Returns the recurrent layer's inputs, (T, B, I), of tokens (T, B) or chords (T, B, KEYS)."""
        dropped: Tensor = self.dropout(inputs if self.embedding is None else self.embedding(inputs))
        return dropped

    def features(self, inputs: Tensor, lengths: Tensor, window: int | None) -> Tensor:
        """Returns the output layer's inputs at each position, (T, B, features).

        inputs: (T, B) or (T, B, KEYS); lengths: (B), the number of positions of each sequence. window: the number of
        inputs that each direction reads, from the zero state, with the input of the position itself; None for the whole
        sequence.
        """
        x = self.embedded(inputs)
        found = [_read(self.forwards, x, lengths, window)]
        if self.backwards is not None:
            order = _reversed(lengths, len(x))
            found.append(_ordered(_read(self.backwards, _ordered(x, order), lengths, window), order))
        dropped: Tensor = self.dropout(torch.cat(found, -1))
        return dropped

    def losses(self, features: Tensor, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of each target in nats, (N). features: (N, features), targets: (N), or
        (N, KEYS) for chords, whose keys' losses are summed."""
        if self.adaptive is not None:
            adaptive: Tensor = -self.adaptive(features, targets).output
            return adaptive
        assert self.head is not None
        logits = self.head(features)
        if targets.ndim == 2:
            keys = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return keys.sum(1)
        return nn.functional.cross_entropy(logits, targets, reduction="none")

    @property
    def directions(self) -> list[Direction]:
        """The recurrent layers."""
        return [self.forwards] if self.backwards is None else [self.forwards, self.backwards]

    @torch.no_grad()
    def project(self, contraction: float) -> None:
        """Changes the weights so that each recurrent layer's contraction factor is at most `contraction`."""
        for direction in self.directions:
            constrain: Constrain = load("constraint", direction.placed.layer.module).constrain
            vocabulary = None if self.embedding is None else self.embedding.weight
            below = torch.ones(KEYS, dtype=torch.float64) if vocabulary is None else None
            constrain(ConstrainedLayer(direction, vocabulary, below), contraction * (1 - MARGIN))

    @torch.no_grad()
    def bounds(self) -> list[LayerBound]:
        """Returns what the certificate proves of each recurrent layer."""
        if self.embedding is None:
            inputs: Inputs = Box(np.ones(KEYS))
        else:
            inputs = Rows(self.embedding.weight.double().numpy())
        found = []
        for direction in self.directions:
            build: BuildLayer = load("certificate", direction.placed.layer.module).build_layer
            found.append(build(_weights(direction), inputs).bound)
        return found

    def follows_the_paper(self) -> bool:
        """Returns whether the weights meet the paper's sufficient conditions: for the RNN, |W|_2 < 1; for the LSTM,
        those of `miller_hardt_inf` in models/certificate/cells/lstm.py."""
        for direction, bound in zip(self.directions, self.bounds(), strict=True):
            factors = {proof.rule: proof.factor for proof in bound.proofs}
            if "miller_hardt_inf" in factors:
                if factors["miller_hardt_inf"] is None:
                    return False
            elif not float(torch.linalg.matrix_norm(_recurrent_matrix(direction), 2)) < 1:
                return False
        return True

    def factor(self) -> float | None:
        """Returns the largest contraction factor that the certificate finds for a recurrent layer; None if one is not
        finite."""
        largest = max(bound.factor for bound in self.bounds())
        return largest if math.isfinite(largest) else None


def _recurrent_matrix(direction: Direction) -> Tensor:
    return direction.cell.get_parameter("weight_hh_l0").detach().double()


def _weights(direction: Direction) -> CellWeights:
    tensors = {name: tensor.double().numpy() for name, tensor in direction.cell.state_dict().items()}
    placed: Placed = direction.placed
    return CellWeights.of(placed, {f"{placed.cell}.{name}": tensor for name, tensor in tensors.items()})


def _read(direction: Direction, x: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """Returns a layer's outputs at each position of x (T, B, I), after all positions up to it or after a window of
    them: (T, B, H). With a window, the outputs after the end of a sequence are 0."""
    length, batch = x.shape[:2]
    if window is None or window >= length:
        whole: Tensor = direction(x)[0]
        return whole
    ends, sequences = torch.nonzero(torch.arange(length)[:, None] < lengths, as_tuple=True)  # (N): all positions
    begins = (ends - window + 1).clamp(min=0)
    places = begins + torch.arange(window)[:, None]  # (window, N); the outputs after the last position are not used
    outputs = direction(x[places, sequences])[0]
    y: Tensor = outputs.new_zeros(length, batch, outputs.shape[-1])
    y[ends, sequences] = outputs[ends - begins, torch.arange(len(ends))]
    return y


def _reversed(lengths: Tensor, length: int) -> Tensor:
    """Returns the positions of each sequence in reverse, with its padding still at the end: (T, B)."""
    positions = torch.arange(length)[:, None]
    return torch.where(positions < lengths, lengths - 1 - positions, positions)


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    """Returns x (T, B, ...) with the positions of each sequence in the order (T, B)."""
    return x[order, torch.arange(x.shape[1])]
