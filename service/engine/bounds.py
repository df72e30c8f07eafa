"""Computes, from a certificate, how far an answer can be from the answer of the never-interrupted model.

The never-interrupted model runs the same float32 graphs over all n tokens. An answer comes from a state that has read
the last k of the n tokens.

- k >= n: no token is missing. The bound is 0 if two runs over the same tokens are bit-identical. This is checked when
  a model is loaded (`Certificate.bit_identical`). Otherwise, the bound is the rounding of two runs.
- k < n: the bound is the smaller of two bounds. The first bound is the certificate's bound for k, which holds for any
  k tokens. The second bound is an output of the run, and holds for the tokens of this run. Both bounds are theorems
  about the weights in exact arithmetic. The rounding of two float32 runs (`Certificate.rounding`) is added to both
  bounds. This rounding is computed from the measured error of one step and a proved bound of the growth of errors.
- k = 0 < n: there is no bound.
- A model that is not contractive has only the bound of 0 for k >= n, because the effect of a rounding error or of a
  dropped token is unlimited. In all other cases its bound is None, and the most probable token is not proved.

A bound of 1 on the total variation guarantees nothing, because it holds for any two distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Certificate


class Bound(NamedTuple):
    """Bounds on the distance between an answer and the answer of the never-interrupted model. `state` bounds the 2-norm
    distance of the two inputs of the output layer. `variation` bounds the total variation of the two distributions at
    temperature 1.

    `runs` bounds the same distance as `state`, but for any float32 run of the never-interrupted model. Unlike `state`,
    which may be 0, `runs` always includes rounding. If `runs` is None, this bound is unknown, and the most probable
    token cannot be proved.
    """

    state: float
    variation: float
    runs: float | None


def bound(certificate: Certificate, k: int, position: int, radius: float | None = None) -> Bound | None:
    """Returns the bound of an answer from a state that has read the last `k` of `position` tokens. Returns None if
    there is no bound.

    `radius` is an output of the run over these k tokens. It bounds the distance of this run's last state from the last
    state of any run that ends in the same k tokens.
    """
    rounding = certificate.rounding.between_runs if certificate.contractive and certificate.rounding else None
    if k >= position and certificate.bit_identical:
        return Bound(0.0, 0.0, rounding)
    if rounding is None:
        return None
    if k >= position:
        return Bound(rounding, _variation(certificate, rounding), rounding)
    if k < 1:
        return None
    state, variation = certificate.state_error_at(k), certificate.error_bound_at(k)
    states = [] if state is None else [state + rounding]
    variations = [] if variation is None else [variation]
    if radius is not None:
        states.append(radius + rounding)
        variations.append(_variation(certificate, radius + rounding))
    if not states or not variations:
        return None
    return Bound(min(states), min(variations), min(states))


def of_mixture(found: Bound | None, weight: float, unknown: float) -> Bound | None:
    """Returns the bound of a mixture with a cache, given the bound `found` of its network. `weight` is the network's
    weight in the mixture. `unknown` is the total variation that tokens missing from the cache can add."""
    if found is None or (not found.variation and not unknown):
        return found
    return found._replace(variation=min(weight * found.variation + unknown, 1.0))


def _variation(certificate: Certificate, state: float) -> float:
    return float(total_variation(certificate.head_diameter, np.array(state)))


def largest(variations: Sequence[float | None]) -> float | None:
    """Returns the largest of the bounds; None if any of the bounds is None."""
    known = [one for one in variations if one is not None]
    return max(known) if len(known) == len(variations) else None


def meets(found: Bound | None, tolerance: float) -> bool:
    """Returns whether a bound is within the tolerance. False for None."""
    return found is not None and found.variation <= tolerance
