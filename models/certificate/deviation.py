"""How far a value that is known only to within a radius is from the one that was computed, one operation at a time.

Everything is batched: B rows, each with its own computed value and its own radius. A `Deviation` bounds the difference
of two vectors twice over, entry by entry and by its 2-norm, since neither bound implies the other's best.

Float64's own rounding is part of the radius, not of the theorem's fine print: where a value is computed, what its
computation may be off by is added (`models/certificate/admissible.py` has the unit), so that the radius holds between
the value as computed here and that of exact arithmetic. What radii are made of, sums and products of non-negative
numbers, is off by some 1e-13 relative, which is left to one margin at the end (`models/certificate/request.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from models.certificate.outward import Matrix, Vector, roundoff
from models.reference import sigmoid

LARGE = 50.0
"""A pre-activation that may move by more than this moves its sigmoid from end to end."""

FAR = 1e30
"""Further than anything is: stands for no bound at all, and leaves room for its square."""

TINY = 1e-300

ULP = 2.0**-50
"""Of exp, tanh and the like and the few operations around them, relative."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """|x~ - x| <= box entry by entry, (B, H), and |x~ - x|_2 <= ball, (B); no_box: the ball is all that is known."""

    box: Matrix
    ball: Vector
    no_box: bool = False

    @classmethod
    def within(cls, box: Matrix, ball: Vector | None = None) -> Deviation:
        """Each bound, made no larger than what the other implies."""
        length = np.linalg.norm(box, axis=1)
        ball = length if ball is None else np.minimum(ball, length)
        return cls(np.minimum(box, ball[:, None]), ball)

    @classmethod
    def ball_only(cls, ball: Vector, width: int) -> Deviation:
        """What a ball says of each entry is the ball."""
        return cls(np.broadcast_to(ball[:, None], (len(ball), width)), ball, no_box=True)


class Linear:
    """A matrix (R, I) with the norms that bound what it makes of a deviation, and its bias (R).

    `off` (R) is how far the bias may be off, beyond one rounding.
    """

    def __init__(self, weight: Matrix, bias: Vector | float = 0.0, off: Vector | float = 0.0) -> None:
        self.weight = weight
        self.bias = np.zeros(len(weight)) + bias
        self.magnitude = np.abs(weight)
        self.rows = np.linalg.norm(weight, axis=1)
        self._off = roundoff(weight.shape[1]) * np.abs(self.bias) + off
        self._gram = (weight @ weight.T) ** 2
        # a spectral norm is computed to a few units of rounding per dimension, relative
        self.norm = float(np.linalg.norm(weight, 2)) * (1 + roundoff(4 * max(weight.shape)))

    @classmethod
    def behind_norm(cls, weight: Matrix, bias: Vector, gain: Vector, shift: Vector) -> Linear:
        """`weight (gain * n + shift) + bias` as a function of n, whose entries sum to zero, as differences of n do."""
        scaled = weight * gain
        off = roundoff(weight.shape[1]) * (np.abs(weight) @ np.abs(shift) + np.linalg.norm(scaled, axis=1))
        return cls(scaled - scaled.mean(axis=1, keepdims=True), weight @ shift + bias, off)

    def __call__(self, x: Matrix) -> Matrix:
        result: Matrix = x @ self.weight.T + self.bias
        return result

    def rounding(self, x: Matrix) -> Matrix:
        """How far `self(x)` is off, entry by entry: (B, R)."""
        length = np.linalg.norm(x, axis=1, keepdims=True)
        result: Matrix = roundoff(self.weight.shape[1]) * length * self.rows + self._off
        return result

    def moved(self, x: Deviation) -> Matrix:
        """Entry by entry, how far the product moves: (B, R)."""
        by_ball: Matrix = x.ball[:, None] * self.rows
        return by_ball if x.no_box else np.minimum(x.box @ self.magnitude.T, by_ball)

    def furthest(self, box: Matrix) -> Vector:
        """The greatest `|weight d|_2` over all |d_i| <= box_i, from above: (B, I) -> (B).

        `|W d|^2 = sum_ij d_i d_j (W' W)_ij`, of which each term is at most its magnitude: columns that are nearly at
        right angles, as those of a wide matrix are, hardly add up.
        """
        result: Vector = np.sqrt(np.einsum("bi,bi->b", box @ self._between_columns, box))
        return result

    @cached_property
    def columns(self) -> Vector:
        """Their 2-norms: (I)."""
        result: Vector = np.linalg.norm(self.weight, axis=0)
        return result

    @cached_property
    def _between_columns(self) -> Matrix:
        off = roundoff(len(self.weight)) * self.columns[:, None] * self.columns
        result: Matrix = np.abs(self.weight.T @ self.weight) + off
        return result

    def scaled_norm(self, scale: Matrix) -> Vector:
        """`|diag(scale) weight|_2` from above, scale >= 0: (B, R) -> (B).

        The largest of `scale` times the matrix's norm, or, as `|A|_2^4 <= |A A'|_F^2`, the Schatten 4-norm.
        """
        squares = scale**2
        schatten = np.einsum("br,br->b", squares @ self._gram, squares) ** 0.25
        result: Vector = np.minimum(scale.max(axis=1) * self.norm, schatten)
        return result


def sigmoid_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """The most that the logistic function moves where its argument moves by at most `radius`, without cancellation.

    With s = sigma(p) and E = exp(r) - 1: sigma(p + r) - s = s (1 - s) E / (1 + s E), and downward the same with 1 - s
    for s; the smaller denominator gives the larger.
    """
    up, down = sigmoid(pre), sigmoid(-pre)
    growth = np.expm1(np.minimum(radius, LARGE))
    rise = up * down * growth / (1 + np.minimum(up, down) * growth)
    result: Matrix = np.where(radius < LARGE, rise, np.maximum(up, down))
    return result


def tanh_rise(pre: Matrix, radius: Matrix) -> Matrix:
    """The same for tanh(p) = 2 sigma(2 p) - 1."""
    return 2 * sigmoid_rise(2 * pre, 2 * radius)


def sigmoid_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """The greatest derivative of the logistic function within `radius` of `pre`."""
    nearest = np.maximum(0, np.abs(pre) - radius)
    result: Matrix = sigmoid(nearest) * sigmoid(-nearest)
    return result


def tanh_slope(pre: Matrix, radius: Matrix) -> Matrix:
    """The greatest derivative of tanh within `radius` of `pre`."""
    return 4 * sigmoid_slope(2 * pre, 2 * radius)


def longest(kept: Matrix, deviation: Deviation) -> Vector:
    """The greatest `|kept * d|_2` over all d within the deviation, from above, kept >= 0: (B, H) -> (B)."""
    result: Vector = np.minimum(np.linalg.norm(kept * deviation.box, axis=1), kept.max(axis=1) * deviation.ball)
    return result


class Normalised:
    """LayerNorms without gain and shift, `n = (x - mean) / sqrt(variance + epsilon)`, of rows x (B, H), and how far
    in the 2-norm, `ball` (B), each is from that of any x~ with |x~ - x|_2 <= r.

    Let v be x less its mean. Centring shortens differences, and `n = sqrt(d) v / w`, w = sqrt(|v|^2 + d epsilon), is
    sqrt(d) times the unit vector along v with sqrt(d epsilon) for one more coordinate. Two such vectors at most r
    apart, one of them w long, are at most asin(r / w) apart in angle. For larger r: |n - n~| <= r / sqrt(epsilon), as
    both roots are at least sqrt(d epsilon); and neither n is longer than its own |v| allows.

    `remainder` (B): how far n~ - n is at most from `D (x~ - x)`, D the derivative at x. A unit vector's second
    derivative along a direction of length r is at most (2 / sqrt 3) r^2 / |u|^2, and |u| >= w - r on the way.
    Along one direction g it can be far less (`turned`).
    """

    def __init__(self, x: Matrix, epsilon: float, r: Vector) -> None:
        width = x.shape[1]
        relative, root = roundoff(width), np.sqrt(width)
        centred = x - x.mean(axis=1, keepdims=True)
        length = np.linalg.norm(centred, axis=1)
        whole = np.sqrt(length**2 + width * epsilon)
        self.value: Matrix = root * centred / whole[:, None]
        self._unit, self._factor = centred / whole[:, None], root / whole
        self._whole, self._root, self._slight = whole, root, 8 * relative

        # centring is off by `relative * max|x|`, entry by entry, which moves n as the same change of x would
        uncentred = relative * root * np.abs(x).max(axis=1)
        r = r + uncentred
        inside = r < whole
        near = np.where(inside, 2 * root * np.sin(np.arcsin(np.minimum(r / whole, 1.0)) / 2), np.inf)
        farthest = np.minimum(length + r, FAR)
        apart = root * (length / whole + farthest / np.sqrt(farthest**2 + width * epsilon))
        moved = np.minimum(np.minimum(near, apart), r / np.sqrt(epsilon))
        self.ball: Vector = moved + relative * root
        least = np.where(inside, whole - r, 1.0)
        second = np.where(inside, root / np.sqrt(3) * (r / least) ** 2, np.inf)
        self._rounding = 2 * relative * (root + moved) + self._factor * uncentred
        self.remainder: Vector = np.minimum(second, moved + self._factor * r) + self._rounding
        self._share = r / whole

    def seen_by(self, reader: Linear, source: Linear, box: Matrix, rest: Vector) -> Matrix:
        """Row by row, how far `reader n` moves where x moves by `source d`, |d_i| <= box_i, and by no more than `rest`
        (B) beside: (B, R). reader: of columns without their mean. The derivative between the two is multiplied out.
        """
        moved = np.empty((len(box), len(reader.weight)))
        for row, (unit, factor) in enumerate(zip(self._unit, self._factor, strict=True)):
            slope = reader.weight @ source.weight - np.outer(reader.weight @ unit, unit @ source.weight)
            off = 4 * roundoff(len(unit)) * float(source.columns @ box[row])
            moved[row] = np.abs(slope) @ box[row] * factor
            moved[row] += reader.rows * (self.remainder[row] + factor * (rest[row] + off))
        return moved

    def pull(self, g: Matrix, rows: NDArray[np.intp]) -> tuple[Matrix, Vector]:
        """Of functions `g . n` (P, H), each of one of the rows (P): their gradients at x, and what that leaves out."""
        g = g - g.mean(axis=1, keepdims=True)
        unit = self._unit[rows]
        turned = g - unit * np.einsum("ph,ph->p", unit, g)[:, None]
        return turned * self._factor[rows, None], np.linalg.norm(g, axis=1) * self.remainder[rows]

    def along(self, rows: NDArray[np.intp]) -> Matrix:
        """The unit vectors u = v / w of these rows: (P, H)."""
        unit: Matrix = self._unit[rows]
        return unit

    def turned(self, g: Matrix, rows: NDArray[np.intp], moved: Vector, along: Vector) -> Vector:
        """How far `g . n` (P) moves where its gradient's part is at most `moved` and |u . (x~ - x)| at most `along`.

        With a = u . (x~ - x) / w, b = |x~ - x|^2 / w^2, T the gradient's part and rho = w~ / w, all of it is

            T / rho + sqrt(H) (u . g) ((1 + a) / rho - 1),    rho^2 = 1 + 2 a + b >= (1 + a)^2,

        as a^2 <= b: the second order of a LayerNorm is n made shorter, and of n the lead of one token over another,
        `g . n`, is little. With q = b / ((1 - |a|)^2 + b), (1 + a) / rho is between sqrt(1 - q) and 1.
        """
        g = g - g.mean(axis=1, keepdims=True)
        share = self._share[rows]
        closer = 1 - np.minimum(along / self._whole[rows] + self._slight, share)
        open_ = closer > 0
        closer = np.where(open_, closer, 1.0)
        q = share**2 / (closer**2 + share**2)
        shorter = q / (1 + np.sqrt(1 - q)) * np.abs(np.einsum("ph,ph->p", self._unit[rows], g)) * self._root
        rounding = np.linalg.norm(g, axis=1) * self._rounding[rows]
        result: Vector = np.where(open_, moved / closer + shorter + rounding, np.inf)
        return result


class FeedForward:
    """`W_2 relu(W_1 x + b_1) + b_2`."""

    def __init__(self, inner: Linear, outer: Linear) -> None:
        self.inner = inner
        self.outer = outer
        self.columns = Linear(outer.weight.T)

    def __call__(self, x: Matrix, ball: Vector, units: Matrix | None = None) -> Fed:
        """x: (B, H), which moves by at most `ball` (B), and `inner x` by no more than `units` (B, R)."""
        return Fed(self, x, ball, units)


class Fed:
    """What a feed-forward puts out, `value` (B, H), and how far that moves, `ball` (B).

    A unit that stays off moves nothing and one that stays on is linear. In between, with a pre-activation p that
    moves by at most r > |p|, relu is within (r - |p|) / 2 of a line of slope (r + p) / 2 r.
    """

    def __init__(self, layer: FeedForward, x: Matrix, ball: Vector, units: Matrix | None = None) -> None:
        self._layer = layer
        p, off = layer.inner(x), layer.inner.rounding(x)
        r = ball[:, None] * layer.inner.rows
        r = (r if units is None else np.minimum(r, units)) + off
        live = (p + r > 0).astype(np.float64)
        unit = np.minimum(r, np.maximum(0, p + r))
        through = layer.inner.scaled_norm(live) * ball + np.linalg.norm(live * off, axis=1)
        through = np.minimum(through, np.linalg.norm(unit, axis=1))
        active = np.maximum(p, 0)
        self.value: Matrix = layer.outer(active)
        self._off = np.linalg.norm(layer.outer.rounding(active), axis=1)
        self.ball: Vector = (
            np.minimum(layer.columns.scaled_norm(live) * through, layer.outer.furthest(unit)) + self._off
        )
        self._slope = np.clip((p + r) / (2 * np.maximum(r, TINY)), 0, 1)
        self._slack = np.maximum(0, (r - np.abs(p)) / 2) + off

    def pull(self, g: Matrix, rows: NDArray[np.intp]) -> tuple[Matrix, Vector]:
        """Of functions `g . value` (P, H), each of one of the rows (P): a linear function of x, and how far off."""
        if len(self._slope) == 1:
            return self._pull_alone(g)
        units = g @ self._layer.outer.weight
        left = np.einsum("pu,pu->p", np.abs(units), self._slack[rows])
        left = left + np.linalg.norm(g, axis=1) * self._off[rows]
        return (units * self._slope[rows]) @ self._layer.inner.weight, left

    def _pull_alone(self, g: Matrix) -> tuple[Matrix, Vector]:
        """Where there is one row: of the units that stay off no more is counted than their columns' lengths."""
        slope, slack = self._slope[0], self._slack[0]
        live = slope > 0
        units = g @ self._layer.outer.weight[:, live]
        left = np.abs(units) @ slack[live]
        off = float(self._layer.columns.rows[~live] @ slack[~live]) + float(self._off[0])
        return (units * slope[live]) @ self._layer.inner.weight[live], left + np.linalg.norm(g, axis=1) * off
