"""The constraint of the RNN: the Euclidean projection onto `|W|_2 <= contraction`.

The projection replaces each larger singular value by `contraction`. If it follows every optimiser step, training is
exact projected gradient descent. Torch's fused kernel can still compute the recurrence, which a parametrised matrix
would not allow.
"""

from __future__ import annotations

from wane.models.constraints.layer import ConstrainedLayer
from wane.models.constraints.spectral_limit import clip_singular_values


def constrain(layer: ConstrainedLayer, target: float) -> None:
    """Changes a layer's weights in place so that its contraction factor is at most `target`."""
    clip_singular_values(layer.tensor("weight_hh_l0"), target)
