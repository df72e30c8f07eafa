"""The inputs of an input-gated cell as float32 graphs compute them.

In exact arithmetic, the cell's input is a LayerNorm. If the LayerNorm's input nearly vanishes, its computed output may
be far from the exact one, and the computed gates and candidates are then far from the exact ones. The certificate of a
model with a `Readout` therefore bounds the computed values. `models/certificate/readout.py` has the assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from wane.models.cell_registry import CELLS
from wane.models.certificate.admissible import EVERY, ROWS_AT_ONCE, Normalised, Reach, Rows
from wane.models.certificate.interval_rounding import UP, Matrix, Vector
from wane.models.manifest import Architecture

UNIT = 2.0**-24
"""The unit roundoff of float32."""

SUMS = 4.0
"""See the docstring of `models/certificate/readout.py`. On x86-64 processors with AVX2, the largest measured value is
below 1."""

NORM = 4.0
"""See the docstring of `models/certificate/readout.py`."""

FUNCTION = 8
"""The assumed absolute error of the sigmoid and tanh, whose values are at most 1, in units of roundoff."""

ROOM = 1 + 2.0**-10
"""The factor by which bounds of exact values are multiplied to bound the computed values."""


def has_readout(architecture: Architecture) -> bool:
    """Returns whether `models/certificate/readout.py` bounds the rounding of the architecture."""
    return architecture.block == "residual" and architecture.layers == 1 and CELLS[architecture.cell].input_gated


@dataclass(frozen=True, slots=True)
class ComputedNormalised(Normalised):
    """Computed outputs of a LayerNorm whose input is not known. Its input may nearly vanish, so nothing bounds the
    pre-activations."""

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        nothing = np.full(len(weight), np.inf) + bias
        return Reach(-nothing, nothing)


@dataclass(frozen=True, slots=True)
class ComputedRows(Rows):
    """The computed output of a LayerNorm for each token.

    gain: the LayerNorm's gain, (I). apart: bounds of the 2-norm distances of the computed normalised vectors from the
    exact ones, (V). sums: bounds of the further errors of the pre-activations, (V).
    """

    gain: Vector = field(kw_only=True)
    apart: Vector = field(kw_only=True)
    sums: Vector = field(kw_only=True)

    @classmethod
    def of(
        cls, rows: Matrix, norm: tuple[Vector, Vector], epsilon: float, product: tuple[Matrix, Vector]
    ) -> ComputedRows:
        """rows: the LayerNorm's inputs, (V, I). norm: its gain and shift. product: the weight, (R, I), and the bias,
        (R), of the matrix product that reads its outputs."""
        (gain, shift), (weight, bias) = norm, product
        exact = Rows.normalised(rows, gain, shift, epsilon)
        width, size = rows.shape[1], np.abs(gain)
        apart = _normalised_apart(rows, epsilon) + UNIT * (NORM + 3) * np.sqrt(width)
        sums = np.empty(len(rows))
        magnitude, slope = np.abs(weight).T, np.abs(weight) @ size
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            sizes = (np.abs(exact.rows[part]) + exact.error) @ magnitude + np.abs(bias) + apart[part, None] * slope
            sums[part] = UNIT * SUMS * np.linalg.norm(sizes, axis=1)
        sums += UNIT * (NORM + 3) * np.linalg.norm(np.abs(weight) @ np.abs(shift))
        return cls(exact.rows, exact.error, gain=gain, apart=apart, sums=sums * ROOM)

    def _wider(self, weight: Matrix, part: slice) -> Matrix:
        """Returns bounds of the errors of computed pre-activations: (V, R)."""
        lengths = np.linalg.norm(weight * self.gain, axis=1)
        result: Matrix = (np.outer(self.apart[part], lengths) + self.sums[part, None]) * UP
        return result

    def reach(self, weight: Matrix, bias: Vector) -> Reach:
        parts = self.parts()
        high = np.max([self.each(weight, bias, part).max(axis=0) for part in parts], axis=0)
        low = np.max([self.each(-weight, -bias, part).max(axis=0) for part in parts], axis=0)
        return Reach(-low, high)

    def each(self, weight: Matrix, bias: Vector, part: slice = EVERY) -> Matrix:
        exact = Rows(self.rows, self.error).each(weight, bias, part)
        above: Matrix = np.nextafter(exact + self._wider(weight, part), np.inf)
        return above


def _normalised_apart(rows: Matrix, epsilon: float) -> Vector:
    """Bounds the 2-norm distances of the LayerNorms of `rows` from those of rows that are NORM u |x| away (see
    `models/certificate/layer_norm.py`)."""
    width = rows.shape[1]
    lifted = width * min(epsilon, float(np.float32(epsilon)))
    off = NORM * UNIT * np.linalg.norm(rows, axis=1) * ROOM
    least = np.maximum(np.linalg.norm(rows - rows.mean(axis=1, keepdims=True), axis=1) / ROOM - off, 0.0)
    anywhere, near = off / np.sqrt(off**2 / 4 + lifted), off / np.sqrt(least**2 + lifted)
    result: Vector = np.sqrt(width) * np.minimum(np.minimum(anywhere, near), 2.0) * ROOM
    return result
