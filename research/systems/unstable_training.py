"""Unstable models, which gradient descent does not train, although its step size falls as 1/t.

The model is h_t = w h_{t-1} with h_0 = 1, and the loss is J(w) = h_T^2 / 2 = w^(2T) / 2: smooth, with one stationary
point, w = 0. Gradient descent with the step size alpha / n multiplies w by 1 - (alpha / n) T w^(2T-2) in step n. With
q = alpha T w_0^(2T-2), for T >= 2:

- If q < 2, every factor is between -1 and 1, so abs(w) falls in every step, and the loss never rises.
- If q >= 3, then abs(w) at least doubles in step 1. By induction it doubles in every step: in step n the size of
  (alpha / n) T w^(2T-2) is at least 3 * 4^(n-1) / n >= 3. The loss grows by at least 4^T per step, for ever.

A stable start, abs(w_0) < 1, keeps q small for every T. An unstable one has q >= 3 from a known T on: descent diverges
over longer sequences, however slowly alpha / n starts.

Long memory needs large gains (Pascanu, Mikolov and Bengio, 2013): the gradient of h_T by h_i is at most
(gamma norm(W))^(T-i), where gamma is the largest slope of the nonlinearity, 1 for tanh. So a network whose state still
answers with a slope s over n steps has norm(W) >= s^(1/n), and one that amplifies (s > 1) has norm(W) > 1.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from research.systems.system import POST, SLIDES, Answer, Measured, System, generator, normal

ALPHA, STEPS = 0.1, 8
UNSTABLE, STABLE = 1.1, 0.95
HORIZONS = range(2, 31)  # over longer ones the loss leaves float64's range within two steps


def strength(w: float, horizon: int) -> float:
    """Returns q = alpha T w^(2T-2)."""
    return ALPHA * horizon * w ** (2 * horizon - 2)


def log_losses(w: float, horizon: int) -> list[float]:
    """Returns log J before each of STEPS steps of gradient descent at alpha / n, and after the last. The gradients are
    those of the unrolled recurrence. Stops before J is no longer finite."""
    weight, found = torch.tensor(w, dtype=torch.float64, requires_grad=True), []
    for n in range(1, STEPS + 2):
        h = torch.ones((), dtype=torch.float64)
        for _ in range(horizon):
            h = weight * h
        loss = h.square() / 2
        [slope] = torch.autograd.grad(loss, weight)
        if not math.isfinite(loss.item()) or not math.isfinite(slope.item()):
            break
        found.append(loss.log().item())
        weight = (weight - ALPHA / n * slope).detach().requires_grad_()
    return found


def falls(losses: list[float]) -> bool:
    """Returns whether the loss never rises."""
    return len(losses) > 1 and all(after <= before for before, after in pairwise(losses))


def grows(losses: list[float], horizon: int) -> bool:
    """Returns whether every step multiplies the loss by 4^T or more, up to the rounding."""
    least = horizon * math.log(4) * (1 - 1e-9)
    return len(losses) > 1 and all(after - before >= least for before, after in pairwise(losses))


def jacobian_norms(recurrent: Tensor, inputs: Tensor) -> list[float]:
    """Returns the norms of dh_n/dh_0, n = 1, 2, ..., of h_t = tanh(W h_{t-1} + x_t). recurrent: W, (n, n); inputs:
    (T, n)."""
    h = torch.zeros(len(recurrent), dtype=torch.float64)
    jacobian, norms = torch.eye(len(recurrent), dtype=torch.float64), []
    for x in inputs:
        h = torch.tanh(recurrent @ h + x)
        jacobian = (1 - h**2)[:, None] * recurrent @ jacobian
        norms.append(float(torch.linalg.matrix_norm(jacobian, 2)))
    return norms


def measure(seed: int) -> Measured:
    """Descends from a stable and an unstable start, and compares Jacobians of random networks with the bound."""
    random = generator(seed)
    small = [T for T in HORIZONS if strength(UNSTABLE, T) < 2]
    large = [T for T in HORIZONS if strength(UNSTABLE, T) >= 3]
    unstable = {T: log_losses(UNSTABLE, T) for T in HORIZONS}
    fell = [falls(unstable[T]) for T in small]
    grew = [grows(unstable[T], T) for T in large]
    calm = [falls(log_losses(STABLE, T)) for T in HORIZONS]
    first = next(T for T in HORIZONS if grows(unstable[T][:2], T))
    curves = {f"{w} {T}": log_losses(w, T) for w, T in ((UNSTABLE, 8), (UNSTABLE, 20), (UNSTABLE, 6), (STABLE, 20))}

    turn = torch.linalg.qr(normal(random, 6, 6)).Q
    tightest = jacobian_norms(1.2 * turn, torch.zeros(20, 6, dtype=torch.float64))
    shares = []
    for gain in (0.5, 0.9, 1.2, 2.0):
        W = normal(random, 6, 6)
        W *= gain / torch.linalg.matrix_norm(W, 2)
        norms = jacobian_norms(W, normal(random, 20, 6, scale=0.3))
        shares += [norm / gain**n for n, norm in enumerate(norms, 1)]
    return Measured(
        [
            Answer(f"w = {UNSTABLE}: smallest T at which the loss grows by 4^T in step 1", min(large), first),
            Answer("share of the T with q < 2 at which the loss never rises", 1, sum(fell) / len(fell)),
            Answer("share of the T with q >= 3 at which the loss grows by 4^T per step", 1, sum(grew) / len(grew)),
            Answer(f"w = {STABLE}: share of the T (all q < 2) at which the loss never rises", 1, sum(calm) / len(calm)),
            Answer("random tanh networks: Jacobian / (gamma norm(W))^n, largest", 1, max(shares), 1e-12, "at most"),
            Answer("norm(W) recovered from the memory of a rotation: s^(1/n)", 1.2, tightest[-1] ** (1 / 20), 1e-10),
        ],
        curves,
    )


SYSTEM = System(
    title="unstable models and gradient descent; long memory",
    source=f"{POST}; {SLIDES}",
    source_equation='"even for very simple unstable models, gradient descent fails to converge"; '
    '"long-term memory requires exploding gradients, [Pascanu et al]"',
    our_equation="w <- w - (alpha / n) T w^(2T-1); norm(dh_T/dh_i) <= (gamma norm(W))^(T-i)",
    task="descend J = h_T^2 / 2 of h_t = w h_{t-1}; Jacobians of tanh networks",
    measure=measure,
)
