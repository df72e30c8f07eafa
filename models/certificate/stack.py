"""The k-step bound of all layers: the distance of `hidden`, k tokens after the zero state, from the uninterrupted
run's.

Just before the last k tokens, one trajectory is in the zero state and the other in any state reachable from it. From
there both read the same tokens. The bound proceeds layer by layer and token by token. A layer's error after a token is
bounded by its error before the token and by the distance of its inputs, which the layers below determine. Errors never
exceed the reach.

A cut affects the convolution blocks only within their receptive field. Until then their output may be any output of a
LayerNorm. Afterwards it is equal in both trajectories. Between the layers, matrices are bounded by their rows and their
spectral norm, relu by 1, and LayerNorm by `layer_norm.py`. The mean, which LayerNorms ignore, is projected away.

**The tail of the curve.** All errors of one token are the same monotone function F of the errors of the previous token.
(The first gated layer's exact maximum only falls, and the errors are intersected with it.) As soon as no error of any
layer is larger than one token earlier, no error grows again: x_(j+1) <= x_j implies F(x_(j+1)) <= F(x_j). The curve is
computed up to this token. It then holds for every longer window, and e_k is the largest value from k on. If errors
still grow after `MAX_TOKENS` tokens, the rest of the curve is the largest possible distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wane.models.certificate.admissible import Normalised
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, norm_above, roundoff
from wane.models.certificate.layer_bound import Errors, Layer
from wane.models.certificate.layer_norm import normalised_apart, normalised_furthest
from wane.models.certificate.perturbation import LinearMap, Perturbation
from wane.models.manifest import Architecture
from wane.models.weights import Weights

MAX_TOKENS = 1024
"""The largest number of tokens, in addition to the largest window, after which a curve must no longer grow."""

NEGLIGIBLE = 1e-30
"""The smallest value of a curve. The curve's computation stops there."""


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """The rounding that a block adds at each step: to the stream, to n, to the wide layer, and again to the stream."""

    mixed: Perturbation
    normalised: float
    wide: Vector
    narrow: Perturbation


@dataclass(frozen=True, slots=True)
class Noise:
    """The rounding added at each step, bottom to top (`models/certificate/rounding.py`).

    states: the rounding of each layer's state. normalised: the 2-norm rounding of each layer's input after its
    LayerNorm. top, hidden: the rounding of the last LayerNorm's n and of its output.
    """

    states: list[tuple[Perturbation, ...]]
    normalised: list[float]
    blocks: list[BlockNoise]
    top: float
    hidden: float


class Stack:
    """The layers of a model with the blocks between them."""

    def __init__(self, architecture: Architecture, weights: Weights, layers: list[Layer]) -> None:
        self.layers = layers
        self.architecture = architecture
        self.residual = architecture.block == "residual"
        self.reach = 0
        if self.residual:
            self.reach = architecture.front.reach if architecture.front else 0
            least = 0.0 if self.reach else _least_length(weights["embedding.weight"].astype(np.float64))
            self.blocks = []
            for index, layer in enumerate(layers):
                self.blocks.append(_Block(architecture, weights, index, layer.bound.reach[0], least))
                least = self.blocks[-1].least
            self.gain = np.abs(weights["norm.weight"].astype(np.float64))

    def start(self) -> list[Errors]:
        """Returns the errors right after the cut."""
        return [layer.start() for layer in self.layers]

    def at_rest(self) -> list[Errors]:
        """Returns errors of zero."""
        return [
            layer.at_least(tuple(Perturbation.within(np.zeros(len(reach))) for reach in layer.bound.reach))
            for layer in self.layers
        ]

    def step(self, errors: list[Errors], noise: Noise | None = None) -> tuple[list[Errors], float]:
        """Returns the errors one token later, with `noise` added, and the distance of `hidden`, in the 2-norm."""
        if errors[0].steps < self.reach:
            anything = Perturbation.of_ball(normalised_furthest(self.architecture.hidden), self.architecture.hidden)
            return [
                layer.step(before, anything) for layer, before in zip(self.layers, errors, strict=True)
            ], self.furthest()
        apart: Perturbation | None = None
        stream: Perturbation | None = None
        after = []
        for index, (layer, before) in enumerate(zip(self.layers, errors, strict=True)):
            fed = apart
            if self.residual and apart is not None:
                off = noise.normalised[index] if noise else 0.0
                fed = Perturbation.of_ball(self._normalised(apart, index) + off, self.architecture.hidden)
            moved = layer.step(before, fed)
            if noise:
                moved = moved + layer.at_least(noise.states[index])
            after.append(moved)
            apart = moved.perturbations[0]
            if self.residual:
                apart = self.blocks[index](stream, apart, noise.blocks[index] if noise else None)
                stream = apart
        assert apart is not None, "this is a bug: there is a layer"
        if not self.residual:
            return after, apart.ball
        top = self._normalised(apart, len(self.layers)) + (noise.top if noise else 0.0)
        return after, (float(self.gain.max()) * top + (noise.hidden if noise else 0.0)) * UP

    def hidden_apart(self, errors: list[Errors]) -> float:
        """Returns the distance of `hidden`, in the 2-norm, right after a token that left these errors of the states."""
        if not self.residual:
            return errors[-1].perturbations[0].ball
        stream: Perturbation | None = None
        for block, each in zip(self.blocks, errors, strict=True):
            stream = block(stream, each.perturbations[0], None)
        assert stream is not None, "this is a bug: there is a layer"
        return float(self.gain.max()) * self._normalised(stream, len(self.layers)) * UP

    def furthest(self) -> float:
        """Returns the largest possible distance of `hidden`."""
        if self.residual:
            return normalised_furthest(self.architecture.hidden) * float(self.gain.max()) * UP
        return 2 * norm_above(self.layers[-1].bound.reach[0])

    def _normalised(self, apart: Perturbation, above: int) -> float:
        """Returns the distance after the LayerNorm that reads the output of the first `above` layers."""
        least = self.blocks[above - 1].least
        return normalised_apart(apart.ball, self.architecture.hidden, self.architecture.norm_epsilon, least)


class _Block:
    """Maps differences through `x + mix(y)`, then `x + feed_forward(LayerNorm(x))`, for x without its mean.

    least: the least length of x without its mean, over all inputs, after the block. It is the length before the block
    minus the largest addition of the block, and often 0.
    """

    def __init__(self, architecture: Architecture, weights: Weights, layer: int, reach: Vector, least: float) -> None:
        def tensor(name: str) -> Matrix:
            return weights[f"layers.{layer}.{name}"].astype(np.float64)

        self.hidden, self.epsilon = architecture.hidden, architecture.norm_epsilon
        self.mix = _centred(tensor("mix.weight"))
        self.between = self.least = max(0.0, least - self.mix(Perturbation.within(reach)).ball * UP)
        self.wide = None
        if architecture.feed_forward:
            normalised = Normalised(tensor("feed_forward_norm.weight"), tensor("feed_forward_norm.bias"))
            self.wide = normalised.seen_by(tensor("feed_forward_in.weight"))
            self.narrow = _centred(tensor("feed_forward_out.weight"))
            widest = normalised.reach(tensor("feed_forward_in.weight"), tensor("feed_forward_in.bias")).high
            longest = self.narrow(Perturbation.within(np.maximum(widest, 0))).ball
            bias = norm_above(tensor("feed_forward_out.bias"))
            self.least = max(0.0, self.between - (longest + bias) * UP)

    def __call__(self, apart: Perturbation | None, moved: Perturbation, noise: BlockNoise | None) -> Perturbation:
        mixed = self.mix(moved)
        apart = mixed if apart is None else apart + mixed
        if noise:
            apart = apart + noise.mixed
        if self.wide is None:
            return apart
        normalised = normalised_apart(apart.ball, self.hidden, self.epsilon, self.between)
        wide = self.wide(Perturbation.of_ball(normalised + (noise.normalised if noise else 0.0), self.hidden))
        if noise:
            wide = wide + Perturbation.within(noise.wide)
        apart = apart + self.narrow(wide)
        return apart + noise.narrow if noise else apart


def _least_length(rows: Matrix) -> float:
    """Returns the least 2-norm of a row without its mean, rounded down."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    off = roundoff(rows.shape[1]) * float(np.abs(rows).max()) * float(np.sqrt(rows.shape[1]))
    return max(0.0, float(np.linalg.norm(centred, axis=1).min()) / UP - 2 * off)


def _centred(matrix: Matrix) -> LinearMap:
    """Returns the matrix without the mean of its outputs."""
    centred = matrix - matrix.mean(axis=0)
    return LinearMap(centred, np.full(len(matrix), 1e-15 * norm_above(matrix.ravel())))


def state_error_curve(stack: Stack, max_window: int) -> Vector:
    """Returns e_k for k = 1 to max_window, (max_window): non-increasing, rounded outward."""
    errors, curve = stack.start(), []
    before = np.concatenate([each.flat() for each in errors])
    while True:
        errors, apart = stack.step(errors)
        curve.append(apart)
        now = np.concatenate([each.flat() for each in errors])
        falls = len(curve) > stack.reach and bool(np.all(now <= before))
        if falls and (len(curve) >= max_window or apart <= NEGLIGIBLE or np.array_equal(now, before)):
            break
        if len(curve) >= max_window + MAX_TOKENS:
            curve.append(stack.furthest())
            break
        before = now
    whole = np.maximum.accumulate(np.array(curve)[::-1])[::-1]
    missing = max(0, max_window - len(whole))
    result: Vector = np.append(whole, np.full(missing, whole[-1]))[:max_window]
    return result
