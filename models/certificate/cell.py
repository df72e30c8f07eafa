"""One step of a cell beside a run that is somewhere near: the state after, and how far the run's may be from it.

Without a tilde the window's values, with one the run's; d before a value is its distance from the run's:

- gated:  `s~' - s' = f~ (s~ - s) + (f~ - f) (s - z) + (1 - f~) (z~ - z)`, and as this is linear in f~,
  `ds' <= f ds + (1 - f) dz + df (|s - z| + |ds - dz|)`;
- gru:  the same with z for f and n for z; n moves by what `r * q` moves, `r~ dq + |q| dr`;
- lstm:  `dc' <= f~ dc + |c| df + i~ dg + |g| di`,  `dh' <= o~ d(tanh c') + |tanh c'| do`;
- linear, rnn:  `dh' <= |slope| (|W| dh + |U| dx)`, or in the 2-norm `|diag(slope) W|_2 |dh|_2`, slopes at their
  greatest within reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wane.models.certificate.deviation import (
    FAR,
    ULP,
    Deviation,
    Linear,
    longest,
    sigmoid_rise,
    sigmoid_slope,
    tanh_rise,
    tanh_slope,
)
from wane.models.certificate.outward import Matrix, Vector
from wane.models.manifest import Cell
from wane.models.reference import sigmoid

States = tuple[Matrix, ...]
"""A layer's state tensors in the manifest's order, (B, H) each."""

Deviations = tuple[Deviation, ...]

HARDLY = 1e-9
"""What moves by less is as good as known: no sharper bound is looked for."""

Moved = tuple[States, tuple[Matrix, ...], tuple[Vector, ...]]
"""A cell's state after a step, how far it moves entry by entry, and as a whole; by state tensor."""


@dataclass(frozen=True, slots=True)
class Pre:
    """A block of H pre-activations, (B, H), and how far each moves; as a whole it moves by `sources` times `balls`."""

    value: Matrix
    radius: Matrix
    rounding: Matrix
    sources: tuple[tuple[Linear, Vector], ...]

    @classmethod
    def of(cls, linear: Linear, x: Matrix, moved: Deviation) -> Pre:
        """`linear(x)` where x moves so far."""
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
        """The 2-norm of what moves, each unit times `scale` (B, H) at most: (B)."""
        apart = [source.scaled_norm(scale) * ball for source, ball in self.sources]
        whole = np.linalg.norm(scale * self.rounding, axis=1) + np.sum(apart, axis=0)
        result: Vector = np.minimum(whole, np.linalg.norm(scale * self.radius, axis=1))
        return result


class CellStep:
    """A cell of one layer. inflow, recurrent: its matrices by gate; reach: how large states are, by tensor, (H)."""

    def __init__(
        self, cell: Cell, gate_cap: float, inflow: list[Linear], recurrent: list[Linear], reach: tuple[Vector, ...]
    ) -> None:
        self._cell = cell
        self._cap = gate_cap
        self.inflow = inflow
        self._recurrent = recurrent
        self.reach = tuple(np.minimum(each, FAR) for each in reach)
        self._reaches_far = not all(np.isfinite(each).all() for each in reach)

    def __call__(self, x: Matrix, moved: Deviation, state: States, error: Deviations) -> tuple[States, Deviations]:
        """x: what the cell reads, and how far that moves. No state is further than if the run's were at its reach."""
        pre = [Pre.of(linear, x, moved) for linear in self.inflow]
        match self._cell:
            case "gated":
                new, boxes, balls = self._gated(pre, state, error)
            case "gru":
                new, boxes, balls = self._gru(pre, state, error)
            case "lstm":
                new, boxes, balls = self._lstm(pre, state, error)
            case _:
                new, boxes, balls = self._simple(pre, state, error)
        errors = []
        for value, box, ball, reach in zip(new, boxes, balls, self.reach, strict=True):
            if self._reaches_far:  # the run may have started from anywhere
                errors.append(Deviation.within(np.full_like(box, FAR)))
                continue
            box = box + ULP * (1 + np.abs(value))
            ball = ball + ULP * (np.sqrt(value.shape[1]) + np.linalg.norm(value, axis=1))
            errors.append(Deviation.within(np.minimum(box, np.abs(value) + reach), ball))
        return new, tuple(errors)

    def _gated(self, pre: list[Pre], state: States, error: Deviations) -> Moved:
        gate, candidate = pre
        f, df = self._cap * sigmoid(gate.value), self._cap * sigmoid_rise(gate.value, gate.radius)
        z, dz = np.tanh(candidate.value), tanh_rise(candidate.value, candidate.radius)
        turning = self._cap * sigmoid_slope(gate.value, gate.radius)
        slope = tanh_slope(candidate.value, candidate.radius)
        return _mixed(
            (state[0], error[0]),
            (f, df, z, dz),
            lambda scale: gate.ball(scale * turning),
            lambda scale: candidate.ball(scale * slope),
        )

    def _gru(self, pre: list[Pre], state: States, error: Deviations) -> Moved:
        h = state[0]
        recalled = [Pre.of(linear, h, error[0]) for linear in self._recurrent]
        reset, keep, q = pre[0] + recalled[0], pre[1] + recalled[1], recalled[2]
        r, dr = sigmoid(reset.value), sigmoid_rise(reset.value, reset.radius)
        widest = sigmoid(reset.value + reset.radius)
        rounding = ULP * (np.abs(pre[2].value) + np.abs(q.value))
        value = pre[2].value + r * q.value
        radius = pre[2].radius + widest * q.radius + dr * np.abs(q.value) + rounding
        slope = tanh_slope(value, radius)
        resetting = np.abs(q.value) * sigmoid_slope(reset.value, reset.radius)
        switching = sigmoid_slope(keep.value, keep.radius)
        return _mixed(
            (h, error[0]),
            (
                sigmoid(keep.value),
                sigmoid_rise(keep.value, keep.radius),
                np.tanh(value),
                tanh_rise(value, radius),
            ),
            lambda scale: keep.ball(scale * switching),
            lambda scale: (
                pre[2].ball(scale * slope)
                + q.ball(scale * slope * widest)
                + reset.ball(scale * slope * resetting)
                + np.linalg.norm(scale * slope * rounding, axis=1)
            ),
        )

    def _lstm(self, pre: list[Pre], state: States, error: Deviations) -> Moved:
        h, c = state
        i, f, g, o = (part + Pre.of(linear, h, error[0]) for part, linear in zip(pre, self._recurrent, strict=True))
        enter, keep, show = (sigmoid(gate.value) for gate in (i, f, o))
        entered, kept, shown = (np.minimum(1, sigmoid(gate.value + gate.radius)) for gate in (i, f, o))
        candidate = np.tanh(g.value)
        new = keep * c + enter * candidate
        box = kept * error[1].box + np.abs(c) * sigmoid_rise(f.value, f.radius)
        box = box + entered * tanh_rise(g.value, g.radius) + np.abs(candidate) * sigmoid_rise(i.value, i.radius)
        inner = (
            (f, np.abs(c) * sigmoid_slope(f.value, f.radius)),
            (g, entered * tanh_slope(g.value, g.radius)),
            (i, np.abs(candidate) * sigmoid_slope(i.value, i.radius)),
        )
        ball = longest(kept, error[1]) + np.sum([gate.ball(scale) for gate, scale in inner], axis=0)
        box = np.minimum(np.minimum(box, ball[:, None]), np.abs(new) + self.reach[1])

        squashed, steep = np.tanh(new), shown * tanh_slope(new, box)
        shown_box = shown * tanh_rise(new, box) + np.abs(squashed) * sigmoid_rise(o.value, o.radius)
        shown_ball = longest(steep * kept, error[1])
        shown_ball = shown_ball + np.sum([gate.ball(steep * scale) for gate, scale in inner], axis=0)
        shown_ball = shown_ball + o.ball(np.abs(squashed) * sigmoid_slope(o.value, o.radius))
        return (show * squashed, new), (shown_box, box), (shown_ball, ball)

    def _simple(self, pre: list[Pre], state: States, error: Deviations) -> Moved:
        both = pre[0] + Pre.of(self._recurrent[0], state[0], error[0])
        p, radius = both.value, both.radius
        match self._cell:
            case "linear":
                return (p,), (radius,), (both.ball(np.ones_like(p)),)
            case "rnn_tanh":
                return (np.tanh(p),), (tanh_rise(p, radius),), (both.ball(tanh_slope(p, radius)),)
            case _:
                live = (p + radius > 0).astype(np.float64)
                return (np.maximum(p, 0),), (np.minimum(radius, np.maximum(0, p + radius)),), (both.ball(live),)


def _mixed(
    before: tuple[Matrix, Deviation],
    values: tuple[Matrix, Matrix, Matrix, Matrix],
    gate_ball: Callable[[Matrix], Vector],
    candidate_ball: Callable[[Matrix], Vector],
) -> Moved:
    """`f s + (1 - f) z`. before: s and how far it moves; values: f, df, z, dz; the balls of `scale * (f~ - f)` and
    `scale * (z~ - z)`."""
    (s, error), (f, df, z, dz) = before, values
    apart = np.abs(s - z)
    box = f * error.box + (1 - f) * dz + df * (apart + np.abs(error.box - dz))
    kept, entering = np.minimum(f + df, 1), np.minimum(1 - f + df, 1)
    ball = longest(kept, error) + gate_ball(apart) + candidate_ball(entering)
    return (f * s + (1 - f) * z,), (box,), (ball,)
