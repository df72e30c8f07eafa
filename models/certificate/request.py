"""The bound of one request: how far from a window's own end any run can be that read the same last tokens.

The window starts from the zero state. The run that it stands for was in some state when the window's first token
came, and any state that is reached from zero will do; from there on both read the same tokens, and what the window's
gates, slopes and lengths were is known. So the distance of the two is bounded step by step along the actual tokens,
layer by layer, each state unit by unit and as a whole (`models/certificate/deviation.py`). Without a tilde the
window's values, with one the run's; d before a value is its distance from the run's:

- gated:  `s~' - s' = f~ (s~ - s) + (f~ - f) (s - z) + (1 - f~) (z~ - z)`, and as this is linear in f~,
  `ds' <= f ds + (1 - f) dz + df (|s - z| + |ds - dz|)`. In the first layer the gates see the tokens alone, df = dz = 0:
  the distance is a product of gates times the state that was cut off.
- gru: the same with z for f and n for z; n moves by what `r * q` moves, `r~ dq + |q| dr`.
- lstm:  `dc' <= f~ dc + |c| df + i~ dg + |g| di`,  `dh' <= o~ d(tanh c') + |tanh c'| do`.
- linear, rnn:  `dh' <= |slope| (|W| dh + |U| dx)`, or in the 2-norm `|diag(slope) W|_2 |dh|_2`, slopes at their
  greatest within reach.

Between the layers: a LayerNorm by the angle that it can turn, matrices by their norms, relu by the units that can be
on. No state is ever further than it would be if the run's were anywhere within reach.

The statement is about exact runs and the window's end *as computed here*, in float64: rounding is in the radius.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.certificate.admissible import Matrix, Vector, roundoff
from models.certificate.deviation import (
    ULP,
    Deviation,
    Linear,
    longest,
    normalised,
    sigmoid_rise,
    sigmoid_slope,
    tanh_rise,
    tanh_slope,
)
from models.certificate.layers import gate_cap, layer_bounds
from models.manifest import STATE_NAMES, Architecture
from models.reference import sigmoid
from models.weights import GATES, Weights

MARGIN = 1e-9
"""Relative: what radii are made of is positive, and float64 adds and multiplies it to far better than this."""


Moved = tuple[tuple[Matrix, ...], tuple[Matrix, ...], tuple[Vector, ...]]
"""A cell's state after a step, how far it moves entry by entry, and as a whole; by state tensor."""


@dataclass(frozen=True, slots=True)
class WindowBound:
    """Where windows end, and how far from there the runs may be. B windows, L layers, H units.

    hidden: (B, H), the output layer's input; radius: (B), its 2-norm distance from the run's, at most.
    state, state_error: by the manifest's names, (B, H): the states, and how far each unit's may be from the run's;
    state_ball: the same as a whole, in the 2-norm, (B).
    """

    hidden: Matrix
    radius: Vector
    state: dict[str, Matrix]
    state_error: dict[str, Matrix]
    state_ball: dict[str, Vector]


@dataclass(frozen=True, slots=True)
class Pre:
    """A block of H pre-activations, (B, H), and how far each moves; as a whole it moves by `sources` times `balls`."""

    value: Matrix
    radius: Matrix
    rounding: Matrix
    sources: tuple[tuple[Linear, Vector], ...]

    def ball(self, scale: Matrix) -> Vector:
        """The 2-norm of what moves, each unit times `scale` (B, H) at most: (B)."""
        apart = [source.scaled_norm(scale) * ball for source, ball in self.sources]
        whole = np.linalg.norm(scale * self.rounding, axis=1) + np.sum(apart, axis=0)
        result: Vector = np.minimum(whole, np.linalg.norm(scale * self.radius, axis=1))
        return result


def window_bound(architecture: Architecture, weights: Weights, windows: NDArray[np.int64]) -> WindowBound:
    """The bound of each of `windows`, token ids (B, k), k >= 1. For many calls, keep a `RequestBound`."""
    return RequestBound(architecture, weights)(windows)


class RequestBound:
    """`window_bound` for one model: what does not depend on the request is computed once."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.architecture = architecture
        self._weights = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
        self._layers = [_Layer(architecture, weights, layer) for layer in range(architecture.layers)]
        bounds = layer_bounds(architecture, weights)
        for layer, bound in zip(self._layers, bounds, strict=True):
            layer.reach = bound.reach

    def __call__(self, windows: NDArray[np.int64]) -> WindowBound:
        """Token ids (B, k), k >= 1."""
        batch, hidden = len(windows), self.architecture.hidden
        states = [tuple(np.zeros((batch, hidden)) for _ in layer.reach) for layer in self._layers]
        errors = [
            tuple(Deviation.within(np.tile(reach, (batch, 1))) for reach in layer.reach) for layer in self._layers
        ]
        x, ball = np.zeros((batch, hidden)), np.zeros(batch)
        with np.errstate(over="ignore", invalid="ignore"):
            for column in windows.T:
                x, ball = self._step(column, states, errors)
        ball = np.where(np.isnan(ball), np.inf, ball) * (1 + MARGIN)
        names = [
            [f"layers.{layer}.{name}" for name in STATE_NAMES[self.architecture.cell]]
            for layer in range(self.architecture.layers)
        ]
        flat = [
            (name, state, error)
            for each in zip(names, states, errors, strict=True)
            for name, state, error in zip(*each, strict=True)
        ]
        return WindowBound(
            hidden=x,
            radius=ball,
            state={name: state for name, state, _ in flat},
            state_error={name: error.box * (1 + MARGIN) for name, _, error in flat},
            state_ball={name: error.ball * (1 + MARGIN) for name, _, error in flat},
        )

    def _step(
        self, tokens: NDArray[np.int64], states: list[tuple[Matrix, ...]], errors: list[tuple[Deviation, ...]]
    ) -> tuple[Matrix, Vector]:
        """One token of every window; replaces states and errors. Returns hidden and its radius."""
        x = self._weights["embedding.weight"][tokens]
        known = Deviation(np.zeros_like(x), np.zeros(len(x)))
        moved, residual = known, self.architecture.block == "residual"
        for index, layer in enumerate(self._layers):
            fed, off = layer.norm(x, moved) if residual else (x, moved)
            states[index], errors[index] = layer.step(fed, off, states[index], errors[index])
            x, moved = layer.above(x, moved, states[index][0], errors[index][0])
        if not residual:
            return x, moved.ball
        gain, shift = self._weights["norm.weight"], self._weights["norm.bias"]
        n, ball = normalised(x, self.architecture.norm_epsilon, moved.ball)
        largest = float(np.abs(gain).max())
        off = roundoff(1) * (np.linalg.norm(n * gain, axis=1) + float(np.linalg.norm(shift)))
        return n * gain + shift, ball * largest + off


class _Layer:
    """One layer: its cell, and in a residual network the block around it."""

    reach: tuple[Vector, ...]

    def __init__(self, architecture: Architecture, weights: Weights, layer: int) -> None:
        self._architecture = architecture
        self._first = layer == 0
        self._cap = gate_cap(architecture, layer)
        self._weights = {
            name.removeprefix(f"layers.{layer}."): tensor.astype(np.float64)
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        self._step = self._cell()
        cell, gates = architecture.cell, GATES[architecture.cell]
        own = self._weights
        gated = cell == "gated"
        inflow = own["cell.weight"] if gated else own["cell.weight_ih_l0"]
        bias = own["cell.bias"] if gated else own["cell.bias_ih_l0"]
        self._inflow = [
            self._linear(weight, part, "norm")
            for weight, part in zip(np.split(inflow, gates), np.split(bias, gates), strict=True)
        ]
        self._recurrent = []
        if not gated:
            parts = zip(np.split(own["cell.weight_hh_l0"], gates), np.split(own["cell.bias_hh_l0"], gates), strict=True)
            self._recurrent = [Linear(weight, part) for weight, part in parts]
        if architecture.block == "residual":
            self._mix = Linear(own["mix.weight"])
            if architecture.feed_forward:
                self._in = self._linear(own["feed_forward_in.weight"], own["feed_forward_in.bias"], "feed_forward_norm")
                self._out = Linear(own["feed_forward_out.weight"], own["feed_forward_out.bias"])
                self._columns = Linear(own["feed_forward_out.weight"].T)

    def _linear(self, weight: Matrix, bias: Vector, norm: str) -> Linear:
        if self._architecture.block != "residual":
            return Linear(weight, bias)
        return Linear.behind_norm(weight, bias, self._weights[f"{norm}.weight"], self._weights[f"{norm}.bias"])

    def norm(self, x: Matrix, moved: Deviation) -> tuple[Matrix, Deviation]:
        """What the cell's folded input matrices read."""
        n, ball = normalised(x, self._architecture.norm_epsilon, moved.ball)
        return n, Deviation(np.repeat(ball[:, None], n.shape[1], axis=1), ball)

    def step(
        self, x: Matrix, moved: Deviation, state: tuple[Matrix, ...], error: tuple[Deviation, ...]
    ) -> tuple[tuple[Matrix, ...], tuple[Deviation, ...]]:
        """The cell. x: what it reads, and how far that moves."""
        pre = [self._pre(linear, x, moved) for linear in self._inflow]
        new, boxes, balls = self._step(pre, state, error)
        errors = []
        for value, box, ball, reach in zip(new, boxes, balls, self.reach, strict=True):
            box = box + ULP * (1 + np.abs(value))
            ball = ball + ULP * (np.sqrt(value.shape[1]) + np.linalg.norm(value, axis=1))
            errors.append(Deviation.within(np.minimum(box, np.abs(value) + reach), ball))
        return new, tuple(errors)

    def above(self, x: Matrix, moved: Deviation, y: Matrix, error: Deviation) -> tuple[Matrix, Deviation]:
        """The rest of the block. x: its input, y: its cell's output."""
        if self._architecture.block != "residual":
            return y, error
        turned = np.minimum(error.ball * self._mix.norm, np.linalg.norm(self._mix.moved(error), axis=1))
        ball = moved.ball + turned + np.linalg.norm(self._mix.rounding(y), axis=1)
        x = x + self._mix(y)
        if self._architecture.feed_forward:
            n, radius = normalised(x, self._architecture.norm_epsilon, ball)
            pre = self._in(n)
            off = self._in.rounding(n)
            apart = radius[:, None] * self._in.rows + off
            unit = np.minimum(apart, np.maximum(0, pre + apart))
            live = (pre + apart > 0).astype(np.float64)
            through = np.minimum(
                np.linalg.norm(unit, axis=1),
                self._in.scaled_norm(live) * radius + np.linalg.norm(live * off, axis=1),
            )
            active = np.maximum(pre, 0)
            ball = ball + self._columns.scaled_norm(live) * through
            ball = ball + np.linalg.norm(self._out.rounding(active), axis=1)
            x = x + self._out(active)
        ball = ball + roundoff(1) * np.linalg.norm(x, axis=1)
        return x, Deviation(np.repeat(ball[:, None], x.shape[1], axis=1), ball)

    def _pre(self, linear: Linear, x: Matrix, moved: Deviation) -> Pre:
        rounding = linear.rounding(x)
        if not moved.ball.any():
            return Pre(linear(x), rounding, rounding, ())
        return Pre(linear(x), linear.moved(moved) + rounding, rounding, ((linear, moved.ball),))

    def _recalled(self, gate: int, h: Matrix, error: Deviation) -> Pre:
        return self._pre(self._recurrent[gate], h, error)

    def _cell(self) -> Callable[[list[Pre], tuple[Matrix, ...], tuple[Deviation, ...]], Moved]:
        match self._architecture.cell:
            case "gated":
                return self._gated
            case "gru":
                return self._gru
            case "lstm":
                return self._lstm
            case _:
                return self._simple

    def _gated(self, pre: list[Pre], state: tuple[Matrix, ...], error: tuple[Deviation, ...]) -> Moved:
        gate, candidate = pre
        f, df = self._cap * sigmoid(gate.value), self._cap * sigmoid_rise(gate.value, gate.radius)
        z, dz = np.tanh(candidate.value), tanh_rise(candidate.value, candidate.radius)
        through_gate = self._cap * sigmoid_slope(gate.value, gate.radius)
        into = tanh_slope(candidate.value, candidate.radius)
        return _mixed(
            state[0],
            error[0],
            (f, df, z, dz),
            lambda scale: gate.ball(scale * through_gate),
            lambda scale: candidate.ball(scale * into),
        )

    def _gru(self, pre: list[Pre], state: tuple[Matrix, ...], error: tuple[Deviation, ...]) -> Moved:
        h = state[0]
        reset, keep = (_sum(pre[gate], self._recalled(gate, h, error[0])) for gate in (0, 1))
        recalled = self._recalled(2, h, error[0])
        r, dr = sigmoid(reset.value), sigmoid_rise(reset.value, reset.radius)
        r_most = sigmoid(reset.value + reset.radius)
        q, dq = recalled.value, recalled.radius
        value, radius = pre[2].value + r * q, pre[2].radius + r_most * dq + dr * np.abs(q)
        radius = radius + ULP * (np.abs(pre[2].value) + np.abs(q))
        z, dz = sigmoid(keep.value), sigmoid_rise(keep.value, keep.radius)
        n, dn = np.tanh(value), tanh_rise(value, radius)
        slope, reset_slope = tanh_slope(value, radius), sigmoid_slope(reset.value, reset.radius)
        keep_slope = sigmoid_slope(keep.value, keep.radius)
        return _mixed(
            h,
            error[0],
            (z, dz, n, dn),
            lambda scale: keep.ball(scale * keep_slope),
            lambda scale: (
                pre[2].ball(scale * slope)
                + recalled.ball(scale * slope * r_most)
                + reset.ball(scale * slope * reset_slope * np.abs(q))
                + ULP * np.linalg.norm(scale * slope * (np.abs(pre[2].value) + np.abs(q)), axis=1)
            ),
        )

    def _lstm(self, pre: list[Pre], state: tuple[Matrix, ...], error: tuple[Deviation, ...]) -> Moved:
        h, c = state
        i, f, g, o = (_sum(part, self._recalled(gate, h, error[0])) for gate, part in enumerate(pre))
        enter, keep, show = (sigmoid(gate.value) for gate in (i, f, o))
        entered, kept, shown = (sigmoid(gate.value + gate.radius) for gate in (i, f, o))
        candidate = np.tanh(g.value)
        new = keep * c + enter * candidate
        box = kept * error[1].box + np.abs(c) * sigmoid_rise(f.value, f.radius)
        box = box + entered * tanh_rise(g.value, g.radius) + np.abs(candidate) * sigmoid_rise(i.value, i.radius)
        slopes = [sigmoid_slope(gate.value, gate.radius) for gate in (i, f, o)]
        inner = [
            (f, np.abs(c) * slopes[1]),
            (g, entered * tanh_slope(g.value, g.radius)),
            (i, np.abs(candidate) * slopes[0]),
        ]
        ball = longest(kept, error[1]) + np.sum([gate.ball(scale) for gate, scale in inner], axis=0)
        box = np.minimum(box, ball[:, None])
        squashed, out = np.tanh(new), np.minimum(shown, 1)
        rise, slope = tanh_rise(new, box), tanh_slope(new, box)
        h_box = out * rise + np.abs(squashed) * sigmoid_rise(o.value, o.radius)
        out = out * slope
        h_ball = longest(out * kept, error[1]) + np.sum([gate.ball(out * scale) for gate, scale in inner], axis=0)
        h_ball = h_ball + o.ball(np.abs(squashed) * slopes[2])
        return (show * squashed, new), (h_box, box), (h_ball, ball)

    def _simple(self, pre: list[Pre], state: tuple[Matrix, ...], error: tuple[Deviation, ...]) -> Moved:
        both = _sum(pre[0], self._recalled(0, state[0], error[0]))
        p, radius = both.value, both.radius
        match self._architecture.cell:
            case "linear":
                return (p,), (radius,), (both.ball(np.ones_like(p)),)
            case "rnn_tanh":
                return (np.tanh(p),), (tanh_rise(p, radius),), (both.ball(tanh_slope(p, radius)),)
            case _:
                live = (p + radius > 0).astype(np.float64)
                return (np.maximum(p, 0),), (np.minimum(radius, np.maximum(0, p + radius)),), (both.ball(live),)


def _sum(one: Pre, other: Pre) -> Pre:
    rounding = ULP * (np.abs(one.value) + np.abs(other.value)) + one.rounding + other.rounding
    radius = one.radius + other.radius + rounding
    return Pre(one.value + other.value, radius, rounding, one.sources + other.sources)


def _mixed(
    state: Matrix,
    error: Deviation,
    values: tuple[Matrix, Matrix, Matrix, Matrix],
    gate_ball: Callable[[Matrix], Vector],
    candidate_ball: Callable[[Matrix], Vector],
) -> Moved:
    """`f s + (1 - f) z`; values: f, df, z, dz; the balls of `scale * (f~ - f)` and `scale * (z~ - z)`."""
    f, df, z, dz = values
    apart = np.abs(state - z)
    box = f * error.box + (1 - f) * dz + df * (apart + np.abs(error.box - dz))
    kept, entering = np.minimum(f + df, 1), np.minimum(1 - f + df, 1)
    ball = longest(kept, error) + gate_ball(apart) + candidate_ball(entering)
    return (f * state + (1 - f) * z,), (box,), (ball,)
