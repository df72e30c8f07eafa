"""Bounds of the difference of two trajectories at one position in the network, and the linear maps of such bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wane.models.certificate.interval_rounding import TINY, UP, Matrix, Vector, norm_above, spectral_norm


@dataclass(frozen=True, slots=True)
class Perturbation:
    """The set of all differences d (H) with |d_i| <= box_i and |d|_2 <= ball."""

    box: Vector
    ball: float

    @classmethod
    def within(cls, box: Vector, ball: float = np.inf) -> Perturbation:
        """Builds a perturbation from `box` and, if given, `ball`. Each of the two bounds is reduced to the value that
        the other one implies."""
        box = np.maximum(box, TINY)
        ball = max(min(ball, norm_above(box)), TINY)
        return cls(np.minimum(box, ball), ball)

    @classmethod
    def of_ball(cls, ball: float, size: int) -> Perturbation:
        """Builds the perturbation of all differences of at most this length."""
        return cls(np.full(size, ball), ball)

    def __add__(self, other: Perturbation) -> Perturbation:
        return Perturbation.within((self.box + other.box) * UP, (self.ball + other.ball) * UP)

    def cut(self, other: Perturbation) -> Perturbation:
        """Returns the intersection of two perturbations."""
        return Perturbation.within(np.minimum(self.box, other.box), min(self.ball, other.ball))


class LinearMap:
    """The linear map `d -> matrix d`. The matrix's rows bound each unit of the result, and the spectral norm bounds the
    result's 2-norm.

    off: the 2-norm of each row's error, (R).
    """

    def __init__(self, matrix: Matrix, off: Vector | float = 0.0) -> None:
        self.matrix = matrix
        self.off = np.broadcast_to(np.asarray(off, dtype=np.float64), matrix.shape[:1])
        self.magnitude = np.abs(matrix) + self.off[:, None]
        self.rows: Vector = (np.linalg.norm(matrix, axis=1) + self.off) * UP

    @cached_property
    def norm(self) -> float:
        """The matrix's spectral norm, rounded up."""
        return spectral_norm(self.matrix) + norm_above(self.off)

    def scaled(self, scale: Vector) -> LinearMap:
        """Returns the map with each row multiplied by a non-negative number."""
        return LinearMap(self.matrix * scale[:, None], self.off * scale * UP)

    def rows_of(self, perturbation: Perturbation) -> Vector:
        """Returns the bound of each unit of the result."""
        box: Vector = np.minimum(self.magnitude @ perturbation.box, self.rows * perturbation.ball) * UP
        return box

    def __call__(self, perturbation: Perturbation) -> Perturbation:
        return Perturbation.within(self.rows_of(perturbation), self.norm * perturbation.ball * UP)
