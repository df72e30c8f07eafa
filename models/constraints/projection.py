"""Keeping a network contractive while it trains.

`project(network, contraction, spectral_limit)` puts the weights back, after an optimiser step, where every layer's
factor holds; weights that are within it are not touched, and nothing is ever inflated.

What that takes is in `models/constraints/cells/`, cell by cell.

The bounds are recomputed independently, rounded outward, when a bundle is exported and when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wane.models.cell_registry import CELLS, load
from wane.models.constraints.layer import ConstrainedLayer
from wane.models.constraints.spectral_limit import limit_spectral_norms
from wane.models.networks import Network

Constrain = Callable[[ConstrainedLayer, float], Tensor | None]

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
    if contraction is None or "constraint" in CELLS[architecture.cell].missing:
        return
    constrain: Constrain = load("constraint", architecture.cell).constrain
    below, reads_embeddings = None, architecture.front is None
    for index, (layer, factor_asked) in enumerate(zip(network.layers, contraction, strict=True)):
        target = factor_asked * (1 - MARGIN)
        vocabulary = network.embedding.weight if index == 0 and reads_embeddings else None
        below = constrain(ConstrainedLayer(layer, vocabulary, below), target)
