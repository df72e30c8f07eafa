"""A gradient cliff, and gradient clipping.

J(w) = (w^T - 1)^2 / 2 is the loss of h_t = w h_{t-1} from h_0 = 1 with the target 1. Its minimum is w = 1, and above it
the slope grows as T w^(2T-1): a recurrence turns a small change of a weight into a wall. One plain step of gradient
descent from w = 1.5 leaves for ever. A clipped step moves by the rate times the threshold, in the same direction, as
long as the gradient is over the threshold. So the number of these steps is known from the width of the cliff, and then
plain steps converge, because the rate is below 2 / T^2, two over the curvature at the minimum.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from research.systems.system import KAMPER, TRIPP, Answer, Measured, System

HORIZON, START, RATE, THRESHOLD, STEPS = 20, 1.5, 0.004, 5.0, 400


def slope(w: Tensor) -> Tensor:
    """Returns dJ/dw at w, by back-propagation through the unrolled recurrence."""
    w = w.detach().requires_grad_()
    h = torch.ones((), dtype=torch.float64)
    for _ in range(HORIZON):
        h = w * h
    return torch.autograd.grad((h - 1).square() / 2, w)[0]


def descend(clip: bool) -> list[float]:
    """Returns w after each step of gradient descent from START, until it is no longer finite."""
    w, path = torch.tensor(START, dtype=torch.float64), [START]
    for _ in range(STEPS):
        step = slope(w)
        if clip:
            step = step.clamp(-THRESHOLD, THRESHOLD)  # of one number: the same direction, at most this long
        w = w - RATE * step
        path.append(float(w))
        if not math.isfinite(path[-1]):
            break
    return path


def edge() -> float:
    """Returns the w over 1 at which the slope T w^(T-1) (w^T - 1) is the threshold, by bisection."""
    low, high = 1.0, START
    for _ in range(100):
        middle = (low + high) / 2
        over = HORIZON * middle ** (HORIZON - 1) * (middle**HORIZON - 1) > THRESHOLD
        low, high = (low, middle) if over else (middle, high)
    return low


def measure(seed: int) -> Measured:
    """Descends the cliff with and without clipping. Nothing is random here, so every seed gives the same."""
    del seed
    clipped, plain = descend(True), descend(False)
    long_steps = math.ceil((START - edge()) / (RATE * THRESHOLD))
    full = sum(abs(after - before) > RATE * THRESHOLD * (1 - 1e-9) for before, after in pairwise(clipped))
    first = RATE * HORIZON * START ** (HORIZON - 1) * (START**HORIZON - 1)
    return Measured(
        [
            Answer("clipped steps of full length, down to the edge of the cliff", long_steps, full),
            Answer("w after clipped descent", 1, clipped[-1], 1e-6),
            Answer("length of the first plain step", first, START - plain[1], 1e-6 * first),
        ],
        {"clipped": clipped[:60]},
    )


SYSTEM = System(
    title="gradient cliff and clipping",
    source=f"{TRIPP}; {KAMPER}",
    source_equation='theta <- theta - eta dJ/dtheta; "if the norm ... is larger than some threshold, scale ... down"',
    our_equation="J(w) = (w^T - 1)^2 / 2, w <- w - rate g min(1, threshold / abs(g))",
    task=f"descend from w = {START} to the minimum at w = 1",
    measure=measure,
    seeds=1,
)
