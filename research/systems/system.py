"""What every file of this folder measures: answers that were derived beside the answers that a run reached.

A file describes one system of the lectures. Its constant `SYSTEM` has the source's equation and ours, the task, and a
function that does the task with one seed. That function returns a `Measured`: each `Answer` has the known value, which
is a closed form or a computed optimum, and the value that the run reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

TRIPP = 'Tripp, "Recurrent Networks"'
KAMPER = 'Kamper, "Recurrent neural networks"'
SLIDES = 'Voinov, slides on "When Recurrent Models Don\'t Need to be Recurrent" by Miller and Hardt'
POST = 'Miller, "When Recurrent Models Don\'t Need to be Recurrent" (blog post)'

Curves = dict[str, list[float]]
"""Series of numbers by name, for the figure."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A known value and the value that a run reached. If no value is known, the reached one is only reported.

    relation: how the reached value must compare with the known one. `within` is the tolerance of the comparison.
    """

    what: str
    known: float | None
    reached: float
    within: float = 0.0
    relation: Literal["equals", "at most", "at least"] = "equals"

    @property
    def holds(self) -> bool:
        """Returns whether the run reached the known answer. A value that is not a number reaches nothing."""
        if self.known is None:
            return True
        above = self.reached - self.known
        return {
            "equals": abs(above) <= self.within,
            "at most": above <= self.within,
            "at least": above >= -self.within,
        }[self.relation]


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers of a run with one seed, and the curves of its figure."""

    answers: list[Answer]
    curves: Curves = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class System:
    """One system of the lectures. `measure` does the task with one seed."""

    title: str
    source: str
    source_equation: str
    our_equation: str
    task: str
    measure: Callable[[int], Measured]
    seeds: int = 5


def generator(seed: int) -> torch.Generator:
    """Returns the source of a run's random numbers."""
    return torch.Generator().manual_seed(seed)


def normal(random: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Returns a float64 tensor of independent Gaussian values with standard deviation `scale`."""
    return scale * torch.randn(*shape, generator=random, dtype=torch.float64)


def trainable(random: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Returns one weight tensor per shape. A matrix is Gaussian with variance 1 / (its number of columns), a vector is
    zero."""
    return [
        (normal(random, *shape, scale=shape[-1] ** -0.5) if len(shape) > 1 else torch.zeros(shape, dtype=torch.float64))
        .detach()
        .requires_grad_()
        for shape in shapes
    ]


def descend(loss: Callable[[], Tensor], weights: Sequence[Tensor], steps: int, rate: float) -> float:
    """Minimises `loss` by Adam. The step size falls from `rate` to zero along a cosine. Gradients are clipped to norm
    1. Returns the last loss."""
    optimizer = torch.optim.Adam(weights, lr=rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
    with torch.no_grad():
        return float(loss())


def solve(loss: Callable[[], Tensor], weights: Sequence[Tensor], steps: int = 100) -> float:
    """Minimises a smooth `loss` without randomness by L-BFGS with a line search, which needs far fewer steps than
    `descend`. Returns the last loss."""
    optimizer = torch.optim.LBFGS(
        weights, max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        return float(loss())
