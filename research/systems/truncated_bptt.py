"""Truncated back-propagation: the gradient without the steps more than k back.

The gradient of a recurrent weight is a sum over the steps at which it was used. Truncation keeps the k latest. Two
truncations differ:

- Truncated back-propagation runs the model over the whole past, and follows the gradient for k steps. What it leaves
  out is the tail of the sum.
- The truncated model also starts from the zero state k steps before. Lemma 2 of Miller and Hardt bounds the distance of
  its gradient from the full one by gamma k lambda^k.

For h_t = w h_{t-1} + 1 after a long past, both are closed forms: the state is 1 / (1 - w) and its gradient 1 / (1 -
w)^2; the tail is w^k / (1 - w)^2; and the gap of the truncated model is w^k / (1 - w)^2 + k w^(k-1) / (1 - w). The
factor k of Lemma 2 is therefore needed. For a tanh network with norm(W) = lambda and loss q . h_T, the term from j
steps back is at most norm(q) lambda^j H, with H the largest norm of a state: the tail is at most norm(q) H lambda^k /
(1 - lambda).
"""

from __future__ import annotations

import torch
from torch import Tensor

from research.systems.system import POST, SLIDES, Answer, Measured, System, generator, normal

PAST, HORIZONS, FACTOR, UNITS = 300, tuple(range(1, 41)), 0.8, 8
GAMMA = 1 / (1 - FACTOR) ** 2 + 1 / (FACTOR * (1 - FACTOR))


def scalar_gradient(k: int, keep_state: bool) -> float:
    """Returns dh_T/dw over the last k steps, from the state of the whole past if `keep_state`, else from zero."""
    w = torch.tensor(FACTOR, dtype=torch.float64, requires_grad=True)
    h = torch.zeros((), dtype=torch.float64)
    if keep_state:
        for _ in range(PAST - k):
            h = (w * h + 1).detach()  # truncated back-propagation: the state stays, its gradient goes
    for _ in range(k):
        h = w * h + 1
    return float(torch.autograd.grad(h, w)[0])


def network_gradient(recurrent: Tensor, inputs: Tensor, q: Tensor, k: int) -> tuple[Tensor, float]:
    """Returns the gradient of q . h_T by W over the last k steps of h_t = tanh(W h_{t-1} + x_t), and the largest norm
    of a state. recurrent: W, (n, n); inputs: (T, n)."""
    W = recurrent.detach().requires_grad_()
    h, largest = torch.zeros(len(q), dtype=torch.float64), 0.0
    for t, x in enumerate(inputs):
        if t == len(inputs) - k:
            h = h.detach()
        h = torch.tanh(W @ h + x)
        largest = max(largest, float(h.detach().norm()))
    [gradient] = torch.autograd.grad(q @ h, W)
    return gradient, largest


def summed_gradient(recurrent: Tensor, inputs: Tensor, q: Tensor, k: int) -> Tensor:
    """Returns the same gradient as the sum over j = 0 ... k - 1 of dp/dh_T dh_T/dh_{T-j} dh_{T-j}/dW, term by term."""
    states = [torch.zeros(len(q), dtype=torch.float64)]
    for x in inputs:
        states.append(torch.tanh(recurrent @ states[-1] + x))
    total, back = torch.zeros_like(recurrent), q  # dp/dh_{T-j}
    for j in range(k):
        before_tanh = back * (1 - states[-1 - j] ** 2)
        total += before_tanh.outer(states[-2 - j])
        back = recurrent.T @ before_tanh
    return total


def measure(seed: int) -> Measured:
    """Measures the tail and the gap for every horizon k."""
    full = 1 / (1 - FACTOR) ** 2
    tail = [full - scalar_gradient(k, True) for k in HORIZONS]
    gap = [full - scalar_gradient(k, False) for k in HORIZONS]
    known_tail = [FACTOR**k / (1 - FACTOR) ** 2 for k in HORIZONS]
    known_gap = [a + k * FACTOR ** (k - 1) / (1 - FACTOR) for k, a in zip(HORIZONS, known_tail, strict=True)]
    lemma = [GAMMA * k * FACTOR**k for k in HORIZONS]

    random = generator(seed)
    W = FACTOR * torch.linalg.qr(normal(random, UNITS, UNITS)).Q  # every direction shrinks by the factor
    inputs, q = normal(random, 80, UNITS, scale=0.05), normal(random, UNITS)
    whole, largest = network_gradient(W, inputs, q, len(inputs))
    latest = [network_gradient(W, inputs, q, k)[0] for k in HORIZONS]
    network_tail = [float((whole - gradient).norm()) for gradient in latest]
    apart = max(
        float((gradient - summed_gradient(W, inputs, q, k)).abs().max())
        for k, gradient in zip(HORIZONS, latest, strict=True)
    )
    bound = [float(q.norm()) * largest * FACTOR**k / (1 - FACTOR) for k in HORIZONS]

    def worst(reached: list[float], known: list[float]) -> float:
        return max(abs(a / b - 1) for a, b in zip(reached, known, strict=True))

    def largest_share(reached: list[float], limit: list[float]) -> float:
        return max(a / b for a, b in zip(reached, limit, strict=True))

    return Measured(
        [
            Answer("scalar: largest relative error of the tail's closed form", 0, worst(tail, known_tail), 1e-8),
            Answer("scalar: largest relative error of the gap's closed form", 0, worst(gap, known_gap), 1e-8),
            Answer("scalar: gap / (gamma k lambda^k), largest", 1, largest_share(gap, lemma), 1e-9, "at most"),
            Answer("scalar: gap / tail at k = 40", 1 + 40 * (1 - FACTOR) / FACTOR, gap[-1] / tail[-1], 1e-6),
            Answer("tanh network: largest distance from the sum of k terms", 0, apart, 1e-12),
            Answer("tanh network: tail / bound, largest", 1, largest_share(network_tail, bound), 0, "at most"),
        ],
        {"tail": tail, "gap": gap, "lemma": lemma, "network": network_tail, "bound": bound},
    )


SYSTEM = System(
    title="truncated back-propagation",
    source=f"{SLIDES}; {POST}",
    source_equation="dE_T/dW = sum over k = 0 ... K of dE_T/ds_T ds_T/ds_{T-k} ds_{T-k}/dW; Lemma 2: gamma k lambda^k",
    our_equation="tail = w^k / (1 - w)^2; gap = tail + k w^(k-1) / (1 - w) <= gamma k w^k, "
    "gamma = 1 / (1 - w)^2 + 1 / (w (1 - w))",
    task="the gradient that is left out, for every k up to 40",
    measure=measure,
)
