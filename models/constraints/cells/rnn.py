"""The constraint of the RNN: the Euclidean projection onto `|W|_2 <= contraction`.

The projection clips singular values from above. Unlike a parametrisation, it gives the projected gradient descent of
the theory and keeps torch's fused kernel for the recurrence.
"""

from __future__ import annotations

from wane.models.constraints.layer import ConstrainedLayer
from wane.models.constraints.spectral_limit import clip_singular_values


def constrain(layer: ConstrainedLayer, target: float) -> None:
    """Makes a layer contractive by at most `target`, in place."""
    clip_singular_values(layer.tensor("weight_hh_l0"), target)
