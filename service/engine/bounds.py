"""Computes, from a certificate, how far an answer can be from the never-interrupted model's.

The never-interrupted model is a run of the same float32 graphs. An answer comes from a state that knows the last k of n
tokens.

- k >= n: no token is missing. The bound is 0 if the graphs give the same bits for the same tokens, which is checked
  when a model is loaded (`Certificate.bit_identical`). If they do not, it is the rounding of two runs.
- k < n: the smaller of two bounds: the certificate's curve at k, which holds for all tokens, and the bound that this
  run computed for its own tokens. Both are theorems in exact arithmetic about the weights. The rounding of two float32
  runs is added to both (`Certificate.rounding`): the measured error of one step, propagated by the theorem.
- A model that is not contractive has no bound other than that 0: the effect of a rounding error, or of a dropped token,
  is unlimited. The bound is then None, and no first token is proved.

A bound of 1 guarantees nothing: it holds for any two distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Certificate


class Bound(NamedTuple):
    """`state`: 2-norm distance at the output layer's input; `variation`: total variation at temperature 1.

    `runs`: like `state`, but between a float32 run and the never-interrupted one in exact arithmetic, so it includes
    rounding even if `state` is 0. None: unknown, and the first token cannot be proved.
    """

    state: float
    variation: float
    runs: float | None


def bound(certificate: Certificate, k: int, position: int, radius: float | None = None) -> Bound | None:
    """Returns the bound of an answer from a state that knows the last `k` of `position` tokens.

    `radius` is an output of the run over these k tokens: every run that ends in them ends within it of this one.
    """
    rounding = certificate.rounding.between_runs if certificate.contractive and certificate.rounding else None
    if k >= position and certificate.bit_identical:
        return Bound(0.0, 0.0, rounding)
    if rounding is None:
        return None
    if k >= position:
        return Bound(rounding, _variation(certificate, rounding), rounding)
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
    """Returns the bound of a mixture with a cache from that of its network, whose distribution has the part `weight` in
    it. unknown: what the tokens that the cache lacks can add."""
    if found is None or (not found.variation and not unknown):
        return found
    return found._replace(variation=min(weight * found.variation + unknown, 1.0))


def _variation(certificate: Certificate, state: float) -> float:
    return float(total_variation(certificate.head_diameter, np.array(state)))


def largest(variations: Sequence[float | None]) -> float | None:
    """Returns the largest bound; None if any of them is None."""
    known = [one for one in variations if one is not None]
    return max(known) if len(known) == len(variations) else None


def meets(found: Bound | None, tolerance: float) -> bool:
    """Returns whether a bound is within the tolerance; None never is."""
    return found is not None and found.variation <= tolerance
