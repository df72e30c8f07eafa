"""Feedback only through the output: the network receives its previous output, and keeps no other state.

Such a network knows no more of the past than its last output says. With teacher forcing, training gives it the correct
previous output, so all steps of a sentence can be trained at the same time. At test time it receives its own outputs,
which training may never have shown to it. The language of the task makes this exposure bias computable: a sentence
repeats its first word, `a` or `b`. Labels are noisy: with probability NOISE a label is `?`, which no sentence contains.
One row of W is the network's answer to one previous output, so every optimum below is a table of probabilities.

- Teacher forcing never feeds `?`, so that row keeps its first value, which is uniform. The free-running network writes
  `?` with probability NOISE, and is then lost: a third of the answers to `?` are `?` again.
- Scheduled sampling feeds the network's own output with probability `own`. This trains the row of `?`. But it also feeds
  `a` while the sentence repeats `b`, so the rows of `a` and `b` leave the language's conditional distribution: the
  objective is not proper (Huszar, 2015, "How (not) to train your generative model").
- Some languages need more than the last output: in `x y x y`, two words in alternation, the last word says nothing of the
  next. With output feedback alone the loss is log 2 at best, while a network with a hidden state reaches 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from research.systems.system import TRIPP, Answer, Curves, Measured, System, descend, generator, trainable

WORDS, UNKNOWN = 3, 2  # a, b and ?
NOISE, LENGTH, OWN = 0.1, 12, 0.5
SENTENCES, STEPS, RATE = 500, 300, 5.0
LABELS = torch.tensor([[1 - NOISE, 0, NOISE], [0, 1 - NOISE, NOISE]], dtype=torch.float64)


def optimum(own: float) -> Tensor:
    """Returns the best answers (previous output, next output) under scheduled sampling, as the fixed point of: feed with
    these answers, then answer each fed word by the mean label. `own` = 0 is teacher forcing."""
    rows = torch.full((WORDS, WORDS), 1 / WORDS, dtype=torch.float64)
    start = torch.tensor([[0.5, 0, 0], [0, 0.5, 0]], dtype=torch.float64)  # P(sentence's word, fed word)
    for _ in range(200):
        fed, seen = start, []
        for _ in range(LENGTH):
            seen.append(fed)
            fed = (1 - own) * start + own * fed @ rows
        counts = torch.stack(seen).sum(0)
        trained = counts.sum(0) > 0
        rows = torch.where(trained[:, None], counts.T @ LABELS / counts.sum(0).clamp_min(1e-300)[:, None], rows)
    return rows


def free_running(rows: Tensor) -> tuple[list[float], list[float]]:
    """Returns, by position of a free run, the probability of the sentence's word and the probability of `?`."""
    at, right, unknown = torch.tensor([1.0, 0, 0], dtype=torch.float64), [], []
    for _ in range(LENGTH):
        at = at @ rows
        right.append(float(at[0]))
        unknown.append(float(at[UNKNOWN]))
    return right, unknown


def trained(own: float, random: torch.Generator) -> Tensor:
    """Trains o_t = softmax(W o_{t-1}) with a share `own` of own outputs. Returns its mean answers to each fed word over
    the last half of the steps."""
    W = torch.zeros(WORDS, WORDS, dtype=torch.float64, requires_grad=True)
    mean = torch.zeros_like(W)
    for step in range(STEPS):
        words = torch.randint(2, (SENTENCES,), generator=random)
        fed, inputs = words, []
        for _ in range(LENGTH):
            inputs.append(fed)
            sampled = torch.multinomial(W.detach().softmax(1)[fed], 1, generator=random)[:, 0]
            fed = torch.where(torch.rand(SENTENCES, generator=random) < own, sampled, words)
        unknown = torch.rand(LENGTH, SENTENCES, generator=random) < NOISE
        labels = torch.where(unknown, UNKNOWN, words)
        loss = nn.functional.cross_entropy(W[torch.stack(inputs)].flatten(0, 1), labels.flatten())
        [slope] = torch.autograd.grad(loss, [W])
        with torch.no_grad():
            W -= RATE * slope
        if step >= STEPS // 2:
            mean += W.detach().softmax(1) / (STEPS - STEPS // 2)
    return mean


def sample_freely(rows: Tensor, random: torch.Generator, count: int = 20_000) -> tuple[list[float], list[float]]:
    """Runs the network on its own outputs. Returns the measured values of `free_running`."""
    at, right, unknown = torch.zeros(count, dtype=torch.int64), [], []
    for _ in range(LENGTH):
        at = torch.multinomial(rows[at], 1, generator=random)[:, 0]
        right.append(float((at == 0).double().mean()))
        unknown.append(float((at == UNKNOWN).double().mean()))
    return right, unknown


def alternation_loss(state: bool, random: torch.Generator) -> float:
    """Trains on all sentences x y x y x y. The network has output feedback only, or also a hidden state. Returns the loss
    of the words that are determined, from the third on, in nats."""
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    words = nn.functional.one_hot(pairs.repeat(1, 3), 2).double()
    U, W, V, b = trainable(random, (8, 2), (8, 8), (2, 8), (8,))

    def loss() -> Tensor:
        h, losses = torch.zeros(4, 8, dtype=torch.float64), []
        for t in range(1, 6):
            h = torch.tanh(words[:, t - 1] @ U.T + b + (h @ W.T if state else 0))
            losses.append(nn.functional.cross_entropy(h @ V.T, words[:, t]))
        return torch.stack(losses[1:]).mean()

    return descend(loss, [U, W, V, b], steps=150, rate=0.05)


def measure(seed: int) -> Measured:
    """Trains with teacher forcing and with scheduled sampling, and runs both networks freely."""
    random = generator(seed)
    taught, scheduled = trained(0, random), trained(OWN, random)
    best_taught, best_scheduled = optimum(0), optimum(OWN)
    curves: Curves = {}
    for name, best, rows in (("teacher forcing", best_taught, taught), ("scheduled sampling", best_scheduled, scheduled)):
        for kind, known, reached in zip(("right", "?"), free_running(best), sample_freely(rows, random), strict=True):
            curves[f"{name}, {kind}, known"], curves[f"{name}, {kind}, reached"] = known, reached

    def last(what: str, name: str, within: float) -> Answer:
        return Answer(what, curves[f"{name}, known"][-1], curves[f"{name}, reached"][-1], within)

    return Measured(
        [
            last("P(sentence's word) after teacher forcing, 12th free step", "teacher forcing, right", 0.025),
            last("P(?) after teacher forcing, 12th free step", "teacher forcing, ?", 0.015),
            last("P(?) after scheduled sampling, 12th free step", "scheduled sampling, ?", 0.015),
            Answer("P(b after a) after scheduled sampling", float(best_scheduled[0, 1]), float(scheduled[0, 1]), 0.01),
            Answer("loss on x y x y, output feedback only", math.log(2), alternation_loss(False, random), 1e-3),
            Answer("loss on x y x y, hidden state", 0, alternation_loss(True, random), 0.01),
        ],
        curves,
    )


def plot(axes: Any, curves: Curves) -> None:
    """Plots the free runs: known values as lines, reached values as marks."""
    for number, kind in enumerate(("teacher forcing, right", "teacher forcing, ?", "scheduled sampling, right", "scheduled sampling, ?")):
        at = range(1, LENGTH + 1)
        axes.plot(at, curves[f"{kind}, known"], color=f"C{number}", label=kind)
        axes.plot(at, curves[f"{kind}, reached"], "o", color=f"C{number}", markersize=4)
    axes.axhline(1 - NOISE, color="0.5", linestyle=":", label="right, when fed the correct word")
    axes.set(xlabel="step of the free run", ylabel="probability", title="Exposure bias (lines: known, marks: reached)")
    axes.legend(fontsize=8)


SYSTEM = System(
    title="output feedback, teacher forcing, scheduled sampling",
    source=TRIPP,
    source_equation='"the network only receives its own output from the previous step"; teacher forcing: "the correct output of the previous step"',
    our_equation="o_t = softmax(W y'_{t-1}), y' = the correct word, or with probability p a word drawn from o_{t-1}",
    task="repeat the first word, with noisy labels; x y x y",
    measure=measure,
    plot=plot,
)
