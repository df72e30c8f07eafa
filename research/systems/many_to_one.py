"""One output at the end of a sequence, and one output at each step.

The parity of the negative inputs is one bit that must be kept and changed at every step: the product of the signs so
far. A network that answers at each step is told of its first mistake. One that answers at the end is told only whether
it is right. The same network gives both: its last output is the summary of the sequence. The running sum is linear, so
its weights are known: what the state keeps is multiplied by 1, and what the output shows of one input is 1.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from research.systems.system import (
    KAMPER,
    TRIPP,
    Answer,
    Measured,
    System,
    descend,
    generator,
    normal,
    solve,
    trainable,
)

LENGTH, UNITS, STEPS = 6, 16, 400


def parity_outputs(weights: list[Tensor], x: Tensor) -> Tensor:
    """Runs h_t = tanh(W h_{t-1} + U x_t + b), o_t = V h_t + c. x: (batch, T). Returns logits (batch, T)."""
    W, U, b, V, c = weights
    h = torch.zeros(len(x), UNITS, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        h = torch.tanh(h @ W.T + x[:, t, None] @ U.T + b)
        outputs.append(h @ V[0] + c)
    return torch.stack(outputs, 1)


def all_signs(length: int) -> Tensor:
    """Returns all sequences of the inputs 1 and -1: (2^length, length)."""
    return torch.tensor(list(itertools.product((1.0, -1.0), repeat=length)), dtype=torch.float64)


def learned_parity(every_step: bool, random: torch.Generator) -> list[Tensor]:
    """Trains on all sequences of LENGTH signs, with the loss of every output or of the last one. Returns the
    weights."""
    weights = trainable(random, (UNITS, UNITS), (UNITS, 1), (UNITS,), (1, UNITS), (1,))
    x = all_signs(LENGTH)
    negative = (x.cumprod(1) < 0).double()
    counted = slice(None) if every_step else slice(LENGTH - 1, LENGTH)

    def loss() -> Tensor:
        logits = parity_outputs(weights, x)
        return nn.functional.binary_cross_entropy_with_logits(logits[:, counted], negative[:, counted])

    descend(loss, weights, steps=STEPS, rate=0.02)
    return weights


def accuracy(weights: list[Tensor], length: int) -> Tensor:
    """Returns, for each step, the share of the sequences of `length` signs whose parity so far is answered right."""
    x = all_signs(length)
    with torch.no_grad():
        return ((parity_outputs(weights, x) > 0) == (x.cumprod(1) < 0)).double().mean(0)


def learned_sum(random: torch.Generator) -> tuple[float, float]:
    """Trains h_t = w h_{t-1} + u x_t, o = v h_T with one output at the end, the sum. Returns w and u v."""
    x = normal(random, 50, 8)
    w, u, v = (torch.tensor(start, dtype=torch.float64, requires_grad=True) for start in (0.5, 0.5, 0.5))

    def loss() -> Tensor:
        h = torch.zeros(50, dtype=torch.float64)
        for t in range(8):
            h = w * h + u * x[:, t]
        return (v * h - x.sum(1)).square().mean()

    solve(loss, [w, u, v])
    return w.item(), (u * v).item()


def measure(seed: int) -> Measured:
    """Learns both tasks."""
    random = generator(seed)
    at_each_step = accuracy(learned_parity(True, random), LENGTH)
    at_the_end = accuracy(learned_parity(False, random), LENGTH)
    kept, shown = learned_sum(random)
    return Measured(
        [
            Answer("accuracy of the parity so far, one output at each step", 1, float(at_each_step.mean())),
            Answer("accuracy of the parity, one output at the end", 1, float(at_the_end[-1])),
            Answer("sum: what the state keeps per step", 1, kept, 1e-4),
            Answer("sum: what the output shows of an input", 1, shown, 1e-4),
        ]
    )


SYSTEM = System(
    title="many-to-one; one output at each step",
    source=f"{TRIPP}; {KAMPER}",
    source_equation="o(tau), a single output vector; y_t at every time step t",
    our_equation="h_t = tanh(W h_{t-1} + U x_t + b), o_t = V h_t + c: all o_t, or only o_T",
    task="parity of the negative inputs; sum of the inputs",
    measure=measure,
)
