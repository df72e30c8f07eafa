"""Computes one step of a cell in a window: the next state, and a bound of the distance between this state and the
uninterrupted run's.

A value without a tilde belongs to the window, and a value with a tilde to the uninterrupted run (below: the run). The
prefix d denotes a bound of the distance between the two values. `models/certificate/cells/` has the step of each cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wane.models.certificate.deviation import FAR, ULP, Deviation, Linear, longest
from wane.models.certificate.interval_rounding import Matrix, Vector
from wane.models.layer_parts import load
from wane.models.layer_registry import LayerSpec

States = tuple[Matrix, ...]
"""A layer's state tensors in the manifest's order, (B, H) each."""

Deviations = tuple[Deviation, ...]

HARDLY = 1e-9
"""`Pre.ball` computes the sharper of its two bounds only if the bound of the distance between the cell's inputs in the
window and in the run is at least this value."""

Moved = tuple[States, tuple[Matrix, ...], tuple[Vector, ...]]
"""Three tuples with one entry for each state tensor of a cell: the next state, the bounds of its distance from the
run's state entry by entry (box), and the bounds in the 2-norm (ball)."""


@dataclass(frozen=True, slots=True)
class Pre:
    """A block of H pre-activations: a sum of linear maps.

    value: (B, H), the pre-activations.
    radius: (B, H), the bound of the distance of each pre-activation from the run's.
    rounding: (B, H), the part of `radius` that rounding causes.
    sources: the linear maps, each with the 2-norm bound of the change of its input.
    """

    value: Matrix
    radius: Matrix
    rounding: Matrix
    sources: tuple[tuple[Linear, Vector], ...]

    @classmethod
    def of(cls, linear: Linear, x: Matrix, moved: Deviation) -> Pre:
        """Returns `linear(x)` with the bound of its change, for an x that changes by at most `moved`."""
        rounding = linear.rounding(x)
        radius = linear.moved(moved) + rounding
        if moved.ball.max(initial=0.0) < HARDLY:
            return cls(linear(x), radius, radius, ())
        return cls(linear(x), radius, rounding, ((linear, moved.ball),))

    def __add__(self, other: Pre) -> Pre:
        rounding = ULP * (np.abs(self.value) + np.abs(other.value)) + self.rounding + other.rounding
        radius = self.radius + other.radius + rounding
        return Pre(self.value + other.value, radius, rounding, self.sources + other.sources)

    def ball(self, scale: Matrix) -> Vector:
        """Returns a bound of the 2-norm of the block's distance from the run's, after each unit has been multiplied by
        at most `scale` (B, H): (B)."""
        apart = [source.scaled_norm(scale) * ball for source, ball in self.sources]
        whole = np.linalg.norm(scale * self.rounding, axis=1) + np.sum(apart, axis=0)
        result: Vector = np.minimum(whole, np.linalg.norm(scale * self.radius, axis=1))
        return result


class CellStep:
    """The cell of one layer. inflow: the cell's input matrices, one for each gate. recurrent: its recurrent matrices,
    one for each gate. tensors: the cell's tensors. reach: for each state tensor, the bounds of its units' absolute
    values, (H)."""

    def __init__(
        self,
        layer: LayerSpec,
        inflow: list[Linear],
        recurrent: list[Linear],
        reach: tuple[Vector, ...],
        tensors: dict[str, Matrix],
    ) -> None:
        self.layer = layer
        self.tensors = tensors
        self.inflow = inflow
        self.recurrent = recurrent
        self._moved: Step = load("certificate", layer.module).moved
        self.reach = tuple(np.minimum(each, FAR) for each in reach)
        self._reaches_far = not all(np.isfinite(each).all() for each in reach)

    def __call__(self, x: Matrix, moved: Deviation, state: States, error: Deviations) -> tuple[States, Deviations]:
        """Returns the next state, and the bounds of its distance from the run's. x: the cell's input, which changes by
        at most `moved`. Each distance is limited to |state| + reach, because the run's state is within reach."""
        pre = [Pre.of(linear, x, moved) for linear in self.inflow]
        new, boxes, balls = self._moved(self, pre, state, error)
        errors = []
        for value, box, ball, reach in zip(new, boxes, balls, self.reach, strict=True):
            if self._reaches_far:  # at least one unit of the run's state has no bound
                errors.append(Deviation.within(np.full_like(box, FAR)))
                continue
            box = box + ULP * (1 + np.abs(value))
            ball = ball + ULP * (np.sqrt(value.shape[1]) + np.linalg.norm(value, axis=1))
            errors.append(Deviation.within(np.minimum(box, np.abs(value) + reach), ball))
        return new, tuple(errors)


Step = Callable[[CellStep, list[Pre], States, Deviations], Moved]
"""A function that computes one step of a cell. Its arguments are the `CellStep`, the input's part of the
pre-activations by gate, the previous state, and the bound of the previous state's distance from the run's."""


def mixed(
    before: tuple[Matrix, Deviation],
    values: tuple[Matrix, Matrix, Matrix, Matrix],
    gate_ball: Callable[[Matrix], Vector],
    candidate_ball: Callable[[Matrix], Vector],
) -> Moved:
    """Returns the next state `f s + (1 - f) z` with the bounds of its distance from the run's. before: s and the bound
    of its distance from the run's. values: f, df, z, dz. gate_ball and candidate_ball: functions of `scale` that bound
    the 2-norms of `scale * (f~ - f)` and `scale * (z~ - z)`.
    """
    (s, error), (f, df, z, dz) = before, values
    apart = np.abs(s - z)
    box = f * error.box + (1 - f) * dz + df * (apart + np.abs(error.box - dz))
    kept, entering = np.minimum(f + df, 1), np.minimum(1 - f + df, 1)
    ball = longest(kept, error) + gate_ball(apart) + candidate_ball(entering)
    return (f * s + (1 - f) * z,), (box,), (ball,)
