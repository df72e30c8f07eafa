"""Keeps a network contractive during training.

After an optimiser step, `project(network, contraction, spectral_limit)` changes the weights so that no layer's
contraction factor exceeds its limit. The weights of a layer within its limit are not changed, and no weight grows.
`models/constraints/cells/` has the constraint of each cell. The certificate recomputes the bounds independently, at
export and when a bundle is loaded, and rounds them outward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wane.models.constraints.layer import ConstrainedLayer
from wane.models.constraints.spectral_limit import limit_spectral_norms
from wane.models.layer_parts import load
from wane.models.networks import Network

Constrain = Callable[[ConstrainedLayer, float], Tensor | None]

MARGIN = 1e-4
"""The requested limits are reduced by this relative amount before the projection. It is larger than float32 rounding.
"""


@torch.no_grad()
def project(network: Network, contraction: Sequence[float] | None, spectral_limit: float | None = None) -> None:
    """Changes the weights in place so that no layer's contraction factor exceeds the layer's entry of `contraction`.
    None means no constraint.

    `spectral_limit` is the limit of every matrix that `spectral_limit.py` names (residual blocks). It is applied first,
    because the constraint by `contraction` then only shrinks rows of these matrices, so their norms stay within the
    limit.
    """
    fading = network.architecture.fading
    if spectral_limit is not None:
        limit_spectral_norms(network, spectral_limit * (1 - MARGIN))
    if contraction is None:
        return
    below, reads_embeddings = None, len(network.front) == 0
    for index, (layer, spec, factor_asked) in enumerate(zip(network.layers, fading, contraction, strict=True)):
        if "constraint" in spec.missing:
            below = None
            continue
        constrain: Constrain = load("constraint", spec.module).constrain
        target = factor_asked * (1 - MARGIN)
        vocabulary = network.embedding.weight if index == 0 and reads_embeddings else None
        below = constrain(ConstrainedLayer(layer, vocabulary, below), target)
