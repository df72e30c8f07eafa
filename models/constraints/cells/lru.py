"""The constraint of the linear recurrent unit: |lambda| = exp(-exp(nu)) is at most the target."""

from __future__ import annotations

import math

from wane.models.constraints.layer import ConstrainedLayer


def constrain(layer: ConstrainedLayer, target: float) -> None:
    """Raises nu where |lambda| is above the target."""
    layer.tensor("nu").clamp_(min=math.log(-math.log(target)))
