"""Keeping a network contractive while it trains.

`project(network, contraction)` puts the weights back, after an optimiser step, where a bound on every layer's factor
holds; weights within that bound are not touched, and nothing is ever inflated. For LSTM and GRU the bound is looser
than the certificate of `models/certificate.py`, to be cheap: it takes every sigmoid's slope as 1/4 and tanh's as 1, and
every |h_i| as up to 1, with no fixed point of the box. So weights that the certificate would pass may be shrunk, and
the certificate of shrunk ones is often well under `contraction`.

- linear, RNN: the Euclidean projection onto `|W|_2 <= contraction`: singular values clipped from above. A projection
  and no parametrisation, because it is the projected gradient descent of the theory, and because the recurrence
  stays torch's own fused kernel.
- LSTM, GRU: beyond the bound, the gate that holds the memory is kept under a cap for every input, by its bias and by
  the rows of its input matrix; then the recurrent matrix is shrunk by the largest common factor <= 1 at which the
  bound holds. A feasible point, not the nearest one.
- gated: nothing to do; the gates' cap is part of the function.

The bounds are recomputed independently, in float64, when a bundle is exported and when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.networks import Network
from models.spectral_limit import clip_singular_values, limit_spectral_norms

MARGIN = 1e-4
"""Relative slack under the asked contraction: float32 rounding never uses it up."""

ROOM = 1.0
"""How far the memory gate's bias stays below the cap's pre-activation, so that the input can still open the gate."""

MEMORY_GATE_SHARE = 0.97
"""The memory gate's cap, as a share of the contraction: what is left over is room for the recurrent matrix."""

LEAST_HALVINGS = 2.0**-9
"""The first shrinking that is tried, by 0.14 %: between two optimiser steps little more is asked for."""

MOST_HALVINGS = 128
"""A smaller scale leaves nothing of a float32 matrix: its largest values are about 2^128."""

BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One layer's weights, and the range of what the input adds to a pre-activation.

    matrix: (G H, H); bias: (G H), the recurrent one; input_matrix: (G H, I); least, greatest: (G H), of
    `input_matrix x + input_bias` over all admissible x.
    """

    matrix: Tensor
    bias: Tensor
    input_matrix: Tensor
    least: Tensor
    greatest: Tensor
    input_bias: Tensor

    def range_at(self, scale: float) -> tuple[Tensor, Tensor]:
        """Least and greatest pre-activations with the matrix scaled, for every state with |h_i| <= 1."""
        reach = scale * self.matrix.abs().sum(1)
        return self.least + self.bias - reach, self.greatest + self.bias + reach


@torch.no_grad()
def project(network: Network, contraction: Sequence[float] | None, spectral_limit: float | None = None) -> None:
    """Makes every layer contractive by at most its own entry of `contraction`, in place; None: whatever it is.

    `spectral_limit`: of every matrix that `models/spectral_limit.py` names (residual blocks); held first, because
    what `contraction` then does to such a matrix only shrinks rows.
    """
    architecture = network.architecture
    if spectral_limit is not None:
        limit_spectral_norms(network, spectral_limit * (1 - MARGIN))
    if contraction is None:
        return
    for index, (layer, factor_asked) in enumerate(zip(network.layers, contraction, strict=True)):
        target = factor_asked * (1 - MARGIN)
        match architecture.cell:
            case "linear" | "rnn_tanh" | "rnn_relu":
                clip_singular_values(_tensor(layer.cell, "weight_hh_l0"), target)
            case "lstm" | "gru":
                reads_embeddings = index == 0 and architecture.block == "plain"
                recurrence = _recurrence(layer, network.embedding.weight if reads_embeddings else None)
                factor = _lstm_factor if architecture.cell == "lstm" else _gru_factor
                if factor(recurrence, 1.0) <= target:
                    continue
                _cap_memory_gate(recurrence, MEMORY_GATE_SHARE * target)
                _shrink(recurrence, factor, target)
            case "gated":
                pass


def _tensor(module: object, name: str) -> Tensor:
    value = getattr(module, name)
    assert isinstance(value, Tensor), f"{name} is no tensor: this is a bug"
    return value


def _recurrence(layer: nn.Module, vocabulary: Tensor | None) -> Recurrence:
    """A layer's recurrence with the range of its input part over all admissible inputs.

    Exact over the rows of `vocabulary` (V, I) where the cell reads embeddings; behind a LayerNorm its output is
    within `|gamma| sqrt(d)` of beta; over another cell of this kind its outputs are in [-1, 1].
    """
    cell, norm = layer.cell, getattr(layer, "norm", None)
    weight, bias = _tensor(cell, "weight_ih_l0"), _tensor(cell, "bias_ih_l0")
    if vocabulary is not None:
        driven = vocabulary @ weight.T
        least, greatest = driven.amin(0) + bias, driven.amax(0) + bias
    elif isinstance(norm, nn.LayerNorm):
        middle = weight @ norm.bias + bias
        reach = (weight * norm.weight).norm(dim=1) * math.sqrt(weight.shape[1])
        least, greatest = middle - reach, middle + reach
    else:
        reach = weight.abs().sum(1)
        least, greatest = bias - reach, bias + reach
    return Recurrence(
        _tensor(cell, "weight_hh_l0"), _tensor(cell, "bias_hh_l0"), weight, least.clone(), greatest.clone(), bias
    )


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))


def _lstm_factor(recurrence: Recurrence, scale: float) -> float:
    """Spectral radius of the LSTM's 2 x 2 comparison matrix with the recurrent matrix scaled (gates i, f, z, o)."""
    low, high = (part.chunk(4) for part in recurrence.range_at(scale))
    i, f, o = torch.sigmoid(high[0]), torch.sigmoid(high[1]).clamp(max=1 - 1e-6), torch.sigmoid(high[3])
    z = torch.tanh(torch.maximum(high[2].abs(), low[2].abs()))
    c = i * z / (1 - f)
    w_i, w_f, w_z, w_o = (scale * part for part in recurrence.matrix.chunk(4))
    a = _spectral(c[:, None] * w_f) / 4 + _spectral(z[:, None] * w_i) / 4 + _spectral(i[:, None] * w_z)
    b = _spectral(torch.tanh(c)[:, None] * w_o) / 4
    o_max, f_max, of_max = float(o.max()), float(f.max()), float((o * f).max())
    trace, determinant = f_max + o_max * a + b, f_max * (o_max * a + b) - a * of_max
    return trace / 2 + math.sqrt(max(trace * trace / 4 - determinant, 0.0))


def _gru_factor(recurrence: Recurrence, scale: float) -> float:
    """`max z + 2 |W_z| / 4 + max(1 - z) (|r W_n| + |m W_r| / 4)`, m the reach of `W_n h + b_n` (gates r, z, n)."""
    low, high = (part.chunk(3) for part in recurrence.range_at(scale))
    w_r, w_z, w_n = (scale * part for part in recurrence.matrix.chunk(3))
    r, z, z_low = torch.sigmoid(high[0]), torch.sigmoid(high[1]), torch.sigmoid(low[1])
    reach_n = w_n.abs().sum(1) + recurrence.bias.chunk(3)[2].abs()
    candidate = _spectral(r[:, None] * w_n) + _spectral(reach_n[:, None] * w_r) / 4
    return float(z.max()) + _spectral(w_z) / 2 + float((1 - z_low).max()) * candidate


def _cap_memory_gate(recurrence: Recurrence, cap: float) -> None:
    """Holds the memory gate (rows H..2H: LSTM forget, GRU update) under `cap` for every input.

    First its bias is kept ROOM below the cap; then the rows of the input matrix that still reach past it are shrunk.
    Lowering the bias alone would let one token that opens the gate close it for all others.
    """
    hidden = recurrence.matrix.shape[1]
    rows = slice(hidden, 2 * hidden)
    limit = math.log(cap / (1 - cap))
    input_bias = recurrence.input_bias[rows]
    bias = (input_bias + recurrence.bias[rows]).clamp(max=limit - ROOM)
    recurrence.bias[rows] = bias - input_bias
    swing = (recurrence.greatest[rows] - input_bias).clamp(min=1e-12)
    shrink = ((limit - bias) / swing).clamp(max=1.0)
    recurrence.input_matrix[rows] *= shrink[:, None]
    for bound in (recurrence.least, recurrence.greatest):
        bound[rows] = input_bias + (bound[rows] - input_bias) * shrink


def _shrink(recurrence: Recurrence, factor: Callable[[Recurrence, float], float], target: float) -> None:
    """Multiplies the matrix by about the largest scale 2^-t <= 1 with a factor of at most `target`.

    t is doubled until the factor is small enough, then bisected. The matrix becomes zero only where no scale would do.
    """
    if factor(recurrence, 1.0) <= target:
        return
    few, many = 0.0, LEAST_HALVINGS
    while not factor(recurrence, 2.0**-many) <= target:
        few, many = many, 2 * many
        if many > MOST_HALVINGS:
            recurrence.matrix.zero_()
            return
    for _ in range(BISECTIONS):
        middle = (few + many) / 2
        few, many = (few, middle) if factor(recurrence, 2.0**-middle) <= target else (middle, many)
    recurrence.matrix.mul_(2.0**-many)
