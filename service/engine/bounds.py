"""How far an answer can be from the never-interrupted model's: the one place where that is made of a certificate.

An answer comes from a state that knows the last k of n tokens.

- k >= n: no token is missing, and the bound is 0. The never-interrupted model is itself a run in float32, and two such
  runs over the same tokens, in other batches or by other graphs, are apart by rounding. The 0 does not count it; the
  margin test does, and so does the count of violations.
- k < n: the smaller of the certificate's curve at k, which holds for all tokens, and of the bound that was computed
  beside this very run, for its tokens. Both are theorems in exact arithmetic about the weights; to both the rounding of
  float32 is added as it was measured, which is no theorem: the certificate's `rounding`, whose safety factor has to
  cover that two runs round, the one that answers and the one that it stands for.
- Where there is no curve and no bound beside the run, or no rounding was measured, there is no bound: None.

A bound of 1 is true of any two distributions, and says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from models.certificate.answer import total_variation
from models.manifest import Certificate


class Bound(NamedTuple):
    """`state`: 2-norm distance at the output layer's input; `variation`: total variation at temperature 1.

    `runs`: as `state`, between runs in float32: it counts their rounding where `state` is 0, too. None: not known.
    """

    state: float
    variation: float
    runs: float | None


def bound(certificate: Certificate, k: int, position: int, radius: float | None = None) -> Bound | None:
    """The bound of an answer from a state that knows the last `k` of `position` tokens.

    `radius`: computed beside the run over these k tokens; every run that ends in them ends within it of this one.
    """
    rounding = None if certificate.rounding is None else certificate.rounding.measured
    if k >= position:
        return Bound(0.0, 0.0, rounding)
    if rounding is None:
        return None
    state, variation = certificate.state_error_at(k), certificate.error_bound_at(k)
    states = [] if state is None else [state + rounding]
    variations = [] if variation is None else [variation]
    if radius is not None:
        states.append(radius + rounding)
        variations.append(float(total_variation(certificate.head_diameter, np.array(radius + rounding))))
    if not states or not variations:
        return None
    return Bound(min(states), min(variations), min(states))


def largest(variations: Sequence[float | None]) -> float | None:
    """The largest; None where any is."""
    known = [one for one in variations if one is not None]
    return max(known) if len(known) == len(variations) else None


def meets(found: Bound | None, tolerance: float) -> bool:
    """Whether an answer of this bound is within the tolerance; without a bound it is within none."""
    return found is not None and found.variation <= tolerance
