"""Proposition 2 and Theorem 1 of Miller and Hardt ("Stable recurrent models", 2019), measured on random instances.

A recurrent model and a truncated one start from the same weights and descend on the same sequences, each on its own
loss: w <- project(w - alpha_t grad p(w)). The projection never increases a distance, so one step changes the distance D
of the two weights to at most (1 + alpha_t beta) D + alpha_t gamma k lambda^k. With alpha_t = alpha / t, N steps make it
at most

    alpha gamma k lambda^k N^(alpha beta + 1).

The proof uses beta and gamma only for the weights on the way. So the bound also holds with constants of the path: beta,
the largest |grad p(w) - grad p(w')| / |w - w'| of the two models at one step, and gamma k lambda^k, the largest
difference of the two gradients at the truncated model's weights. The constants that hold for all of Omega are so large
that the bound with them says something only for small alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from research.theory.curve import ROUNDING, Result, curve, numbers, spread
from research.theory.instance import Constants, Instance, size
from research.theory.lemmas import first_within, too_long

StepSize = Callable[[int], float | Tensor]
"""The step size of step 1, 2, ...: a number, or a tensor (seeds, 1)."""

Advance = Callable[[], None]

ALPHA = 16.0
"""A constant rate of this size oscillates, as a rate above 2 / curvature does."""

WINDOWS = (5, 10, 20, 40)
THEOREM_WINDOWS = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60)
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4)
SHADOW = 1e-7
"""The distance of the weights whose difference stands for an arbitrarily small one."""

CLOSEST = 1e-12
"""The difference of the gradients of closer weights is mostly rounding, so it does not count for beta."""

POINTS = 50
"""The number of points of a stored curve."""

LONGEST = 1 << 20
"""The largest k that Theorem 1's formula is asked for."""


@dataclass(frozen=True)
class Rate:
    """Step sizes: alpha / t at step t if the rate `decays`, else alpha. Without alpha, it is 1 / beta with Omega's
    beta."""

    name: str
    alpha: float | None
    decays: bool


RATES = (
    Rate("1 / (beta t)", None, True),
    Rate("1 / t", 1.0, True),
    Rate(f"{ALPHA:g} / t", ALPHA, True),
    Rate("1", 1.0, False),
    Rate(f"{ALPHA:g}", ALPHA, False),
)
DECAYING, CONSTANT = RATES[2], RATES[4]
"""The two rates at which the growth of a small difference is measured."""


@dataclass(frozen=True)
class Descent:
    """Two descents, step by step. apart: the distance D after each step, (seeds, windows, steps). beta: the path's
    constant beta up to each step, and gap: the largest difference of the gradients, gamma k lambda^k, both of the same
    shape. weights: the last weights, first the recurrent model's, (seeds, 1 + windows, ...). losses: the recurrent
    model's loss before each step, (seeds, steps)."""

    apart: Tensor
    beta: Tensor
    gap: Tensor
    weights: Tensor
    losses: Tensor


def descend(instance: Instance, windows: tuple[int, ...], steps: int, rate: StepSize, advance: Advance) -> Descent:
    """Trains the recurrent model, and a truncated one for each window."""
    count = 1 + len(windows)
    weights = instance.weights.expand(-1, count, -1, -1)
    lengths = [instance.tokens, *windows, *([instance.tokens] * len(windows))]
    apart, beta, gap, losses = [], [], [], []
    for step in range(1, steps + 1):
        both = torch.cat([weights, weights[:, 1:]], dim=1)  # the truncated models' weights, for the recurrent gradient
        gradient, loss = instance.gradients(both, lengths)
        distance = size(weights[:, 1:] - weights[:, :1])
        change = size(gradient[:, count:] - gradient[:, :1])
        beta.append(torch.where(distance > CLOSEST, change / distance.clamp(min=CLOSEST), 0.0))
        gap.append(size(gradient[:, count:] - gradient[:, 1:count]))
        weights = moved(instance, weights, gradient[:, :count], rate(step))
        apart.append(size(weights[:, 1:] - weights[:, :1]))
        losses.append(loss[:, 0])
        advance()
    path_beta, path_gap = (torch.stack(parts, dim=-1).cummax(dim=-1).values for parts in (beta, gap))
    return Descent(torch.stack(apart, dim=-1), path_beta, path_gap, weights, torch.stack(losses, dim=-1))


def step_size(alpha: Tensor, decays: bool, step: int) -> Tensor:
    """Returns alpha / t at step t, or alpha without decay."""
    return alpha / step if decays else alpha


def moved(instance: Instance, weights: Tensor, gradient: Tensor, rate: float | Tensor) -> Tensor:
    """Returns the weights after a step of projected gradient descent."""
    step = rate[..., None, None] if isinstance(rate, Tensor) else rate
    return instance.project(weights - step * gradient)


def polynomial(alpha: Tensor, beta: Tensor, gap: Tensor, steps: Tensor) -> Tensor:
    """Proposition 2's bound, alpha gamma k lambda^k N^(alpha beta + 1), with the rounding of each step. gap: gamma k
    lambda^k."""
    return (alpha * gap + ROUNDING) * steps ** (alpha * beta + 1)


def proposition2(instance: Instance, constants: Constants, steps: int, advance: Advance) -> list[Result]:
    """Measures the distance of the weights at each rate of RATES."""
    number, kept = torch.arange(1, steps + 1, dtype=torch.float64), stored(steps)
    omega_gap = constants.gradient_gap(torch.tensor(WINDOWS))[..., None]
    found = []
    for rate in RATES:
        alpha = (
            1 / constants.beta[:, None] if rate.alpha is None else torch.full_like(constants.beta, rate.alpha)[:, None]
        )
        descent = descend(instance, WINDOWS, steps, partial(step_size, alpha, rate.decays), advance)
        beta, gap = descent.beta[..., -1:], descent.gap[..., -1:]
        if rate.alpha is None:
            beta, gap = constants.beta[:, None, None], omega_gap
        bound = polynomial(alpha[..., None], beta, gap, number)
        curves = []
        for index, k in enumerate(WINDOWS):
            compared = curve(descent.apart[:, index], bound[:, index], kept)
            if not rate.decays:  # the bound is for rates that decay
                compared.pop("largest_ratio")
            curves.append({"window": k, **compared})
        path_gamma = descent.gap[..., -1] / torch.tensor([k * instance.factor**k for k in WINDOWS])
        within = (descent.beta[..., -1] <= constants.beta[:, None]) & (path_gamma <= constants.gamma[:, None])
        found.append(
            {
                "rate": rate.name,
                "steps": [n + 1 for n in kept],
                "curves": curves,
                "loss": {"first": spread(descent.losses[:, :1]), "last": spread(descent.losses[:, -1:])},
                "path_beta": numbers(descent.beta[..., -1].amax(1)),
                "path_gamma": numbers(path_gamma.amax(1)),
                "path_exponent": numbers(alpha[:, 0] * descent.beta[..., -1].amax(1) + 1),
                "omega_exponent": numbers(alpha[:, 0] * constants.beta + 1),
                "claim": "the path's beta and gamma <= those of Omega",
                "holds": bool(within.all()),
            }
        )
    return found


def stored(points: int) -> list[int]:
    """Returns the indices of the points that are stored: about POINTS, evenly spread on a logarithmic axis."""
    return sorted({round(points ** (index / (POINTS - 1))) - 1 for index in range(POINTS)})


def growth(instance: Instance, steps: int, rate: Rate, advance: Advance) -> Result:
    """Measures by which factor an arbitrarily small difference of the weights grows in the steps 2 to N, and compares
    it with N^(alpha beta), the factor that Proposition 2 allows with the path's beta. The curves begin at N = 2.

    The first step makes the difference, and the later steps multiply it. A second recurrent model follows the first at
    the distance SHADOW. After each step the distance is set back to SHADOW, in the same direction, and its growth is
    counted. This is the limit of large k, where the first difference is too small for float64.
    """
    whole = [instance.tokens] * 2
    generator = torch.Generator().manual_seed(0)
    weights = instance.weights
    ahead = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
    ahead = ahead / size(ahead)[..., None, None]
    total, steepest = torch.zeros(len(weights), dtype=torch.float64), torch.zeros(len(weights), dtype=torch.float64)
    totals = []
    for step in range(1, steps + 1):
        pair = torch.cat([weights, weights + SHADOW * ahead], dim=1)
        gradient, _ = instance.gradients(pair, whole)
        after = moved(instance, pair, gradient, ALPHA / step if rate.decays else ALPHA)
        if step > 1:
            steepest = torch.maximum(steepest, size(gradient[:, 1:] - gradient[:, :1])[:, 0] / SHADOW)
            change = after[:, 1:] - after[:, :1]
            distance = size(change)
            # On the border of Omega the projection may remove the whole difference. It is then kept at its rounding.
            ahead = torch.where(distance[..., None, None] > 0, change / distance[..., None, None], ahead)
            total = total + (distance[:, 0].clamp(min=SHADOW * ROUNDING) / SHADOW).log()
            totals.append(total)
        weights = after[:, :1]
        advance()
    logs = torch.stack(totals, dim=-1)
    allowed = ALPHA * steepest[:, None] * torch.arange(2, steps + 1, dtype=torch.float64).log()
    left = [next((n for n, out in enumerate(row, start=2) if out), None) for row in (logs > allowed).tolist()]
    kept = stored(steps - 1)
    found = {"rate": rate.name, "steps": [n + 2 for n in kept], **curve(logs.exp(), allowed.exp(), kept)}
    found |= {"beta": numbers(steepest), "left_at": left}
    if not rate.decays:
        found.pop("largest_ratio")
        found["claim"] = "without 1/t, a small difference grows beyond N^(alpha beta)"
        found["holds"] = None not in left
    return found


def theorem1(instance: Instance, constants: Constants, steps: int, advance: Advance) -> Result:
    """Measures |y_T - y_T^k| of a recurrent and a truncated model that were trained with alpha_t = 1 / t, and the k
    that each epsilon needs.

    |y_T - y_T^k| <= L_f (L_w / (1 - lambda) |w - w^k| + lambda^k B_h): Lemma 3's change of the state with the weights,
    and Lemma 1. Proposition 2 bounds the distance of the weights.
    """
    descent = descend(instance, THEOREM_WINDOWS, steps, lambda t: 1 / t, advance)
    k = torch.tensor(THEOREM_WINDOWS, dtype=torch.float64)
    outputs = instance.outputs(descent.weights[:, :1], [instance.tokens])
    truncated = instance.outputs(descent.weights[:, 1:], list(THEOREM_WINDOWS))
    gap = (truncated - outputs).norm(dim=-1).amax(-1)
    beta = descent.beta[..., -1].amax(1)
    gamma = (descent.gap[..., -1] / (k * instance.factor**k)).amax(1)
    bound = log_bound(constants, beta, gamma, steps, k).exp() + ROUNDING * steps
    needed = []
    for epsilon in EPSILONS:
        measured = first_within(gap, THEOREM_WINDOWS, epsilon)
        path, omega = (
            enough(constants, *pair, steps, epsilon) for pair in ((beta, gamma), (constants.beta, constants.gamma))
        )
        needed.append(
            {"epsilon": epsilon, "measured": numbers(measured), "path": numbers(path), "omega": numbers(omega)}
            | {"claim": "measured k <= the k of the path <= the k of Omega"}
            | {"holds": not bool((too_long(measured, path, THEOREM_WINDOWS) | (path > omega)).any())}
        )
    return {
        "windows": list(THEOREM_WINDOWS),
        **curve(gap, bound),
        "needed": needed,
        "path_beta": numbers(beta),
        "path_gamma": numbers(gamma),
    }


def log_bound(constants: Constants, beta: Tensor, gamma: Tensor, steps: int, k: Tensor) -> Tensor:
    """Returns the logarithm of Theorem 1's bound of |y_T - y_T^k|, (seeds, windows)."""
    decay = k * math.log(constants.factor)
    weights = (constants.weights / (1 - constants.factor) * gamma).log() + (beta + 1) * math.log(steps)
    apart = torch.logaddexp(weights[:, None] + k.log() + decay, constants.states.log()[:, None] + decay)
    return constants.outward.log()[:, None] + apart


def enough(constants: Constants, beta: Tensor, gamma: Tensor, steps: int, epsilon: float) -> Tensor:
    """Returns the smallest k from which on Theorem 1's bound is at most epsilon, (seeds,)."""
    k = torch.arange(1, LONGEST, dtype=torch.float64)
    beyond = log_bound(constants, beta, gamma, steps, k) > math.log(epsilon)
    return (beyond * k).amax(1) + 1
