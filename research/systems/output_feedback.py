"""Feedback only through the output: the network receives its previous output, and keeps no other state.

Such a network knows no more of the past than its last output says. In `x y x y x y`, two words in alternation, the last
word says nothing of the next: with output feedback alone the loss is log 2 at best, while a hidden state reaches 0.

What it loses in power it gains in time. With teacher forcing the previous outputs are the data, so no step of training
waits for another one: one product computes all steps. In use it must run step by step. `scheduled_sampling.py` is about
the difference between the two.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from research.systems.system import TRIPP, Answer, Measured, System, descend, generator, trainable

UNITS, LENGTH = 8, 6
PAIRS = torch.tensor(list(itertools.product((0, 1), repeat=2)))
SENTENCES = nn.functional.one_hot(PAIRS.repeat(1, LENGTH // 2), 2).double()  # x y x y x y: (4, LENGTH, 2)


def one_after_another(weights: list[Tensor], state: bool) -> Tensor:
    """Returns the logits of the words 2 ... LENGTH: (4, LENGTH - 1, 2), each computed after the one before.

    h_t = tanh(U y_{t-1} + W h_{t-1} + b), o_t = V h_t, with the correct previous word y_{t-1}. Without `state`,
    W h_{t-1} is left out.
    """
    U, W, V, b = weights
    h, logits = torch.zeros(len(SENTENCES), UNITS, dtype=torch.float64), []
    for t in range(1, LENGTH):
        h = torch.tanh(SENTENCES[:, t - 1] @ U.T + b + (h @ W.T if state else 0))
        logits.append(h @ V.T)
    return torch.stack(logits, 1)


def at_once(weights: list[Tensor]) -> Tensor:
    """Returns the same logits of the network without a state, all steps in one product."""
    U, _, V, b = weights
    return torch.tanh(SENTENCES[:, :-1] @ U.T + b) @ V.T


def determined_loss(logits: Tensor) -> Tensor:
    """Returns the mean loss, in nats, of the words that the first two determine."""
    return nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), SENTENCES[:, 2:].argmax(2).flatten())


def measure(seed: int) -> Measured:
    """Trains both networks on all sentences, and compares the two ways to compute the steps."""
    random = generator(seed)
    shapes = ((UNITS, 2), (UNITS, UNITS), (2, UNITS), (UNITS,))
    feedback, state = trainable(random, *shapes), trainable(random, *shapes)
    without = descend(lambda: determined_loss(at_once(feedback)), feedback[:1] + feedback[2:], steps=150, rate=0.05)
    with_state = descend(lambda: determined_loss(one_after_another(state, True)), state, steps=150, rate=0.05)
    distance = (one_after_another(feedback, False) - at_once(feedback)).abs().max()
    return Measured(
        [
            Answer("loss, output feedback only", math.log(2), without, 1e-3),
            Answer("loss, hidden state", 0, with_state, 0.01),
            Answer("largest distance of all steps at once from step by step", 0, distance.item(), 1e-12),
        ]
    )


SYSTEM = System(
    title="output feedback only",
    source=TRIPP,
    source_equation='"the network only receives its own output from the previous step"',
    our_equation="o_t = V tanh(U y_{t-1} + b), against o_t = V tanh(U y_{t-1} + W h_{t-1} + b)",
    task="x y x y x y: the next word",
    measure=measure,
)
