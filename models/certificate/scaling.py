"""Weighted 2-norms in which a matrix shrinks more than in the plain 2-norm.

A norm |T s|_2 gives the factor |T W T^-1|_2. A diagonal T preserves unit-by-unit bounds of an elementwise function of
slope at most 1, so it is valid for an RNN as well. For a linear layer any T is valid. Let

    P = sum_k (W / a)^k' (W / a)^k,   rho(W) < a < |W|_2,   W' P W = a^2 (P - I) <= a^2 P.

Then the norm sqrt(s' P s) shrinks by less than a. This is the discrete Lyapunov equation. It is solved by doubling.

Neither solution is trusted: the stated factor is computed from T itself, and the error of T^-1 is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, norm_above, roundoff, spectral_norm
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation

SWEEPS = 60

DOUBLINGS = 24
"""Sums up to 2^24 powers."""

SHARE = 0.2
"""The position of the Lyapunov equation's `a` between spectral radius (0) and spectral norm (1). Smaller values skew
the norm."""

WIDEST = 1e6
"""The largest condition number of a transform. With a larger one, the inverse costs more precision than the factor
gains."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A weighted 2-norm with its factor: |s / scales|_2, or |transform s|_2 with an approximate inverse of transform.

    into: the largest norm of a vector of 2-norm 1. back: the largest 2-norm of a vector of norm 1.
    """

    factor: float
    norm: Norm
    into: float
    back: float

    def of(self, perturbation: Perturbation) -> float:
        """Returns the largest norm of all vectors within a perturbation, rounded up."""
        above = self.into * perturbation.ball * UP
        (scale,) = self.norm.scales
        return min(above, norm_above(perturbation.box / scale)) if isinstance(scale, np.ndarray) else above

    def perturbation(self, value: float, size: int) -> Perturbation:
        """Returns the perturbation of all vectors whose norm is at most `value`."""
        (scale,) = self.norm.scales
        ball = self.back * value * UP
        return (
            Perturbation.within(scale * value * UP, ball)
            if isinstance(scale, np.ndarray)
            else Perturbation.of_ball(ball, size)
        )


def balanced(matrix: Matrix) -> Gauge:
    """Returns the diagonal scaling that makes every row of T W T^-1 as long as its column (Osborne 1960)."""
    squares = matrix**2
    np.fill_diagonal(squares, 0.0)
    scales = np.ones(len(matrix))  # T = diag(1 / scales)
    for _ in range(SWEEPS):
        scaled = squares * (scales[None, :] / scales[:, None]) ** 2
        rows, columns = scaled.sum(axis=1), scaled.sum(axis=0)
        heard = (rows > 0) & (columns > 0)
        ratio = np.ones(len(matrix))
        ratio[heard] = (rows[heard] / columns[heard]) ** 0.125
        scales = np.clip(scales * ratio, 1e-6, 1e6)
        scales /= scales.max()
    scales = np.maximum(scales, 1e-6)
    factor = spectral_norm(matrix * (scales[None, :] / scales[:, None])) * UP
    return Gauge(factor, Norm("2", (scales,)), float(1 / scales.min()) * UP, float(scales.max()) * UP)


def lyapunov(matrix: Matrix) -> Gauge | None:
    """Returns the norm of the Lyapunov equation. Returns None if the spectral radius is 1 or more, or if the norm is
    too skew."""
    size, largest = len(matrix), float(np.linalg.norm(matrix, 2))
    radius = float(np.abs(np.linalg.eigvals(matrix)).max())
    if radius >= 1 or largest == 0:
        return None
    power = matrix / (radius + SHARE * (min(largest, 1.0) - radius) + 1e-9)
    total = np.eye(size)
    for _ in range(DOUBLINGS):
        total = total + power.T @ total @ power
        power = power @ power
        if not np.isfinite(total).all() or np.abs(total).max() > WIDEST**2:
            return None
        if np.abs(power).max() < 1e-30:
            break
    try:
        transform: Matrix = np.linalg.cholesky((total + total.T) / 2).T.astype(np.float64)
        inverse: Matrix = np.linalg.inv(transform).astype(np.float64)
    except np.linalg.LinAlgError:
        return None
    return verified(matrix, transform, inverse)


def verified(matrix: Matrix, transform: Matrix, inverse: Matrix) -> Gauge | None:
    """Returns the factor of W in |T s|_2, S an approximate inverse of T.

    With E = S T - I of norm e < 1, `T W s = T W (I + E)^-1 S (T s)`. So the factor is at most `|T W S|_2 + |T W|_2
    |S|_2 e / (1 - e)`. The products' rounding, bounded by Frobenius norms, is added.
    """
    relative = 3 * roundoff(len(matrix))
    sizes = [float(np.linalg.norm(each)) * UP for each in (transform, matrix, inverse)]
    off = float(np.linalg.norm(inverse @ transform - np.eye(len(matrix)))) + relative * sizes[0] * sizes[2]
    if not off < 0.5:
        return None
    product = transform @ matrix @ inverse
    spare = (off / (1 - off) + relative) * sizes[0] * sizes[1] * sizes[2]
    factor = spectral_norm(product) + spare * UP
    back = spectral_norm(inverse) / (1 - off) * UP
    return Gauge(factor, Norm("2", (1.0,), transform), spectral_norm(transform), back)
