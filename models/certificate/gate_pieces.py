"""A sigmoid gate in two trajectories: joint bounds of its value and its change.

Let g = cap sigma(a), g~ = cap sigma(a~) and m the smaller pre-activation. Then min(g, g~) = cap sigma(m). By the mean
value theorem |g - g~| <= cap F(m) |a - a~|, where F(m) is the greatest slope of the sigmoid between m and the greatest
pre-activation. The slope F(m) is small where sigma(m) is close to 1, so a nearly open gate hardly changes. The range of
m is split into intervals (pieces), and each interval has its own bounds of the value and of the slope.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wane.models.certificate.admissible import Reach
from wane.models.certificate.interval_rounding import UP, Matrix
from wane.models.reference.functions import sigmoid

PIECES = 16


@dataclass(frozen=True, slots=True)
class GatePieces:
    """Bounds of a gate in each of C intervals of m, by interval and unit, (C, H). The smaller of the two gates is
    between `low` and `high`. The two gates differ by at most `slope * |a - a~|`."""

    low: Matrix
    high: Matrix
    slope: Matrix

    @classmethod
    def of(cls, reach: Reach, cap: float = 1.0) -> GatePieces:
        """Returns the bounds of all intervals for a gate whose pre-activations stay within `reach` (H)."""
        low, high = np.maximum(reach.low, -800.0), np.minimum(reach.high, 800.0)
        # The limits are made finite. The sigmoid is saturated at these limits.
        low, high = np.minimum(low, 700.0), np.maximum(high, -700.0)
        shares = np.linspace(0, 1, PIECES + 1)[:, None]
        # The intervals have equal widths in the gate's value. The intervals near the gate's maximum, which determine
        # the result, are therefore as narrow as the others.
        gates = sigmoid(low) + shares * (sigmoid(high) - sigmoid(low))
        with np.errstate(divide="ignore"):
            inner = np.log(gates) - np.log1p(-gates)
        edges = np.clip(inner, low, high)
        edges[0], edges[-1] = low, high
        edges = np.maximum.accumulate(edges, axis=0)
        start, stop = edges[:-1], edges[1:]
        nearest = np.maximum(0.0, np.maximum(start, -high))
        slope = cap * sigmoid(nearest) * sigmoid(-nearest) * UP
        return cls(cap * sigmoid(start) / UP, np.minimum(cap * sigmoid(stop) * UP, cap), slope)
