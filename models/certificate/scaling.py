"""Weighted 2-norms in which the norm of a matrix is smaller than its plain 2-norm.

In the norm |T s|_2, the factor of W is |T W T^-1|_2. For a linear layer, T is any invertible matrix. For an RNN, T must
be diagonal: an elementwise function with a slope of at most 1 increases no entry of a difference, and therefore no
diagonally weighted norm. Let

    P = sum_k (W / a)^k' (W / a)^k,   rho(W) < a < |W|_2,   W' P W = a^2 (P - I) <= a^2 P.

Then W multiplies the norm sqrt(s' P s) by less than a. The last equality is the discrete Lyapunov equation. Its
solution P is computed by repeated doubling of the number of terms.

The computed T need not be exact: the stated factor is computed from T itself, and includes the error of T^-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wane.models.certificate.interval_rounding import UP, Matrix, norm_above, roundoff, spectral_norm
from wane.models.certificate.norm import Norm
from wane.models.certificate.perturbation import Perturbation

SWEEPS = 60

DOUBLINGS = 24
"""The largest number of doublings. After all of them, the sum has 2^24 terms."""

SHARE = 0.2
"""The position of the Lyapunov equation's `a` between the spectral radius (at position 0) and the smaller of 1 and the
spectral norm (at position 1). Smaller values increase the transform's condition number."""

WIDEST = 1e6
"""The largest condition number of a transform. With a larger one, the error of the inverse increases the factor more
than the transform reduces it."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A weighted 2-norm with its factor: |s / scales|_2, or |transform s|_2 with an approximate inverse of transform.

    into: the largest weighted norm of a vector whose 2-norm is 1. back: the largest 2-norm of a vector whose weighted
    norm is 1.
    """

    factor: float
    norm: Norm
    into: float
    back: float

    def of(self, perturbation: Perturbation) -> float:
        """Returns the largest weighted norm of all vectors within a perturbation, rounded up."""
        above = self.into * perturbation.ball * UP
        (scale,) = self.norm.scales
        return min(above, norm_above(perturbation.box / scale)) if isinstance(scale, np.ndarray) else above

    def perturbation(self, value: float, size: int) -> Perturbation:
        """Returns a perturbation that contains all vectors whose weighted norm is at most `value`."""
        (scale,) = self.norm.scales
        ball = self.back * value * UP
        return (
            Perturbation.within(scale * value * UP, ball)
            if isinstance(scale, np.ndarray)
            else Perturbation.of_ball(ball, size)
        )


def balanced(matrix: Matrix) -> Gauge:
    """Returns the norm with a diagonal T for which row i and column i of T W T^-1 have the same 2-norm, for every i
    (Osborne 1960)."""
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
    """Returns the norm of the Lyapunov equation. Returns None if the spectral radius is 1 or more, or if the
    transform's condition number exceeds WIDEST."""
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
    """Returns the norm |T s|_2 with its factor for W. W is `matrix`, T is `transform`, and S, an approximate inverse of
    T, is `inverse`. Returns None if S is too inexact.

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
