"""How far a LayerNorm's outputs are apart when its inputs are.

With v the centred input (d) and w = (v, sqrt(d epsilon)), one coordinate lifted in, the normalised vector is
n = sqrt(d) v / |w|: the foot of sqrt(d) times w's direction, so `|n - n~| <= 2 sqrt(d) sin(theta / 2)`, theta the
angle between w and w~. Two points r apart

- on a plane at distance c = sqrt(d epsilon) from the origin are seen under at most 2 atan(r / (2 c)), the segment being
  centred: `|n - n~| <= sqrt(d) r / sqrt(r^2 / 4 + c^2)`, which is at most r / sqrt(epsilon), and at most 2 sqrt(d);
- both of a length of at least m: |w - w~| >= 2 m sin(theta / 2), so `|n - n~| <= sqrt(d) r / m`.
"""

from __future__ import annotations

import numpy as np

from wane.models.certificate.outward import UP


def normalised_apart(distance: float, width: int, epsilon: float, least: float = 0.0) -> float:
    """|n - n~|_2 from above; distance: |v - v~|_2, least: the least |v|_2 there is."""
    lifted = width * min(epsilon, float(np.float32(epsilon))) / UP  # the graphs have epsilon in float32
    anywhere = distance / np.sqrt(distance**2 / 4 + lifted)
    apart = distance / np.sqrt(least**2 / UP + lifted)
    return float(np.sqrt(width) * min(anywhere, apart, 2.0)) * UP


def normalised_furthest(width: int) -> float:
    """The most that |n - n~|_2 can be, from above."""
    return float(2 * np.sqrt(width)) * UP
