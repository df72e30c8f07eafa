"""Teacher forcing, exposure bias and scheduled sampling.

With teacher forcing, a network with output feedback is trained on the correct previous output. At test time it receives
its own outputs, which training may never have shown to it. The language of the task makes this exposure bias
computable: a sentence repeats its first word, `a` or `b`. Labels are noisy: with probability NOISE a label is `?`,
which no sentence contains. One row of W is the network's answer to one previous output, so the optimum is a table of
probabilities.

- Teacher forcing never feeds `?`, so that row keeps its first value, which is uniform. The free-running network writes
  `?` with probability NOISE, and is then lost: a third of the answers to `?` are `?` again.
- Scheduled sampling feeds the network's own output with probability OWN. This trains the row of `?`. But it also feeds
  `a` while the sentence repeats `b`, so the rows of `a` and `b` leave the language's conditional distribution: the
  objective is not proper (Huszar, 2015, "How (not) to train your generative model"). OWN is constant here; the lecture
  raises it during training, and the last value decides the optimum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from research.systems.system import TRIPP, Answer, Curves, Measured, System, generator

WORDS, UNKNOWN = 3, 2  # a, b and ?
NOISE, LENGTH, OWN = 0.1, 12, 0.5
SENTENCES, STEPS, RATE = 500, 300, 5.0
LABELS = torch.tensor([[1 - NOISE, 0, NOISE], [0, 1 - NOISE, NOISE]], dtype=torch.float64)


def optimum(own: float) -> Tensor:
    """Returns the best answers (previous output, next output) under scheduled sampling, as the fixed point of: feed
    with these answers, then answer each fed word by the mean label. `own` = 0 is teacher forcing."""
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


def measure(seed: int) -> Measured:
    """Trains with teacher forcing and with scheduled sampling, and runs both networks freely."""
    random = generator(seed)
    taught, scheduled = trained(0, random), trained(OWN, random)
    best, curves = optimum(OWN), Curves()
    for name, known_rows, rows in (("teacher forcing", optimum(0), taught), ("scheduled sampling", best, scheduled)):
        known, reached = free_running(known_rows), sample_freely(rows, random)
        for index, kind in enumerate(("right", "?")):
            curves[f"{name}, {kind}, known"], curves[f"{name}, {kind}, reached"] = known[index], reached[index]

    def last(what: str, name: str, within: float) -> Answer:
        return Answer(what, curves[f"{name}, known"][-1], curves[f"{name}, reached"][-1], within)

    return Measured(
        [
            last("P(sentence's word) after teacher forcing, 12th free step", "teacher forcing, right", 0.025),
            last("P(?) after teacher forcing, 12th free step", "teacher forcing, ?", 0.015),
            last("P(?) after scheduled sampling, 12th free step", "scheduled sampling, ?", 0.015),
            Answer("P(b after a) after scheduled sampling", float(best[0, 1]), float(scheduled[0, 1]), 0.01),
        ],
        curves,
    )


SYSTEM = System(
    title="teacher forcing and scheduled sampling",
    source=TRIPP,
    source_equation='"the correct output of the previous step"; "its own output more and more often"',
    our_equation="o_t = softmax(W y_{t-1}), y = the correct word, or with probability p a word drawn from o_{t-1}",
    task="repeat the first word, trained with noisy labels; then run freely",
    measure=measure,
)
