"""Bounds the distance of a LayerNorm's outputs by the distance of its inputs.

Let v be the centred input (d), and w = (v, sqrt(d epsilon)), which has one coordinate more. The normalised vector is n
= sqrt(d) v / |w|, the projection of sqrt(d) times w's direction. So `|n - n~| <= 2 sqrt(d) sin(theta / 2)`, theta the
angle between w and w~. Two bounds of theta hold for two points at distance r:

- Both points lie on a plane at distance c = sqrt(d epsilon) from the origin. The angle is largest, 2 atan(r / (2 c)),
  if the segment between them is centred: `|n - n~| <= sqrt(d) r / sqrt(r^2 / 4 + c^2)`. This is at most r /
  sqrt(epsilon) and at most 2 sqrt(d).
- If both have a length of at least m, then |w - w~| >= 2 m sin(theta / 2), so `|n - n~| <= sqrt(d) r / m`.

`Normalised` is a LayerNorm in a window. It bounds the distance of the window's output from the run's, in the 2-norm and
along a direction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import BEYOND, FAR, MARGIN, Linear
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, roundoff


def normalised_apart(distance: float, width: int, epsilon: float, least: float = 0.0) -> float:
    """Returns a bound of |n - n~|_2, rounded up. distance: |v - v~|_2. least: the least possible |v|_2."""
    lifted = width * min(epsilon, float(np.float32(epsilon))) / UP  # the graphs use epsilon in float32
    anywhere = distance / np.sqrt(distance**2 / 4 + lifted)
    apart = distance / np.sqrt(least**2 / UP + lifted)
    return float(np.sqrt(width) * min(anywhere, apart, 2.0)) * UP


def normalised_furthest(width: int) -> float:
    """Returns the greatest possible |n - n~|_2, rounded up."""
    return float(2 * np.sqrt(width)) * UP


class Between:
    """Two matrices with a LayerNorm in between: `reader n(x + source d)`. The rows of `reader` sum to zero."""

    def __init__(self, reader: Linear, source: Linear) -> None:
        self.reader = reader
        self.source = source
        self.product: Matrix = reader.weight @ source.weight


class Normalised:
    """LayerNorms of rows x (B, H) without gain and shift, `n = (x - mean) / sqrt(variance + epsilon)`. `ball` (B)
    bounds the 2-norm distance of each n from the LayerNorm of any x~ with |x~ - x|_2 <= r.

    Let v be x less its mean. Centring does not lengthen differences. `n = sqrt(H) v / w`, w = sqrt(|v|^2 + H epsilon),
    is sqrt(H) times the unit vector along v with sqrt(H epsilon) as an additional coordinate. If two such vectors are
    at most r apart and one of them has length w, the angle between them is at most asin(r / w). For larger r, |n - n~|
    <= r / sqrt(epsilon), as both roots are at least sqrt(H epsilon). No n is longer than its |v| allows.

    `remainder` (B) bounds the distance of n~ - n from `D (x~ - x)`, D the derivative at x. The second derivative of a
    unit vector along a direction of length r is at most (2 / sqrt 3) r^2 / |u|^2, and |u| >= w - r on the segment.
    Along one direction g the remainder can be far smaller (`turned`).

    Rounding: the computed v is at most `uncentred` away from v. All expansions are about the computed v, so x~ is
    further from it by that distance. The terms of D and of its products may cancel. Their error is at most MARGIN of
    the terms' magnitudes, and the remainder includes it.
    """

    def __init__(self, x: Matrix, epsilon: float, r: Vector) -> None:
        width = x.shape[1]
        relative, root = roundoff(width), np.sqrt(width)
        once = x - x.mean(axis=1, keepdims=True)
        centred = once - once.mean(axis=1, keepdims=True)  # a second centring removes the rounding of a large mean
        length = np.linalg.norm(centred, axis=1)
        whole = np.sqrt(length**2 + width * epsilon)
        self.value: Matrix = root * centred / whole[:, None]
        self._unit, self._factor = centred / whole[:, None], root / whole
        self._whole, self._root, self._relative = whole, root, relative

        self._uncentred = 2 * relative * root * np.abs(once).max(axis=1)
        r = r + self._uncentred
        inside = (r < whole) & (r < BEYOND)
        near = np.where(inside, 2 * root * np.sin(np.arcsin(np.minimum(r / whole, 1.0)) / 2), np.inf)
        farthest = np.minimum(length + r, FAR)
        apart = root * (length / whole + farthest / np.sqrt(farthest**2 + width * epsilon))
        moved = np.minimum(np.minimum(near, apart), r / np.sqrt(epsilon))
        self.ball: Vector = moved + relative * root
        least = np.where(inside, whole - r, 1.0)
        second = np.where(inside, root / np.sqrt(3) * (r / least) ** 2, np.inf)
        self._share = np.where(r < BEYOND, r / whole, FAR)
        self._cancelled = (MARGIN + self._uncentred / whole) * self._share
        self._rounding = 2 * relative * (root + moved) + self._factor * self._uncentred + root * self._cancelled
        self.remainder: Vector = np.minimum(second, moved + self._factor * r) + self._rounding

    def seen_by(self, between: Between, box: Matrix, rest: Vector) -> Matrix:
        """Bounds the change of `reader n` row by row, (B, R), if x changes by `source d`, |d_i| <= box_i, plus another
        vector of length at most `rest` (B), and by at most r in total.

        The derivative between the two matrices is multiplied out: `sqrt(H) / w (reader source - reader u (u source))`,
        u = v / w.
        """
        read, sent = self._unit @ between.reader.weight.T, self._unit @ between.source.weight
        moved: Matrix = between.reader.rows * (self.remainder + self._factor * rest)[:, None]
        for row, factor in enumerate(self._factor):
            slope = read[row, :, None] * sent[row]
            np.subtract(between.product, slope, out=slope)
            moved[row] += np.abs(slope, out=slope) @ (factor * box[row])
        return moved

    def pull(self, g: Matrix, rows: NDArray[np.intp]) -> tuple[Matrix, Vector]:
        """Returns the gradients at x of functions `g . n` (P, H), each for one of `rows` (P), and their errors."""
        g = g - g.mean(axis=1, keepdims=True)
        unit = self._unit[rows]
        turned = g - unit * np.einsum("ph,ph->p", unit, g)[:, None]
        return turned * self._factor[rows, None], np.linalg.norm(g, axis=1) * self.remainder[rows]

    def derivative(self, row: int) -> tuple[Vector, float]:
        """Returns u (H) and the factor in this row's derivative of n, `factor (I - u u')`, for x without its mean."""
        return self._unit[row], float(self._factor[row])

    def reached(self, row: int) -> float:
        """Returns the largest change of this row's n to first order."""
        return float(self._root * self._share[row])

    def along(self, rows: NDArray[np.intp]) -> Matrix:
        """Returns the vectors u = v / w of these rows: (P, H)."""
        unit: Matrix = self._unit[rows]
        return unit

    def turned(self, g: Matrix, rows: NDArray[np.intp], moved: Vector, along: Vector) -> Vector:
        """Bounds the change of `g . n` (P) if its first-order part is at most `moved` and |u . (x~ - x)| is at most
        `along`.

        Let a = u . (x~ - x) / w, b = |x~ - x|^2 / w^2, T the first-order part and rho = w~ / w. The change is T / rho +
        sqrt(H) (u . g) ((1 + a) / rho - 1), where rho^2 = 1 + 2 a + b >= (1 + a)^2, as a^2 <= b. The second order of a
        LayerNorm shortens n, and the lead of one token over another, `g . n`, is a small part of n. With q = b / ((1 -
        |a|)^2 + b), (1 + a) / rho is between sqrt(1 - q) and 1. Returns infinity if |a| may be 1.
        """
        g = g - g.mean(axis=1, keepdims=True)
        lead = np.abs(np.einsum("ph,ph->p", self._unit[rows], g))
        return self.turned_by(np.linalg.norm(g, axis=1), lead, rows, moved, along)

    def turned_by(
        self,
        length: Vector,
        lead: Vector,
        rows: NDArray[np.intp] | int,
        moved: Vector,
        along: Vector | float,
    ) -> Vector:
        """Like `turned`, for functions described by `length` |g| and `lead` |u . g| (P), with g without its mean."""
        share = self._share[rows]
        turning = (along + self._uncentred[rows]) / self._whole[rows] + self._cancelled[rows]
        closer = 1 - np.minimum(turning, share) - 8 * self._relative
        open_ = (closer > 0) & (share < BEYOND)
        closer = np.where(open_, closer, 1.0)
        q = share**2 / (closer**2 + share**2)
        shorter = q / (1 + np.sqrt(1 - q)) * lead * self._root
        rounding = length * self._rounding[rows]
        result: Vector = np.where(open_, (moved + rounding) / closer + shorter, np.inf)
        return result
