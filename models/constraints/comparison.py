"""The common parts of the contraction proofs (comparisons) of the LSTM and the GRU in torch. Each comparison can also
shrink a recurrent matrix until a contraction factor is proved. The comparisons of the certificate cannot.

The theorems are those of `models/certificate/cells/`. `models/constraints/cells/` has one comparison for each of the
two cells. A comparison maps unit-by-unit bounds d of the difference of two states to bounds `step(d)` of the difference
after one step. `step` is homogeneous and monotone. If `step(w) <= r w` for a positive vector w, then r is a contraction
factor in the maximum norm weighted by w. If the magnitude of an entry of the recurrent matrix decreases, no bound
increases. This includes the box, the bounds of the states. Each row may therefore be shrunk separately. This module
also has the rules of LSTM and GRU in the 2-norm, which are better for dense matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SETTLING = 30
SETTLED = 1e-7
PIECES = 16
PERRON_ITERATIONS = 60
LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class Drive:
    """Bounds of the terms that are added to the recurrent matrix's product to give the pre-activations: (G H), float64.

    least, greatest: the range of the input's terms, including the input bias. bias: the recurrent bias.
    """

    least: Tensor
    greatest: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """A sigmoid gate over a range of pre-activations, (H). The range is split into C intervals. `low`, `high`, `slope`:
    the gate's bounds by interval, (C, H).

    If the smaller of two gates is in an interval, it is between low and high, and the gates differ by at most slope
    times the difference of their pre-activations (`models/certificate/gates.py`).
    """

    low: Tensor
    high: Tensor
    slope: Tensor

    @classmethod
    def over(cls, least: Tensor, greatest: Tensor) -> Gate:
        least, greatest = least.clamp(-700, 700), greatest.clamp(-700, 700)
        bottom, top = torch.sigmoid(least), torch.sigmoid(greatest)
        shares = torch.linspace(0, 1, PIECES + 1, dtype=least.dtype, device=least.device)[:, None]
        edges = torch.logit(bottom + shares * (top - bottom))
        edges = torch.minimum(torch.maximum(edges, least), greatest).cummax(0).values
        edges[0], edges[-1] = least, greatest
        nearest = torch.maximum(edges[:-1], -greatest).clamp(min=0)
        return cls(
            torch.sigmoid(edges[:-1]), torch.sigmoid(edges[1:]), torch.sigmoid(nearest) * torch.sigmoid(-nearest)
        )

    @property
    def widest(self) -> Tensor:
        """The greatest value of the gate, (H)."""
        return self.high[-1]

    @property
    def steepest(self) -> Tensor:
        """The gate's greatest slope, (H)."""
        return self.slope.amax(0)


def tanh_slope(least: Tensor, greatest: Tensor) -> Tensor:
    """Returns the greatest derivative of tanh between the two arguments."""
    nearest = torch.maximum(least, -greatest).clamp(min=0)
    return 4 * torch.sigmoid(2 * nearest) * torch.sigmoid(-2 * nearest)


def spectral_norm(rows: Tensor, matrix: Tensor) -> float:
    """Returns the spectral norm of `diag(rows) matrix`."""
    scaled = rows[:, None] * matrix
    return math.sqrt(max(float(torch.linalg.eigvalsh(scaled @ scaled.T)[-1]), 0.0))


def pick(cases: Tensor, chosen: Tensor) -> Tensor:
    """Returns `cases[chosen[i], i]` for each unit i. cases: (C, H), chosen: int64 (H) -> (H)."""
    return cases.gather(0, chosen[None])[0]


class Comparison(Protocol):
    """The proved bounds of one layer for a given recurrent matrix (G H, H)."""

    h: Tensor
    """The greatest |h| of each unit over all states that are reached from the zero state, (H)."""

    def even(self) -> Tensor:
        """Returns weights w for which every recurrent matrix can be shrunk until `step(w) <= target w`, without making
        any row zero."""

    def step(self, bounds: Tensor) -> Tensor:
        """Returns the bounds after one step, from the bounds before it."""

    def two_norm(self) -> float:
        """Returns the contraction factor by the rule in the 2-norm."""

    def rows_held(self, bounds: Tensor, target: float) -> Tensor:
        """Returns the matrix with each row replaced by the nearest row for which `step(bounds) <= target * bounds`. The
        rows are computed from the current matrix's box (the bounds of the states), and from those intervals of the
        gates that give the largest bound for the current matrix.

        The smaller matrix has a smaller box, and other intervals may give its largest bound. `step` of the result may
        therefore exceed the target slightly.
        """


def perron_vector(comparison: Comparison, enough: float = 0.0) -> tuple[float, Tensor]:
    """Returns a contraction factor in a weighted maximum norm, and the norm's weights. The greatest weight is 1. The
    iteration stops as soon as the factor is at most `enough`.

    The iteration is that of `models/certificate/perron_vector.py`, with fewer steps.
    """
    bounds = torch.ones_like(comparison.even())
    best, chosen = math.inf, bounds
    for _ in range(PERRON_ITERATIONS):
        after = comparison.step(bounds)
        factor = float((after / bounds).max())
        if not math.isfinite(factor):
            break
        if factor < best:
            best, chosen = factor, bounds
        if best <= enough:
            break
        if (greatest := after.max()) > 0:
            bounds = (after / greatest + bounds) / 2
        bounds = (bounds / bounds.max()).clamp(min=LEAST_WEIGHT)
    return best, chosen
