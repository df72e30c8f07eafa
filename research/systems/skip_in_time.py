"""Skip connections in time: the state also receives the state from d steps before.

The task is a delayed copy, y_t = x_{t-d}, of white noise. For a linear network and white noise, the mean squared error
is the squared distance of the network's impulse response from the wanted one, an impulse at d. So one impulse is all
the data that training needs, and the best possible error is known:

- One plain unit has the response g w^j. Its error, g^2 / (1 - w^2) - 2 g w^d + 1, is smallest for g = w^d (1 - w^2) and
  w^2 = d / (d + 1). The smallest error is M(d) = 1 - (d / (d + 1))^d / (d + 1). It is near 1, the error of no memory.
- One unit with a skip of d steps has the response g v^m at the steps m d. That is the plain unit's problem for a delay
  of one: its error is M(1) = 3/4 for every d.
- Two units with a skip: the first holds x_t, and the second receives the first from d steps before. The error is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from research.systems.system import TRIPP, Answer, Measured, System, generator, normal, solve

DELAY = 5
STEPS = 12 * DELAY


def impulse_response(weights: Sequence[Tensor], skip: bool) -> Tensor:
    """Runs h_t = W h_{t-1} + V h_{t-d} + U x_t, y_t = C h_t on the input 1, 0, 0, ...; without V unless `skip`.

    weights: W, V (n, n), U, C (n,). Returns the outputs (STEPS,).
    """
    W, V, U, C = weights
    states = [U]
    for t in range(1, STEPS):
        h = W @ states[-1]
        if skip and t >= DELAY:
            h = h + V @ states[t - DELAY]
        states.append(h)
    return torch.stack(states) @ C


def best_plain_error(delay: int) -> float:
    """Returns M(d), the smallest mean squared error of one plain unit."""
    return 1 - (delay / (delay + 1)) ** delay / (delay + 1)


def trained_error(units: int, skip: bool, seed: int) -> float:
    """Trains a network of `units` linear units on the delayed copy. Returns its mean squared error."""
    random = generator(seed)
    start = 0.9 if not skip else 0.0  # a plain unit that forgets fast gets no gradient from the delayed impulse
    W = (start * torch.eye(units, dtype=torch.float64)).requires_grad_()
    V = normal(random, units, units, scale=0.3).requires_grad_()
    U, C = (normal(random, units, scale=0.5).requires_grad_() for _ in range(2))
    target = torch.zeros(STEPS, dtype=torch.float64)
    target[DELAY] = 1

    def loss() -> Tensor:
        return (impulse_response((W, V, U, C), skip) - target).square().sum()

    return solve(loss, [W, V, U, C] if skip else [W, U, C])


def measure(seed: int) -> Measured:
    """Trains the three networks."""
    return Measured(
        [
            Answer("error, 1 plain unit", best_plain_error(DELAY), trained_error(1, False, seed), 1e-3),
            Answer("error, 1 unit with a skip", best_plain_error(1), trained_error(1, True, seed), 1e-3),
            Answer("error, 2 units with a skip", 0, trained_error(2, True, seed), 1e-3),
        ]
    )


SYSTEM = System(
    title="skip connections in time",
    source=TRIPP,
    source_equation='"additional connections can add state from a few time steps back"',
    our_equation="h_t = W h_{t-1} + V h_{t-d} + U x_t",
    task=f"copy white noise with a delay of {DELAY} steps",
    measure=measure,
)
