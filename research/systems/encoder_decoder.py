"""Encoder and decoder: one network turns a sequence into a vector C, another one turns C into a sequence.

The decoder gets C as its initial state, as a constant input of every step, or as both. C is all that it knows of the
input, so it must contain the whole sequence. The tasks are to reverse and to copy. Every sequence over the alphabet is
in the data, a part of them held out of training, so the right answers are known. A decoder without C can only guess:
over all sequences, every constant answer is right in exactly 1 / (size of the alphabet) of the places.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from research.systems.system import POST, TRIPP, Answer, Measured, System, descend, generator, trainable

SYMBOLS, LENGTH, UNITS = 5, 4, 32
HELD_OUT, BATCH = 125, 100
WAYS = ("initial state", "input", "both")


class EncoderDecoder:
    """h_t = tanh(W h_{t-1} + U x_t + b) reads; s_t = tanh(A s_{t-1} + B C + E o_{t-1}) writes, from s_0 = C or 0.

    The previous output o_{t-1} is the correct one in training and the network's own in use. `way` is how the decoder
    gets C: one of WAYS, or `none`.
    """

    def __init__(self, way: str, random: torch.Generator) -> None:
        self.way = way
        shapes = [(UNITS, UNITS), (UNITS, SYMBOLS), (UNITS,), (UNITS, UNITS), (UNITS, UNITS), (UNITS, SYMBOLS + 1)]
        self.weights = trainable(random, *shapes, (SYMBOLS, UNITS), (SYMBOLS,))

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Returns logits (batch, LENGTH, SYMBOLS). x: symbols (batch, LENGTH); y: the correct outputs, or None."""
        W, U, b, A, B, E, V, c = self.weights
        h = torch.zeros(len(x), UNITS, dtype=torch.float64)
        for t in range(LENGTH):
            h = torch.tanh(h @ W.T + U.T[x[:, t]] + b)
        s = h if self.way in ("initial state", "both") else torch.zeros_like(h)
        constant = h @ B.T if self.way in ("input", "both") else torch.zeros_like(h)
        previous, logits = torch.full((len(x),), SYMBOLS), []
        for t in range(LENGTH):
            s = torch.tanh(s @ A.T + constant + E.T[previous])
            logits.append(s @ V.T + c)
            previous = logits[-1].argmax(1) if y is None else y[:, t]
        return torch.stack(logits, 1)


def accuracy(way: str, reverse: bool, random: torch.Generator) -> tuple[float, float]:
    """Trains a network. Returns the share of right symbols in the held-out sequences and in all sequences."""
    x = torch.tensor(list(itertools.product(range(SYMBOLS), repeat=LENGTH)))
    y = x.flip(1) if reverse else x
    order = torch.randperm(len(x), generator=random)
    held_out, shown = order[:HELD_OUT], order[HELD_OUT:]
    network = EncoderDecoder(way, random)

    def loss() -> Tensor:
        batch = shown[torch.randint(len(shown), (BATCH,), generator=random)]
        return nn.functional.cross_entropy(network(x[batch], y[batch]).flatten(0, 1), y[batch].flatten())

    descend(loss, network.weights, steps=200, rate=0.03)
    with torch.no_grad():
        right = (network(x).argmax(2) == y).double()
    return float(right[held_out].mean()), float(right.mean())


def measure(seed: int) -> Measured:
    """Trains one network for each task and each way of giving C to the decoder, and one decoder without C."""
    random = generator(seed)
    answers = [
        Answer(f"held-out accuracy, {task}, C as {way}", 1, accuracy(way, task == "reverse", random)[0], 0.02)
        for task in ("reverse", "copy")
        for way in WAYS
    ]
    return Measured(
        [*answers, Answer("accuracy on all sequences without C", 1 / SYMBOLS, accuracy("none", True, random)[1])]
    )


SYSTEM = System(
    title="encoder-decoder",
    source=f"{TRIPP}; {POST}",
    source_equation='"C can be provided to the decoder as an initial state, or as constant input ... or both"',
    our_equation="C = h_T; s_0 = C or s_0 = 0; s_t = tanh(A s_{t-1} + B C + E o_{t-1}) or the same without B C",
    task=f"reverse and copy {LENGTH} out of {SYMBOLS} symbols, {HELD_OUT} of {SYMBOLS**LENGTH} sequences held out",
    measure=measure,
)
