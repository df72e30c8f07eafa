"""Nonlinearities and gains that are applied again and again: growth, fixed points, limit cycles, and complexity.

- Growth: h_t = a h_{t-1} is a^t h_0. A gain over 1 grows without limit, if nothing saturates.
- Fixed point: h_t = tanh(a h_{t-1}) falls to 0 for 0 < a <= 1. For a > 1 it goes to plus or minus h*, the solution of
  h* = tanh(a h*). So a = atanh(h*) / h* is the gain whose fixed point is a chosen h*. Near it, the distance shrinks by
  the slope a (1 - h*^2) at each step.
- Limit cycle: with W = a times a rotation by 90 degrees, tanh acts on each component, and a component becomes the other
  one, with a sign. So the state moves through four corners (+-h*, +-h*) for ever: a cycle of period 4.
- Complexity: the tent map, 2 relu(h) - 4 relu(h - 1/2), is one ReLU layer. After t steps it is a function of h_0 with
  2^t linear pieces of slope +-2^t (Telgarsky, 2016, "Benefits of depth in neural networks").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from research.systems.system import TRIPP, Answer, Measured, System, generator

LEVEL = 0.8
GAIN = math.atanh(LEVEL) / LEVEL
FOLDS = 6


def tent(h: Tensor) -> Tensor:
    """Returns the tent map as a layer of two ReLU units: 2 h up to 1/2, then 2 - 2 h."""
    return 2 * torch.relu(h) - 4 * torch.relu(h - 0.5)


def repeat(step: Any, h: Tensor, steps: int) -> list[Tensor]:
    """Returns h_0 ... h_steps."""
    states = [h]
    for _ in range(steps):
        states.append(step(states[-1]))
    return states


def slopes(step: Any, steps: int, points: int) -> Tensor:
    """Returns the derivative of h_steps by h_0 at the middles of `points` equal parts of the interval from 0 to 1."""
    h = ((torch.arange(points, dtype=torch.float64) + 0.5) / points).requires_grad_()
    [slope] = torch.autograd.grad(repeat(step, h, steps)[-1].sum(), h)
    return slope


def measure(seed: int) -> Measured:
    """Runs each recurrence from a random start, and compares it with its closed form."""
    first = 0.1 + 0.5 * torch.rand(2, generator=generator(seed), dtype=torch.float64)
    grown = repeat(lambda h: GAIN * h, first, 30)[-1] / first
    fixed = repeat(lambda h: torch.tanh(GAIN * h), first, 200)
    faded = repeat(lambda h: torch.tanh(0.9 * h), first, 400)
    W = GAIN * torch.tensor([[0, -1], [1, 0]], dtype=torch.float64)
    cycle = repeat(lambda h: torch.tanh(W @ h), first, 200)
    near = [abs(float(state[0]) - LEVEL) for state in fixed[10:14]]
    pieces = slopes(tent, FOLDS, 2**FOLDS * 8)
    returns = [p for p in range(1, 9) if float((cycle[-1] - cycle[-1 - p]).abs().max()) < 1e-9]
    grid = torch.linspace(0, 1, 513, dtype=torch.float64)
    curves = {f"tent {steps}": repeat(tent, grid, steps)[-1].tolist() for steps in (1, 3, 5)}
    curves["fixed"] = [float(state[0]) for state in fixed[:30]]
    curves["faded"] = [float(state[0]) for state in faded[:30]]
    curves["grown"] = [float(first[0]) * GAIN**t for t in range(5)]
    for axis in (0, 1):
        curves[f"cycle {axis}"] = [float(state[axis]) for state in cycle[:40]]
    return Measured(
        [
            Answer("growth: log of the gain of 30 steps", 30 * math.log(GAIN), float(grown[0].log()), 1e-10),
            Answer("fixed point for a = atanh(0.8) / 0.8", LEVEL, float(fixed[-1][0]), 1e-10),
            Answer("factor of the distance per step near it", GAIN * (1 - LEVEL**2), near[-1] / near[-2], 0.01),
            Answer("fixed point for a = 0.9", 0, float(faded[-1].abs().max()), 1e-10),
            Answer("period of the limit cycle", 4, returns[0] if returns else math.nan),
            Answer("amplitude of the limit cycle", LEVEL, float(cycle[-1].abs().max()), 1e-10),
            Answer("pieces of the tent map after 6 steps", 2**FOLDS, 1 + int((pieces.diff() != 0).sum())),
            Answer("their slope", 2**FOLDS, float(pieces.abs().min())),
        ],
        curves,
    )


SYSTEM = System(
    title="repeated nonlinearities and large gains",
    source=TRIPP,
    source_equation="h(t) = g(A h(t-1) + B x + b) = g(A g(A h(t-2) + B x + b) + B x + b) = ...",
    our_equation="h_t = a h_{t-1}; h_t = tanh(a h_{t-1}); h_t = tanh(a R h_{t-1}), R a turn by 90 degrees; "
    "h_t = 2 relu(h_{t-1}) - 4 relu(h_{t-1} - 1/2)",
    task="growth, fixed points, a limit cycle, 2^t linear pieces",
    measure=measure,
)
