"""Bounds the distance between two outputs of a LayerNorm by the distance between its two inputs.

Let v be the input (d) without its mean, and w the vector (v, sqrt(d epsilon)) of d + 1 entries. The normalised vector
is n = sqrt(d) v / |w|: the first d entries of sqrt(d) w / |w|. So `|n - n~| <= 2 sqrt(d) sin(theta / 2)`, where theta
is the angle between w and w~. Let r = |v - v~|, which is also the distance between w and w~. There are two bounds:

- w and w~ lie on a plane at distance c = sqrt(d epsilon) from the origin. theta is largest, 2 atan(r / (2 c)), if the
  midpoint of w and w~ is the plane's nearest point to the origin: `|n - n~| <= sqrt(d) r / sqrt(r^2 / 4 + c^2)`. This
  is at most r / sqrt(epsilon) and at most 2 sqrt(d).
- If |w| and |w~| are at least m, then |w - w~| >= 2 m sin(theta / 2), so `|n - n~| <= sqrt(d) r / m`.

`Normalised` is a LayerNorm in a window. It bounds the distance between the window's output and the uninterrupted run's,
in the 2-norm and along a direction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.deviation import BEYOND, FAR, MARGIN, Linear
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, roundoff


def normalised_apart(distance: float, width: int, epsilon: float, least: float = 0.0) -> float:
    """Returns a bound of |n - n~|_2, rounded up. distance: |v - v~|_2. least: the least possible |v|_2."""
    lifted = width * min(epsilon, float(np.float32(epsilon))) / UP  # epsilon is rounded to float32, as in the graphs
    anywhere = distance / np.sqrt(distance**2 / 4 + lifted)
    apart = distance / np.sqrt(least**2 / UP + lifted)
    return float(np.sqrt(width) * min(anywhere, apart, 2.0)) * UP


def normalised_furthest(width: int) -> float:
    """Returns the greatest possible |n - n~|_2, rounded up."""
    return float(2 * np.sqrt(width)) * UP


class Between:
    """The matrices before (`source`) and after (`reader`) a LayerNorm n, as in `reader n(x + source d)`, where d is a
    change of the cell's output. Each row of `reader` sums to zero."""

    def __init__(self, reader: Linear, source: Linear) -> None:
        self.reader = reader
        self.source = source
        self.product: Matrix = reader.weight @ source.weight


class Normalised:
    """LayerNorms of rows x (B, H) without gain and shift, `n = (x - mean) / sqrt(variance + epsilon)`.

    `ball` (B) bounds the 2-norm distance of each n from the LayerNorm n~ of any x~ with |x~ - x|_2 <= r. Let v be x
    without its mean, and w = sqrt(|v|^2 + H epsilon). Then `n = sqrt(H) v / w`. Likewise, n~ depends on v~ and w~.
    Subtracting the means does not increase the distance of two vectors, so the vectors (v, sqrt(H epsilon)) and (v~,
    sqrt(H epsilon)) are at most r apart. Three bounds follow:

    - The length of the first vector is w. If r < w, the angle between the two vectors is therefore at most asin(r / w).
    - The lengths of both vectors are at least sqrt(H epsilon), so |n - n~| <= r / sqrt(epsilon) for any r.
    - |n - n~| <= |n| + |n~|, where |v~| <= |v| + r bounds |n~|.

    `remainder` (B) bounds the distance between n~ - n and `D (x~ - x)`, where D is the derivative of n at x. The second
    derivative of y / |y| along a vector of length r is at most (2 / sqrt 3) r^2 / |y|^2. Here y is on the segment
    between the two vectors of H + 1 entries, so |y| >= w - r. Along one direction g the remainder can be far smaller
    (`turned`).

    Rounding: the computed v is at most `uncentred` away from v. All expansions are about the computed v, so r is
    increased by `uncentred`. The terms of D and of its products may cancel. The error of these sums is at most MARGIN
    times the sum of the terms' absolute values, and the remainder includes this error.
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

    def seen_by(self, between: Between, box: Matrix, rest: Vector, entries: NDArray[np.intp]) -> Matrix:
        """Bounds the change of some entries of `reader n`, (B, E). x changes by `source d` with |d_i| <= box_i, plus
        another vector of length at most `rest` (B). The whole change of x has a length of at most r. entries: (E), the
        indices of the entries.

        The product of `reader`, the derivative of n and `source` is computed as
        `sqrt(H) / w (reader source - reader u (u source))`, where u = v / w.
        """
        read, sent = self._unit @ between.reader.weight[entries].T, self._unit @ between.source.weight
        product = between.product[entries]
        moved: Matrix = between.reader.rows[entries] * (self.remainder + self._factor * rest)[:, None]
        for row, factor in enumerate(self._factor):
            slope = read[row, :, None] * sent[row]
            np.subtract(product, slope, out=slope)
            moved[row] += np.abs(slope, out=slope) @ (factor * box[row])
        return moved

    def pull(self, g: Matrix, rows: NDArray[np.intp]) -> tuple[Matrix, Vector]:
        """Returns the gradients at x (P, H) of the functions `g . n`, and the bounds of the errors of the linear
        functions with these gradients, (P). g: (P, H). Vector j of g belongs to row `rows[j]` of the batch."""
        g = g - g.mean(axis=1, keepdims=True)
        unit = self._unit[rows]
        turned = g - unit * np.einsum("ph,ph->p", unit, g)[:, None]
        return turned * self._factor[rows, None], np.linalg.norm(g, axis=1) * self.remainder[rows]

    def derivative(self, row: int) -> tuple[Vector, float]:
        """Returns the vector u (H) and the number `factor` of a row's derivative of n. For x without its mean, the
        derivative is `factor (I - u u')`."""
        return self._unit[row], float(self._factor[row])

    def reached(self, row: int) -> float:
        """Returns a bound of the change of a row's n, to first order."""
        return float(self._root * self._share[row])

    def along(self, rows: NDArray[np.intp]) -> Matrix:
        """Returns the vectors u = v / w of the given rows: (P, H)."""
        unit: Matrix = self._unit[rows]
        return unit

    def turned(self, g: Matrix, rows: NDArray[np.intp], moved: Vector, along: Vector) -> Vector:
        """Bounds the change of `g . n` (P) if its first-order part is at most `moved` and |u . (x~ - x)| is at most
        `along`.

        Let e be x~ - x without its mean, a = u . e / w, b = |e|^2 / w^2 and rho = w~ / w. The first-order part is T =
        sqrt(H) / w (g . e - (u . g) (u . e)). As n~ = sqrt(H) (v + e) / w~, the change is T / rho + sqrt(H) (u . g) ((1
        + a) / rho - 1). Here rho^2 = 1 + 2 a + b >= (1 + a)^2, because a^2 <= b. With q = b / ((1 - |a|)^2 + b), (1 +
        a) / rho is therefore between sqrt(1 - q) and 1. The second term is small if |u . g| is small, as it is for the
        difference of two tokens' logits. Returns infinity if |a| may be 1.
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
        """Like `turned`, but from two numbers for each g without its mean: `length` is |g| and `lead` is |u . g|, (P)
        each."""
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
