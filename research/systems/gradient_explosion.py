"""Vanishing and exploding gradients: by eigenvalue; a cliff and clipping; the gates of an LSTM.

- In a linear network the gradient by an earlier state is a power of W^T, which is P D^n P^-1: each eigenvalue is raised
  to the number of steps. It vanishes below 1 and explodes above 1, at the rate of the largest one.
- A cliff: J(w) = (w^T - 1)^2 / 2, the loss of h_t = w h_{t-1} from h_0 = 1 with the target 1. Its minimum is w = 1, and
  above it the slope grows as T w^(2T-1). One plain step from w = 1.5 leaves for ever. A clipped step moves by rate times
  the threshold, in the same direction, as long as the gradient is over the threshold: so the number of steps is known,
  from the width of the cliff.
- In an LSTM the cell's gradient by the previous cell is diag(f_t) when the gates are held: a product of forget gates,
  each between 0 and 1, in place of the power of one matrix.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from research.systems.system import KAMPER, TRIPP, Answer, Curves, Measured, System, generator, normal

UNITS, STEPS, RADII = 6, 60, (0.9, 1.0, 1.1)
HORIZON, START, RATE, THRESHOLD = 20, 1.5, 0.004, 5.0


def gradients(W: Tensor, last: Tensor) -> Tensor:
    """Returns dJ/dh_i for i = T ... 0 of a linear network whose loss has the gradient `last` by h_T: (T + 1, n). Autograd
    computes them."""
    h = torch.zeros(len(last), dtype=torch.float64, requires_grad=True)
    states = [h]
    for _ in range(STEPS):
        states.append(W @ states[-1])
    return torch.stack(torch.autograd.grad(states[-1] @ last, states)).flip(0)


def by_eigenvalues(W: Tensor, last: Tensor) -> Tensor:
    """Returns the closed form P D^(T-i) P^-1 dJ/dh_T for i = T ... 0."""
    D, P = torch.linalg.eig(W.T)
    weights = torch.linalg.solve(P, last.to(P.dtype))
    powers = D[None] ** torch.arange(STEPS + 1)[:, None]
    return ((powers * weights) @ P.T).real


def cliff_slope(w: Tensor) -> Tensor:
    """Returns dJ/dw of the cliff at w, by back-propagation through the unrolled recurrence."""
    w = w.detach().requires_grad_()
    h = torch.ones((), dtype=torch.float64)
    for _ in range(HORIZON):
        h = w * h
    return torch.autograd.grad((h - 1).square() / 2, w)[0]


def descend_cliff(clip: bool, steps: int) -> list[float]:
    """Returns w after each step of gradient descent from START, until it is no longer finite."""
    w, path = torch.tensor(START, dtype=torch.float64), [START]
    for _ in range(steps):
        slope = cliff_slope(w)
        if clip:
            slope = slope.clamp(-THRESHOLD, THRESHOLD)  # of one number: the same direction, at most this long
        w = w - RATE * slope
        path.append(float(w))
        if not math.isfinite(path[-1]):
            break
    return path


def cliff_edge() -> float:
    """Returns the w over 1 at which the slope T w^(T-1) (w^T - 1) is the threshold, by bisection."""
    low, high = 1.0, START
    for _ in range(100):
        middle = (low + high) / 2
        over = HORIZON * middle ** (HORIZON - 1) * (middle**HORIZON - 1) > THRESHOLD
        low, high = (low, middle) if over else (middle, high)
    return low


def cell_gradient(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns dc_T/dc_0 of an LSTM cell whose gates depend on the input only, by autograd, and the product of the forget
    gates."""
    forget = torch.sigmoid(2 + normal(random, STEPS, UNITS))
    added = normal(random, STEPS, UNITS)
    first = normal(random, UNITS).requires_grad_()
    c = first
    for f, z in zip(forget, added, strict=True):
        c = f * c + (1 - f) * torch.tanh(z)
    return torch.autograd.grad(c.sum(), first)[0], forget.prod(0)


def measure(seed: int) -> Measured:
    """Compares gradients with their closed forms, and descends the cliff with and without clipping."""
    random = generator(seed)
    direction, last = normal(random, UNITS, UNITS), normal(random, UNITS)
    answers, curves = [], {}
    for radius in RADII:
        W = direction * (radius / torch.linalg.eigvals(direction).abs().max())
        found, known = gradients(W, last), by_eigenvalues(W, last)
        distance = ((found - known).norm(dim=1) / known.norm(dim=1)).max()
        answers.append(Answer(f"largest relative distance from P D^n P^-1, radius {radius}", 0, float(distance), 1e-8))
        curves[f"found {radius}"], curves[f"known {radius}"] = found.norm(dim=1).tolist(), known.norm(dim=1).tolist()
    clipped, plain = descend_cliff(True, 400), descend_cliff(False, 400)
    long_steps = math.ceil((START - cliff_edge()) / (RATE * THRESHOLD))
    full = sum(abs(a - b) > RATE * THRESHOLD * (1 - 1e-9) for a, b in pairwise(clipped))
    gradient, product = cell_gradient(random)
    answers += [
        Answer("clipped steps of full length before the edge of the cliff", long_steps, full),
        Answer("w after clipped descent", 1, clipped[-1], 1e-6),
        Answer("distance from w = 1 after one plain step", START - 1, abs(plain[1] - 1), 0, "at least"),
        Answer("LSTM cell: largest distance of dc_T/dc_0 from the product of f_t", 0, float((gradient - product).abs().max()), 1e-12),
    ]
    return Measured(answers, {**curves, "clipped": clipped[:60]})


def plot(axes: Any, curves: Curves) -> None:
    """Plots the gradients by distance, and the clipped descent."""
    left, right = axes
    for number, radius in enumerate(RADII):
        left.semilogy(curves[f"known {radius}"], color=f"C{number}", label=f"largest eigenvalue {radius}")
        left.semilogy(curves[f"found {radius}"], ".", color=f"C{number}")
    left.set(xlabel="steps back, T - i", ylabel="norm of dJ/dh_i", title="lines: P D^n P^-1, marks: autograd")
    right.plot(curves["clipped"], ".-", label="clipped descent")
    right.axhline(cliff_edge(), color="C3", linestyle="--", label="edge of the cliff")
    right.axhline(1, color="0.5", linestyle=":", label="minimum")
    right.set(xlabel="step", ylabel="w", title="J(w) = (w^20 - 1)^2 / 2; a plain step leaves at once")
    for part in axes:
        part.legend(fontsize=8)


SYSTEM = System(
    title="exploding and vanishing gradients, clipping",
    source=f"{KAMPER}; {TRIPP}",
    source_equation="dJ_T/dh_i = (W_hh^T)^(T-i) dJ_T/dh_T = P D^(T-i) P^-1 dJ_T/dh_T; dc_t/dc_{t-1} = diag(f_t)",
    our_equation="the same; J(w) = (w^T - 1)^2 / 2, w <- w - rate g min(1, threshold / abs(g))",
    task="gradients of linear networks with largest eigenvalue 0.9, 1 and 1.1; descend a cliff",
    measure=measure,
    plot=plot,
    panels=2,
)
