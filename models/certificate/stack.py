"""The k-step bound of a whole stack: how far `hidden` is, after k tokens from the zero state, from the full run's.

Just before the last k tokens one trajectory is in the zero state, the other anywhere that is reached from it. From
there both read the same tokens. Layer by layer and token by token, a layer's error after a token is bounded from its
error before it and from how far its inputs are apart, which the layers below say; errors never exceed what is reached.
A front's convolutions see a cut for as long as they reach back; until then what they feed is anything a LayerNorm can
put out, and then it is the same. Between the layers: matrices by their rows and their spectral norm, relu by 1,
LayerNorm by `layer_norm.py`, and the mean, which no LayerNorm sees, projected away.

**The tail.** All errors of one token are a monotone function F of those of the token before, always the same one (the
first gated layer's exact maximum only ever falls, and is cut in). Hence, once no error of the whole stack is larger
than a token before, none ever grows again: x_(j+1) <= x_j gives F(x_(j+1)) <= F(x_j). The curve is run on until that
is so; it then holds for every longer window, and e_k is the largest value from k on. If it is not so within
`MAX_TOKENS` tokens, what is left of the curve is what can be reached at all.
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
"""Tokens beyond the largest window that a curve may take to start to fall for good."""

NEGLIGIBLE = 1e-30
"""A curve that has fallen this far is not followed further: no bound below it is stated."""


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """What a block adds by rounding at each step: to the stream, to n, to the wide layer, to the stream again."""

    mixed: Perturbation
    normalised: float
    wide: Vector
    narrow: Perturbation


@dataclass(frozen=True, slots=True)
class Noise:
    """What rounding adds at each step, from the bottom up (`models/certificate/rounding.py`).

    states: of each layer; normalised: to what each layer is fed behind its LayerNorm, 2-norm; top, hidden: to the last
    LayerNorm's n, and to what it puts out.
    """

    states: list[tuple[Perturbation, ...]]
    normalised: list[float]
    blocks: list[BlockNoise]
    top: float
    hidden: float


class Stack:
    """The layers of a model with what stands between them."""

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
        """Right after the cut."""
        return [layer.start() for layer in self.layers]

    def at_rest(self) -> list[Errors]:
        """Nothing is apart."""
        return [
            layer.at_least(tuple(Perturbation.within(np.zeros(len(reach))) for reach in layer.bound.reach))
            for layer in self.layers
        ]

    def step(self, errors: list[Errors], noise: Noise | None = None) -> tuple[list[Errors], float]:
        """One token later; and how far `hidden` is then apart, in the 2-norm. `noise` is added on the way."""
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
        """How far `hidden` is apart, in the 2-norm, right after a token that left the layers' states so far apart."""
        if not self.residual:
            return errors[-1].perturbations[0].ball
        stream: Perturbation | None = None
        for block, each in zip(self.blocks, errors, strict=True):
            stream = block(stream, each.perturbations[0], None)
        assert stream is not None, "this is a bug: there is a layer"
        return float(self.gain.max()) * self._normalised(stream, len(self.layers)) * UP

    def furthest(self) -> float:
        """What `hidden` can be apart at all."""
        if self.residual:
            return normalised_furthest(self.architecture.hidden) * float(self.gain.max()) * UP
        return 2 * norm_above(self.layers[-1].bound.reach[0])

    def _normalised(self, apart: Perturbation, above: int) -> float:
        """Behind the LayerNorm over the output of the first `above` layers."""
        least = self.blocks[above - 1].least
        return normalised_apart(apart.ball, self.architecture.hidden, self.architecture.norm_epsilon, least)


class _Block:
    """`x + mix(y)`, then `x + feed_forward(LayerNorm(x))`, of differences; x without its mean.

    least: the least length of x without its mean, over all inputs, behind the block; what the block adds to x, at its
    longest, is taken from what it was before. Often nothing is left.
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
    """The least 2-norm of a row without its mean, from below."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    off = roundoff(rows.shape[1]) * float(np.abs(rows).max()) * float(np.sqrt(rows.shape[1]))
    return max(0.0, float(np.linalg.norm(centred, axis=1).min()) / UP - 2 * off)


def _centred(matrix: Matrix) -> LinearMap:
    """The matrix without the mean of what it puts out."""
    centred = matrix - matrix.mean(axis=0)
    return LinearMap(centred, np.full(len(matrix), 1e-15 * norm_above(matrix.ravel())))


def state_error_curve(stack: Stack, max_window: int) -> Vector:
    """e_k for k = 1 to max_window, (max_window): non-increasing, rounded outward."""
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
