"""Keeping a network contractive while it trains.

`project(network, contraction, spectral_limit)` puts the weights back, after an optimiser step, where every layer's
factor holds; weights that are within it are not touched, and nothing is ever inflated.

- linear, RNN: the Euclidean projection onto `|W|_2 <= contraction`: singular values clipped from above. A projection
  and no parametrisation, because it is the projected gradient descent of the theory, and because the recurrence
  stays torch's own fused kernel.
- LSTM, GRU: a feasible point beyond the bound, not the nearest one (`models/constraints/gated_memory.py`). The bound
  is the certificate's, its box settled and its slopes exact, up to the last digits.
- gated: nothing to do; the gates' cap is part of the function.

The bounds are recomputed independently, rounded outward, when a bundle is exported and when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wane.models.constraints.gated_memory import Recurrence, hold
from wane.models.constraints.spectral_limit import clip_singular_values, limit_spectral_norms
from wane.models.networks import Network

MARGIN = 1e-4
"""Relative slack under what is asked: float32 rounding never uses it up."""


@torch.no_grad()
def project(network: Network, contraction: Sequence[float] | None, spectral_limit: float | None = None) -> None:
    """Makes every layer contractive by at most its own entry of `contraction`, in place; None: whatever it is.

    `spectral_limit`: of every matrix that `spectral_limit.py` names (residual blocks); held first, because what
    `contraction` then does to such a matrix only shrinks rows.
    """
    architecture = network.architecture
    if spectral_limit is not None:
        limit_spectral_norms(network, spectral_limit * (1 - MARGIN))
    if contraction is None:
        return
    below, reads_embeddings = None, architecture.front is None
    for index, (layer, factor_asked) in enumerate(zip(network.layers, contraction, strict=True)):
        target = factor_asked * (1 - MARGIN)
        match architecture.cell:
            case "linear" | "rnn_tanh" | "rnn_relu":
                clip_singular_values(_tensor(layer.cell, "weight_hh_l0"), target)
            case "lstm" | "gru":
                vocabulary = network.embedding.weight if index == 0 and reads_embeddings else None
                below = hold(_recurrence(layer, vocabulary, below), target)
            case "gated":
                pass


def _tensor(module: object, name: str) -> Tensor:
    value = getattr(module, name)
    assert isinstance(value, Tensor), f"{name} is no tensor: this is a bug"
    return value


def _recurrence(layer: nn.Module, vocabulary: Tensor | None, below: Tensor | None) -> Recurrence:
    """A layer's recurrence with the range of its input part over all admissible inputs.

    Exact over the rows of `vocabulary` (V, I) where the layer reads those, through its LayerNorm if it has one. Else a
    LayerNorm's output is gain * n + shift, |n| <= sqrt(d) and n of mean zero; without one, the box of the layer `below`
    holds, |x_i| <= below_i.
    """
    cell, norm = layer.cell, getattr(layer, "norm", None)
    own, own_bias = _tensor(cell, "weight_ih_l0"), _tensor(cell, "bias_ih_l0")
    weight, bias = own.double(), own_bias.double()
    if vocabulary is not None:
        rows = norm(vocabulary) if isinstance(norm, nn.LayerNorm) else vocabulary
        driven = rows.double() @ weight.T
        least, greatest = driven.amin(0) + bias, driven.amax(0) + bias
    elif isinstance(norm, nn.LayerNorm):
        middle = weight @ norm.bias.double() + bias
        scaled = weight * norm.weight.double()
        reach = (scaled - scaled.mean(1, keepdim=True)).norm(dim=1) * weight.shape[1] ** 0.5
        least, greatest = middle - reach, middle + reach
    else:
        assert below is not None, "a plain layer above the first has one below: this is a bug"
        reach = weight.abs() @ below
        least, greatest = bias - reach, bias + reach
    return Recurrence(_tensor(cell, "weight_hh_l0"), _tensor(cell, "bias_hh_l0"), own, own_bias, least, greatest)
