"""The bound of the distance between a window's `hidden` and the uninterrupted run's, k tokens after the window's start.

At the window's start, which is called the cut, the window's state is zero, and the run's state is any state that can be
reached from zero. From the cut on, the window and the run read the same k tokens. The bound proceeds layer by layer and
token by token. A layer's error after a token is bounded by its error before the token and by the distance of its
inputs, which the layers below determine. Errors never exceed the largest distance of two reachable states.

The cut affects layers with finite memory only within their reach. If there are no other layers, nothing is left beyond
it. For the tokens within the receptive field, the
first layer's input after its LayerNorm may be any output of a LayerNorm. For later tokens, this input is equal in the
window and in the run. Between the layers, the effect of a matrix is bounded by the norms of its rows and by its
spectral norm, and the slope of relu by 1. `layer_norm.py` bounds the effect of a LayerNorm. Differences are considered
without their mean, which LayerNorms ignore.

**The tail of the curve.** All errors of one token are the same monotone function F of the errors of the previous token.
(The first gated layer's error is also bounded by an exact maximum that depends on the number of tokens. This maximum
never increases, so it cannot make errors grow.) As soon as no error of any layer is larger than one token earlier, no
error grows again: x_(j+1) <= x_j implies F(x_(j+1)) <= F(x_j). The curve is computed up to this token. The largest
value of the curve from k on is e_k. It therefore bounds the distance for every window of at least k tokens. If errors
still grow `MAX_TOKENS` tokens after the largest window, every e_k is the largest possible distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wane.models.architecture import Architecture
from wane.models.certificate.admissible import Normalised
from wane.models.certificate.interval_rounding import UP, Matrix, Vector, norm_above, roundoff
from wane.models.certificate.layer_bound import Errors, Layer
from wane.models.certificate.layer_norm import normalised_apart, normalised_furthest
from wane.models.certificate.layers import furthest_stream
from wane.models.certificate.perturbation import LinearMap, Perturbation
from wane.models.weights import Weights

MAX_TOKENS = 1024
"""The computation of a curve ends this number of tokens after the largest window, even if errors still grow."""

NEGLIGIBLE = 1e-30
"""The computation of a curve stops at the first value of at most this size. All later values of the curve are equal to
it."""


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """The rounding errors that a block adds at each step.

    mixed: the error of x + mix(y), where x is the block's input and y the cell's output.
    normalised: the 2-norm error of the feed-forward part's normalised vector.
    wide: the errors of the feed-forward part's inner units.
    narrow: the error that the feed-forward part's last matrix and the addition cause in the block's output.
    """

    mixed: Perturbation
    normalised: float
    wide: Vector
    narrow: Perturbation


@dataclass(frozen=True, slots=True)
class Noise:
    """The rounding that one step adds in each layer, bottom to top (`models/certificate/rounding.py`).

    states: the rounding of each layer's state. normalised: the 2-norm rounding of each layer's normalised input.
    blocks: the rounding of each layer's block. top: the 2-norm rounding of the last LayerNorm's normalised vector,
    before gain and shift. hidden: the 2-norm rounding that the last LayerNorm's gain and shift add.
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
        self.residual = architecture.residual
        self.reach = architecture.reach
        self.below = (
            furthest_stream(architecture, weights) if architecture.finite and not self.residual else np.zeros(0)
        )
        if self.residual:
            least = 0.0 if self.reach else _least_length(weights["embedding.weight"].astype(np.float64))
            self.blocks = []
            for index, layer in enumerate(layers):
                self.blocks.append(_Block(architecture, weights, index, layer.bound.reach[0], least))
                least = self.blocks[-1].least
            self.gain = np.abs(weights["norm.weight"].astype(np.float64))

    def start(self) -> list[Errors]:
        """Returns the errors at the cut: the distances between the zero state and any reachable state."""
        return [layer.start() for layer in self.layers]

    def at_rest(self) -> list[Errors]:
        """Returns errors of zero."""
        return [
            layer.at_least(tuple(Perturbation.within(np.zeros(len(reach))) for reach in layer.bound.reach))
            for layer in self.layers
        ]

    def step(self, errors: list[Errors], noise: Noise | None = None) -> tuple[list[Errors], float]:
        """Returns the errors one token later, with the rounding `noise` added, and the 2-norm bound of the distance of
        `hidden`."""
        if errors[0].steps < self.reach:
            after = [
                layer.step(before, anything)
                for layer, before, anything in zip(self.layers, errors, self._anything(), strict=True)
            ]
            return after, self.furthest()
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
        assert apart is not None, "the network has no layer: this is a bug"
        if not self.residual:
            return after, apart.ball
        top = self._normalised(apart, len(self.layers)) + (noise.top if noise else 0.0)
        return after, (float(self.gain.max()) * top + (noise.hidden if noise else 0.0)) * UP

    def _anything(self) -> list[Perturbation]:
        """Returns the greatest distances of each layer's inputs."""
        if self.residual:
            hidden = self.architecture.hidden
            return [Perturbation.of_ball(normalised_furthest(hidden), hidden)] * len(self.layers)
        inputs = [self.below, *(layer.bound.reach[0] for layer in self.layers)]
        return [Perturbation.within(2 * each) for each in inputs[:-1]]

    def hidden_apart(self, errors: list[Errors]) -> float:
        """Returns the 2-norm bound of the distance of `hidden` after a token, from the states' errors after the same
        token."""
        if not self.residual:
            return errors[-1].perturbations[0].ball
        stream: Perturbation | None = None
        for block, each in zip(self.blocks, errors, strict=True):
            stream = block(stream, each.perturbations[0], None)
        assert stream is not None, "the network has no layer: this is a bug"
        return float(self.gain.max()) * self._normalised(stream, len(self.layers)) * UP

    def furthest(self) -> float:
        """Returns the largest possible 2-norm distance of `hidden`."""
        if self.residual:
            return normalised_furthest(self.architecture.hidden) * float(self.gain.max()) * UP
        return 2 * norm_above(self.layers[-1].bound.reach[0] if self.layers else self.below)

    def _normalised(self, apart: Perturbation, above: int) -> float:
        """Returns the 2-norm bound of the distance of normalised vectors, for the LayerNorm above the first `above`
        layers. `apart` bounds the distance of its inputs."""
        least = self.blocks[above - 1].least
        return normalised_apart(apart.ball, self.architecture.hidden, self.architecture.norm_epsilon, least)


class _Block:
    """Bounds the difference of a block's outputs by the differences of its input x and of its cell's output y. The
    block is `x + mix(y)`, then `x + feed_forward(LayerNorm(x))`. x is considered without its mean.

    least: the least 2-norm of the block's output without its mean, over all inputs. It is the least 2-norm of x minus
    the greatest 2-norm of what the block adds, or 0 if that is negative.
    """

    def __init__(self, architecture: Architecture, weights: Weights, layer: int, reach: Vector, least: float) -> None:
        def tensor(name: str) -> Matrix:
            return weights[f"layers.{layer}.{name}"].astype(np.float64)

        self.hidden, self.epsilon = architecture.hidden, architecture.norm_epsilon
        self.mix = _centred(tensor("mix.weight"))
        self.between = self.least = max(0.0, least - self.mix(Perturbation.within(reach)).ball * UP)
        self.wide = None
        if architecture.fading[layer].feed_forward:
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
    """Returns the least 2-norm of all rows after each row's mean has been subtracted, rounded down."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    off = roundoff(rows.shape[1]) * float(np.abs(rows).max()) * float(np.sqrt(rows.shape[1]))
    return max(0.0, float(np.linalg.norm(centred, axis=1).min()) / UP - 2 * off)


def _centred(matrix: Matrix) -> LinearMap:
    """Returns the linear map of the matrix followed by the subtraction of the result's mean."""
    centred = matrix - matrix.mean(axis=0)
    return LinearMap(centred, np.full(len(matrix), 1e-15 * norm_above(matrix.ravel())))


def state_error_curve(stack: Stack, max_window: int) -> Vector:
    """Returns the curve e_k for k = 1 to max_window, (max_window). It never increases and is rounded up."""
    if not stack.layers:
        return np.where(np.arange(1, max_window + 1) <= stack.reach, stack.furthest(), 0.0)
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
