"""The bound of one request: the distance between the output layer's input at a window's end and the output layer's
input of any run with the same last tokens.

The window starts from the zero state. Before the window's first token, the run's state is any state that can be reached
from zero. From this token on, the window and the run read the same tokens, and the window's gates, slopes and vector
lengths are known. The distance between the window's states and the run's is bounded token by token and layer by layer.
Each state is bounded unit by unit and in the 2-norm (`cell_step.py`, `deviation.py`):

- The inputs of the first layer are the tokens' embeddings, so its gates are known. If the layer is gated, the distance
  is the distance before the first token times a product of gates. Above layers with finite memory, this holds from the
  first token whose receptive field is within the window.
- In a higher layer, the change of a LayerNorm's output is bounded by an angle, and the change of a product by the
  matrix's norms. A relu unit that stays inactive has no effect.
- No distance exceeds the largest distance between the window's state and a reachable state. If reachable states are
  unbounded (in some linear and relu layers), so is the distance. A LayerNorm above such a layer may still have a
  bounded output.

The bound holds between a run in exact arithmetic and the window's end as computed here, in float64. The radius includes
this computation's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import has_readout
from wane.models.certificate.cell_step import CellStep, Deviations, States
from wane.models.certificate.deviation import BEYOND, FAR, MARGIN, Deviation, Linear
from wane.models.certificate.feed_forward import Fed, FeedForward
from wane.models.certificate.interval_rounding import Matrix, Vector, norm_above, roundoff
from wane.models.certificate.layer_bound import Layer
from wane.models.certificate.layer_norm import Between, Normalised
from wane.models.certificate.layers import build_layers, furthest_stream
from wane.models.certificate.readout import readout_of, states_apart
from wane.models.layer_registry import LayerSpec
from wane.models.manifest import Readout
from wane.models.reference import Reference
from wane.models.weights import Affine, CellWeights, Weights

FINITE_ROUNDING = 2.0**-36
"""The assumed error of a float64 evaluation of layers with finite memory that are not front blocks, relative to the
greatest 2-norm of their output."""


@dataclass(frozen=True, slots=True)
class Step:
    """The values and bounds of one layer at a window's last token. In a plain network, a layer is only its cell.

    state: the cell's state after the token.
    error: the bound of the distance between `state` and the run's state.
    off: (B), the bound of the rounding error of the layer's output, in the 2-norm.
    mixed: (B), the bound of the rounding error of the sum after the mixing matrix, in the 2-norm.
    norm: the block's LayerNorm before the feed-forward part, None if there is none.
    fed: the output of the feed-forward part, None if there is none.
    """

    state: States
    error: Deviations
    off: Vector
    mixed: Vector
    norm: Normalised | None = None
    fed: Fed | None = None


@dataclass(frozen=True, slots=True)
class WindowBound:
    """The values at the ends of B windows, and the bounds of their distance from the run's values.

    hidden: (B, H), the output layer's input.
    radius: (B), the bound of the 2-norm distance between `hidden` and the run's. It is infinite if there is no bound.
    off: (B), the part of the radius that the rounding of `hidden` itself adds.
    stream: (B, H), the first layer's input.
    below: (B), the bound of the 2-norm distance between `stream` and the run's.
    steps: one entry for each layer.
    norm: the last LayerNorm.
    """

    hidden: Matrix
    radius: Vector
    off: Vector
    stream: Matrix
    below: Vector
    steps: list[Step]
    norm: Normalised | None


class Evaluated(NamedTuple):
    """The errors that one float32 evaluation adds at the sum after a mixing matrix, at the sum after a feed-forward
    part, and at `hidden`, in the 2-norm."""

    mixed: float
    fed: float
    top: float


class RequestBound:
    """Computes the `WindowBound` of one model's windows. The values that do not depend on the request are computed
    once."""

    def __init__(self, architecture: Architecture, weights: Weights, layers: list[Layer] | None = None) -> None:
        """layers: the layers of these weights, if the caller has already built them."""
        self._architecture = architecture
        layers = build_layers(architecture, weights) if layers is None else layers
        self.readout: Readout | None = None
        """The rounding of the answers of float32 runs, None if no theorem bounds it."""
        self.states_apart: Vector | None = None
        """The bounds of the states' difference that rounding causes in two float32 runs, None without a readout."""
        if has_readout(architecture) and layers[0].bound.factor < 1:
            self.readout, self.states_apart = readout_of(architecture, weights, layers), states_apart(layers[0])
        self._weights = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
        self._residual = architecture.residual
        self.largest_gain = float(np.abs(self._weights["norm.weight"]).max()) if self._residual else 1.0
        finite, fading = (architecture.placed(finite=each) for each in (True, False))
        self._front: list[FrontBlock] = []
        self._whole: Reference | None = None
        if all(placed.layer.block == "front" for placed in finite):
            self._front = [FrontBlock(architecture, self._of(f"{placed.name}.")) for placed in finite]
        else:
            self._whole = Reference(architecture, weights)
            longest = norm_above(furthest_stream(architecture, weights))
            self._anything, self._finite_rounding = 2 * longest, FINITE_ROUNDING * longest
        self.layers = [
            Block(architecture, placed.layer, self._of(f"{placed.name}."), layer.bound.reach)
            for placed, layer in zip(fading, layers, strict=True)
        ]
        if self.readout is not None and self.readout.slope is not None:
            self.layers[0].slope = self.readout.slope

    def __call__(self, windows: NDArray[np.int64]) -> WindowBound:
        """Returns the bounds of `windows`, token ids (B, k), k >= 1."""
        assert windows.ndim == 2 and windows.shape[1] >= 1, "windows have no tokens: this is a bug"
        batch = len(windows)
        seen = [block.nothing(batch) for block in self._front]
        whole = {} if self._whole is None else self._whole.zero_state(batch)
        before = [layer.start(batch) for layer in self.layers]
        x: Matrix
        for position, tokens in enumerate(windows.T):
            if self._whole is not None:
                x, whole = self._whole.stream(tokens, whole)
                reached = position >= self._architecture.reach
                ball = np.full(batch, self._finite_rounding if reached else self._anything)
            else:
                x = self._weights["embedding.weight"][tokens]
                ball = np.zeros(batch)
            for index, block in enumerate(self._front):
                x, ball, seen[index] = block(x, ball, seen[index])
            stream, below, steps = x, ball, []
            last = position == windows.shape[1] - 1
            for index, layer in enumerate(self.layers):
                before[index] = layer.step(x, ball, before[index])
                if last or index + 1 < len(self.layers):
                    x, ball, step = layer.above(x, ball, *before[index])
                    steps.append(step)
        return self._end(x, ball, stream, below, steps)

    def resume(
        self,
        stream: Matrix,
        lengths: NDArray[np.int64],
        states: list[Matrix],
        errors: list[Matrix],
        rounding: float = 0.0,
        evaluated: Evaluated | None = None,
    ) -> WindowBound:
        """Returns the bounds of windows from the outputs of a gated network's `window` graph. These outputs are values
        at each window's last token.

        stream: (B, H), the first layer's input.
        lengths: (B), the numbers of tokens of the windows.
        states: the output of each layer's cell, one array (B, units) for each layer.
        errors: the bounds of the distance between `states` and the run's, one array (B, units) for each layer.
        rounding: the 2-norm bound of the rounding of the stream, of each layer's state and of the errors. With it, the
            result holds for runs in exact arithmetic. If it is 0, the graph's values are assumed to be exact.
        evaluated: if given, the result holds for float32 runs that add these errors above the cells.

        `hidden` is computed from these arrays in float64, and may differ from the graph's.
        """
        reach = self._architecture.reach
        x, ball = stream, np.where(lengths > reach, rounding, FAR)
        below, steps = ball, []
        for layer, state, error in zip(self.layers, states, errors, strict=True):
            apart = Deviation.within(error + rounding, np.linalg.norm(error, axis=1) + rounding)
            x, ball, step = layer.above(x, ball, (state,), (apart,), evaluated)
            steps.append(step)
        return self._end(x, ball, stream, below, steps, 0.0 if evaluated is None else evaluated.top)

    def _end(
        self, x: Matrix, ball: Vector, stream: Matrix, below: Vector, steps: list[Step], top: float = 0.0
    ) -> WindowBound:
        if not self._residual:
            return WindowBound(x, _outward(ball), np.zeros(len(x)), stream, below, steps, None)
        norm = Normalised(x, self._architecture.norm_epsilon, ball)
        gain, shift = self._weights["norm.weight"], self._weights["norm.bias"]
        hidden = norm.value * gain + shift
        off = roundoff(1) * (np.linalg.norm(hidden, axis=1) + np.linalg.norm(shift)) + top
        return WindowBound(hidden, _outward(norm.ball * self.largest_gain + off), off, stream, below, steps, norm)

    def _of(self, prefix: str) -> dict[str, Matrix]:
        return {name.removeprefix(prefix): tensor for name, tensor in self._weights.items() if name.startswith(prefix)}


def _outward(ball: Vector) -> Vector:
    result: Vector = np.where(ball < BEYOND, ball * (1 + MARGIN), np.inf)
    return result


class Block:
    """One layer: its cell and, in a residual network, the rest of its block. weights: the layer's tensors, whose names
    lack the layer's prefix."""

    def __init__(
        self, architecture: Architecture, spec: LayerSpec, weights: dict[str, Matrix], reach: tuple[Vector, ...]
    ) -> None:
        self._residual = architecture.residual
        self._epsilon = architecture.norm_epsilon

        def read(affine: Affine, norm: str) -> list[Linear]:
            weight, bias = (np.split(tensor, spec.gates) for tensor in affine)
            parts = zip(weight, bias, strict=True)
            if not norm:
                return [Linear(matrix, part) for matrix, part in parts]
            gain, shift = weights[norm + ".weight"], weights[norm + ".bias"]
            return [Linear.behind_norm(matrix, part, gain, shift) for matrix, part in parts]

        norm = "norm" if self._residual else ""
        of_cell = "cell."
        tensors = {name.removeprefix(of_cell): each for name, each in weights.items() if name.startswith(of_cell)}
        cell = CellWeights(spec, tensors)
        inflow = read(cell.input, norm)
        recurrent = [] if spec.recurrent_tensors is None else read(cell.recurrent, "")
        self.cell = CellStep(spec, inflow, recurrent, reach, tensors)
        self.feed_forward: FeedForward | None = None
        self.slope = np.inf  # a Lipschitz constant of the feed-forward part, if a readout has one
        if self._residual:
            self.mix = Linear(weights["mix.weight"])
            if spec.feed_forward:
                self.feed_forward = _feed_forward(weights, "feed_forward_norm")
                self._between = Between(self.feed_forward.inner, self.mix)

    def start(self, batch: int) -> tuple[States, Deviations]:
        """Returns the zero state of `batch` windows, and the bound of its distance from the uninterrupted run's
        state."""
        reach = [np.tile(each, (batch, 1)) for each in self.cell.reach]
        return tuple(np.zeros_like(each) for each in reach), tuple(Deviation.within(each) for each in reach)

    def step(self, x: Matrix, ball: Vector, before: tuple[States, Deviations]) -> tuple[States, Deviations]:
        """Computes the cell's state after one token, and the bounds of its distance from the run's state. x: (B, H),
        the block's input. x changes by at most `ball` (B) in the 2-norm. before: the state and these bounds before the
        token."""
        if not self._residual:
            return self.cell(x, Deviation.ball_only(ball, x.shape[1]), *before)
        norm = Normalised(x, self._epsilon, ball)
        return self.cell(norm.value, Deviation.ball_only(norm.ball, x.shape[1]), *before)

    def above(
        self, x: Matrix, ball: Vector, state: States, error: Deviations, evaluated: Evaluated | None = None
    ) -> tuple[Matrix, Vector, Step]:
        """Computes the block's output, and the bound of the output's change. x: (B, H), the block's input. x changes by
        at most `ball` (B) in the 2-norm. state, error: the cell's state after the token, and the bounds of its distance
        from the run's state. evaluated: see `RequestBound.resume`."""
        if not self._residual:
            return state[0], error[0].ball, Step(state, error, np.zeros(len(x)), np.zeros(len(x)))
        rest, box = ball, error[0].box
        ball = ball + np.minimum(error[0].ball * self.mix.norm, self.mix.furthest(box))
        off = np.linalg.norm(self.mix.rounding(state[0]), axis=1)
        x = x + self.mix(state[0])
        off = off + roundoff(1) * np.linalg.norm(x, axis=1) + (0.0 if evaluated is None else evaluated.mixed)
        if self.feed_forward is None:
            return x, ball + off, Step(state, error, off, off)
        mixed = off
        norm = Normalised(x, self._epsilon, ball + off)
        out = self.feed_forward(norm.value, norm.ball, partial(norm.seen_by, self._between, box, rest + off))
        x = x + out.value
        off = off + roundoff(1) * np.linalg.norm(x, axis=1) + (0.0 if evaluated is None else evaluated.fed)
        return x, ball + np.minimum(out.ball, norm.ball * self.slope) + off, Step(state, error, off, mixed, norm, out)


Seen = tuple[Matrix, Matrix]
"""The last inputs of a convolution, (B, K - 1, H), oldest first, and the bound of each input's change in the 2-norm,
(B, K - 1)."""


class FrontBlock:
    """A convolution block. Before the window's first token, the inputs of the run's convolution can be any outputs of a
    LayerNorm."""

    def __init__(self, architecture: Architecture, weights: dict[str, Matrix]) -> None:
        self._epsilon = architecture.norm_epsilon
        self._gain, self._shift = weights["norm.weight"], weights["norm.bias"]
        self._taps = weights["convolution.weight"]
        self._largest = np.abs(self._taps).max(axis=1)
        self._feed_forward = _feed_forward(weights, "")
        self._anything = np.sqrt(architecture.hidden) * np.abs(self._gain).max() + np.linalg.norm(self._shift)

    def nothing(self, batch: int) -> Seen:
        """Returns zeros for the window's inputs before its first token, with the bounds of their distances from the
        run's inputs."""
        earlier, hidden = len(self._taps) - 1, self._taps.shape[1]
        return np.zeros((batch, earlier, hidden)), np.full((batch, earlier), self._anything)

    def __call__(self, x: Matrix, ball: Vector, seen: Seen) -> tuple[Matrix, Vector, Seen]:
        """Computes the block's output for one token, the bound of the output's change, and the convolution's inputs for
        the next token (`Seen`). x: (B, H). x changes by at most `ball` (B) in the 2-norm."""
        norm = Normalised(x, self._epsilon, ball)
        read = norm.value * self._gain + self._shift
        moved = norm.ball * np.abs(self._gain).max()
        moved = moved + roundoff(1) * (np.linalg.norm(read, axis=1) + np.linalg.norm(self._shift))
        inputs = np.concatenate([seen[0], read[:, None]], axis=1)
        balls = np.concatenate([seen[1], moved[:, None]], axis=1)
        y = (inputs * self._taps).sum(axis=1)
        lengths = np.linalg.norm(inputs, axis=2)
        out = self._feed_forward(y, (balls + roundoff(len(self._taps)) * lengths) @ self._largest)
        x = x + out.value
        off = roundoff(1) * np.linalg.norm(x, axis=1)
        return x, ball + out.ball + off, (inputs[:, 1:], balls[:, 1:])


def _feed_forward(weights: dict[str, Matrix], norm: str) -> FeedForward:
    inner, bias = weights["feed_forward_in.weight"], weights["feed_forward_in.bias"]
    outer = Linear(weights["feed_forward_out.weight"], weights["feed_forward_out.bias"])
    if not norm:
        return FeedForward(Linear(inner, bias), outer)
    gain, shift = weights[norm + ".weight"], weights[norm + ".bias"]
    return FeedForward(Linear.behind_norm(inner, bias, gain, shift), outer)
