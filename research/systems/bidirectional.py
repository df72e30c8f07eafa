"""Bidirectional and multi-layer networks: a tag that needs the past and the future.

The tag of a position is the exclusive or of its two neighbours, x_{t-1} xor x_{t+1}, for random bits.

- A network that reads forward only knows nothing of x_{t+1}, whatever its depth: every tag is a fair coin to it, and
  its best loss is log 2.
- One bidirectional layer with a linear output knows both neighbours, but its logit is a sum f(past) + g(future). If
  either neighbour is flipped, the tag flips. The loss is convex in the logit, so the mean over these symmetries, the
  logit 0, is the best sum: the loss is log 2 again.
- Two bidirectional layers: the second layer's nonlinearity sees both directions of the first. The loss falls to 0.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from research.systems.system import KAMPER, Answer, Measured, System, descend, generator, trainable

LENGTH, UNITS = 6, 16


def direction(weights: list[Tensor], x: Tensor, backward: bool) -> Tensor:
    """Runs h_t = tanh(W h_{t-1} + U x_t + b) over x (T, batch, inputs), from the last step to the first if `backward`.
    Returns the states (T, batch, UNITS) in the order of time."""
    W, U, b = weights
    h = torch.zeros(x.shape[1], UNITS, dtype=torch.float64)
    states = []
    for step in x.flip(0) if backward else x:
        h = torch.tanh(h @ W.T + step @ U.T + b)
        states.append(h)
    return torch.stack(states[::-1] if backward else states)


class Network:
    """Layers of one or two directions, and a linear output for each position."""

    def __init__(self, layers: int, both: bool, random: torch.Generator) -> None:
        self.layers: list[list[list[Tensor]]] = []
        inputs = 1
        for _ in range(layers):
            shapes = [(UNITS, UNITS), (UNITS, inputs), (UNITS,)]
            self.layers.append([trainable(random, *shapes) for _ in range(1 + both)])
            inputs = UNITS * (1 + both)
        self.output = trainable(random, (1, inputs), (1,))

    def weights(self) -> list[Tensor]:
        """Returns all weights."""
        return [weight for layer in self.layers for way in layer for weight in way] + self.output

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the logits (T, batch) for the inputs x (T, batch)."""
        h = x[:, :, None]
        for layer in self.layers:
            h = torch.cat([direction(way, h, backward=bool(number)) for number, way in enumerate(layer)], 2)
        V, c = self.output
        return h @ V[0] + c


def trained_loss(layers: int, both: bool, random: torch.Generator) -> float:
    """Trains on all sequences of LENGTH bits. Returns the loss, in nats, of the positions with two neighbours."""
    bits = torch.tensor(list(itertools.product((0, 1), repeat=LENGTH))).T
    tags = (bits[:-2] ^ bits[2:]).double()
    x = 2.0 * bits.double() - 1
    network = Network(layers, both, random)

    def loss() -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(network(x)[1:-1], tags)

    return descend(loss, network.weights(), steps=200, rate=0.03)


def measure(seed: int) -> Measured:
    """Trains the three networks."""
    random = generator(seed)
    return Measured(
        [
            Answer("loss, 2 layers forward", math.log(2), trained_loss(2, False, random), 1e-3),
            Answer("loss, 1 bidirectional layer", math.log(2), trained_loss(1, True, random), 1e-3),
            Answer("loss, 2 bidirectional layers", 0, trained_loss(2, True, random), 0.01),
        ]
    )


SYSTEM = System(
    title="bidirectional and multi-layer networks",
    source=KAMPER,
    source_equation='"Bidirectional RNNs", "Multilayer RNNs" (drawings)',
    our_equation="f_t = tanh(W f_{t-1} + U x_t + b), g_t = tanh(R g_{t+1} + S x_t + c); the next layer reads f_t, g_t",
    task="tag each bit with the exclusive or of its neighbours",
    measure=measure,
)
