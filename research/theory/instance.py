"""Random tanh-RNNs, and the constants of the theorems for them.

    h_t = tanh(W h_(t-1) + U x_t),   h_0 = 0,   f(h) = C h,   p_T = |C h_T - y|^2 / 2

W, U, C, x and y are Gaussian. W is scaled to a spectral norm of lambda, U and C to 1, and the mean squared norm of an
x_t and of a y is 1. Two other kinds of instances show how much of a bound's slack is due to the instance:

- `orthogonal`: W is lambda times an orthogonal matrix (the Q factor of a Gaussian one), which shrinks all directions as
  slowly as lambda allows. A Gaussian W shrinks most directions faster.
- `aligned`: W is lambda times the identity, y = 0, and all inputs are one small vector, which U maps to the direction
  that C reads. tanh is then almost linear and nothing cancels, so Lemma 1's bound is almost attained.

The weights are one matrix w = [W U]. Omega is the set of all w with |W|_2 <= lambda and |U|_2 <= 1. Distances of
weights and norms of gradients are Frobenius norms, all other norms are 2-norms. A truncated RNN starts from the zero
state and reads the last k tokens. Its parts have the superscript k.

All arrays are float64. Several instances and several models are computed at once: `weights` (seeds, models, units,
units + inputs), states (seeds, models, sequences, units).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

UNITS, INPUTS, OUTPUTS, SEQUENCES, TOKENS = 8, 4, 4, 4, 120
INWARD = 1.0
"""The largest spectral norm of U in Omega."""

BEND = 4 / (3 * math.sqrt(3))
"""The largest second derivative of tanh, by which its slope is Lipschitz."""

SMALL = 0.02
"""The norm of the inputs of an `aligned` instance."""

Kind = Literal["gaussian", "orthogonal", "aligned"]
KINDS: tuple[Kind, ...] = ("gaussian", "orthogonal", "aligned")


@dataclass(frozen=True)
class Instance:
    """The same random problem for each of several seeds.

    factor: lambda. weights: (seeds, 1, units, units + inputs). outward: C, (seeds, outputs, units). inputs: x, (seeds,
    sequences, tokens, inputs). targets: y, (seeds, sequences, outputs).
    """

    factor: float
    weights: Tensor
    outward: Tensor
    inputs: Tensor
    targets: Tensor

    @classmethod
    def random(cls, kind: Kind, factor: float, seeds: Sequence[int], tokens: int = TOKENS) -> Instance:
        """Draws an instance for each of `seeds`. Raises ValueError if there is no seed."""
        if not seeds:
            raise ValueError("at least one seed is needed")
        drawn = [cls._draw(kind, factor, torch.Generator().manual_seed(seed), tokens) for seed in seeds]
        return cls(factor, *(torch.stack(parts) for parts in zip(*drawn, strict=True)))

    @staticmethod
    def _draw(kind: Kind, factor: float, generator: torch.Generator, tokens: int) -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def scaled(matrix: Tensor) -> Tensor:
            result: Tensor = matrix / torch.linalg.matrix_norm(matrix, 2)
            return result

        square, inward, outward = normal(UNITS, UNITS), normal(UNITS, INPUTS), normal(OUTPUTS, UNITS)
        inputs = normal(SEQUENCES, tokens, INPUTS) / math.sqrt(INPUTS)
        targets = normal(SEQUENCES, OUTPUTS) / math.sqrt(OUTPUTS)
        recurrent = torch.linalg.qr(square).Q if kind == "orthogonal" else scaled(square)
        if kind == "aligned":
            recurrent, targets = torch.eye(UNITS, dtype=torch.float64), torch.zeros_like(targets)
            left, _, right = torch.linalg.svd(inward)
            inputs = (SMALL * right[0]).expand_as(inputs)
            outward = outward[:, :1] * left[:, 0]
        return (
            torch.cat([factor * recurrent, INWARD * scaled(inward)], dim=-1)[None],
            scaled(outward),
            inputs,
            targets,
        )

    @property
    def tokens(self) -> int:
        """The length of the sequences: a window of this length is the recurrent model."""
        return self.inputs.shape[2]

    def states(self, weights: Tensor, windows: Sequence[int]) -> Tensor:
        """Returns h_T of each model, (seeds, models, sequences, units). Model i reads the last `windows[i]` tokens from
        the zero state."""
        last = torch.tensor(list(windows))
        driven = torch.einsum("smui,sqti->tsmqu", weights[..., UNITS:], self.inputs)
        recurrent = weights[..., :UNITS].transpose(-1, -2)
        h = torch.zeros_like(driven[0])
        for t in range(self.tokens - max(windows), self.tokens):
            h = torch.tanh(h @ recurrent + driven[t])
            if t < self.tokens - min(windows):  # models whose windows have not begun keep the zero state
                h = h * (t >= self.tokens - last).to(h.dtype)[:, None, None]
        return h

    def outputs(self, weights: Tensor, windows: Sequence[int]) -> Tensor:
        """Returns y_T of each model, (seeds, models, sequences, outputs)."""
        return self.states(weights, windows) @ self.outward[:, None].transpose(-1, -2)

    def gradients(self, weights: Tensor, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the gradient of each model's loss, with the shape of `weights`, and the loss, (seeds, models). The
        loss is the mean of p_T over the sequences."""
        weights = weights.detach().requires_grad_()
        error = self.outputs(weights, windows) - self.targets[:, None]
        loss = error.square().sum(-1).mean(-1) / 2
        (gradient,) = torch.autograd.grad(loss.sum(), weights)
        return gradient, loss.detach()

    def project(self, weights: Tensor) -> Tensor:
        """Returns the nearest weights in Omega: all larger singular values of W and of U become the largest allowed."""
        parts = ((weights[..., :UNITS], self.factor), (weights[..., UNITS:], INWARD))
        return torch.cat([limited(matrix, largest) for matrix, largest in parts], dim=-1)

    def inside(self, room: float) -> Tensor:
        """Returns the instance's weights, scaled so that all weights within a distance of `room` are in Omega."""
        recurrent, inward = self.weights[..., :UNITS], self.weights[..., UNITS:]
        return torch.cat([recurrent * (1 - room / self.factor), inward * (1 - room / INWARD)], dim=-1)


def limited(matrix: Tensor, largest: float) -> Tensor:
    """Returns the matrix nearest to `matrix` whose spectral norm is at most `largest`."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result: Tensor = left @ (values.clamp(max=largest)[..., None] * right)
    return result


def size(weights: Tensor) -> Tensor:
    """Returns the Frobenius norm of each model's weights or gradient, (seeds, models)."""
    return weights.square().sum((-1, -2)).sqrt()


@dataclass(frozen=True)
class Constants:
    """The constants of the theorems. They hold for all weights in Omega. Tensors have one element per seed.

    factor: lambda. states: B_h, the bound of a state: the smaller of sqrt(units) and L_x B_x / (1 - lambda). inputs:
    B_x, the largest norm of an input. L_x, the Lipschitz constant in x, is INWARD. weights: L_w = sqrt(B_h^2 + B_x^2),
    the Lipschitz constant in w: the largest norm of [h x]. outward: L_f, the spectral norm of C. loss: L_p, the largest
    gradient of p in h. curvature: the Lipschitz constant of this gradient, L_f^2.
    """

    factor: float
    states: Tensor
    inputs: Tensor
    weights: Tensor
    outward: Tensor
    loss: Tensor
    curvature: Tensor

    @classmethod
    def of(cls, instance: Instance) -> Constants:
        """Computes the constants of an instance."""
        inputs = instance.inputs.norm(dim=-1).amax((1, 2))
        states = (INWARD * inputs / (1 - instance.factor)).clamp(max=math.sqrt(UNITS))
        outward = torch.linalg.matrix_norm(instance.outward, 2)
        loss = outward * (outward * states + instance.targets.norm(dim=-1).amax(1))
        weights = (states.square() + inputs.square()).sqrt()
        return cls(instance.factor, states, inputs, weights, outward, loss, outward.square())

    def output_gap(self, k: Tensor) -> Tensor:
        """Lemma 1: bounds |y_T - y_T^k|, (seeds, windows).

        Each token multiplies the distance of two states by at most lambda. k tokens ago the states were h_(T-k) and 0,
        so |h_T - h_T^k| <= lambda^k B_h.
        """
        return (self.outward * self.states)[:, None] * self.factor**k

    def enough(self, epsilon: float) -> Tensor:
        """Lemma 1 for the output: the smallest k >= log(L_f L_x B_x / ((1 - lambda) epsilon)) / log(1 / lambda) that is
        at least 1."""
        start = self.outward * INWARD * self.inputs / ((1 - self.factor) * epsilon)
        return (start.log() / -math.log(self.factor)).ceil().clamp(min=1)

    @property
    def gamma(self) -> Tensor:
        """Lemma 2: |grad p_T - grad p_T^k| <= gamma k lambda^k for k >= 1.

        Let G_t = dh_t / dw, J_t = diag(tanh') W, and F_t the part of G_t from the last token alone. Then G_t = J_t
        G_(t-1) + F_t, |F_t| <= L_w, so |G_t| <= L_w / (1 - lambda). Both J and F change by at most a constant times the
        distance e of the states before: |J - J^k| <= BEND lambda^2 e and |F - F^k| <= (BEND lambda L_w + 1) e. After j
        tokens of the window e <= lambda^j B_h. Hence |G_T - G_T^k| <= lambda^k L_w / (1 - lambda) + k lambda^(k-1) B_h
        (BEND lambda^2 L_w / (1 - lambda) + BEND lambda L_w + 1). The gradient is G_T times the gradient of p in h.
        """
        far = self.weights / (1 - self.factor)
        bends = BEND * self.factor**2 * far + BEND * self.factor * self.weights + 1
        return self.loss * (far + self.states * bends / self.factor) + far * self.curvature * self.states

    def gradient_gap(self, k: Tensor) -> Tensor:
        """Lemma 2's bound gamma k lambda^k, (seeds, windows)."""
        return self.gamma[:, None] * k * self.factor**k

    @property
    def beta(self) -> Tensor:
        """Lemma 3: |grad p_T(w) - grad p_T(w')| <= beta |w - w'| for w and w' in Omega.

        The states of w and w' differ by at most d = L_w |w - w'| / (1 - lambda), and so do the pre-activations. Hence J
        changes by at most BEND lambda d + |w - w'|, F by at most BEND L_w d + d, and G by at most 1 / (1 - lambda)
        times (the change of J times L_w / (1 - lambda), plus the change of F).
        """
        far = self.weights / (1 - self.factor)
        second = (BEND * far.square() + 2 * far) / (1 - self.factor)
        return self.loss * second + self.curvature * far.square()
