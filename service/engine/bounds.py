"""Computes, from a certificate, how far an answer can be from the answer of the never-interrupted model.

The never-interrupted model runs the same float32 graphs over all n tokens. An answer comes from a state that has read
the last k of the n tokens.

- k >= n: no token is missing. The bound is 0 if two runs over the same tokens are bit-identical. This is checked when
  a model is loaded (`Certificate.bit_identical`). Otherwise, the bound is the rounding of two runs.
- k < n: the bound is the smaller of two bounds. The first bound is the certificate's bound for k, which holds for any
  k tokens. The second bound is an output of the run, and holds for the tokens of this run. Both bounds are theorems
  about the weights in exact arithmetic. The rounding of two float32 runs is added to the first bound. In residual
  networks with one layer, it is a theorem too (`Certificate.readout`): it depends on the LayerNorms of the answer's own
  run, and the second bound includes it. In other networks, it is computed from the measured error of one step and a
  proved bound of the growth of errors (`Certificate.rounding`), and added to both bounds. In models of layers with
  finite memory alone, it is 0 if bits are equal, else a theorem (`Certificate.of_finite`).
- k = 0 < n: there is no bound.
- A model that is not contractive has only the bound of 0 for k >= n, because the effect of a rounding error or of a
  dropped token is unlimited. In all other cases its bound is None, and the most probable token is not proved.

A bound of 1 on the total variation guarantees nothing, because it holds for any two distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.total_variation import total_variation
from wane.models.manifest import Certificate

FEW_ROWS = 8
"""Up to this number of rows, Python is faster than numpy."""


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


def bound(
    certificate: Certificate,
    k: int,
    position: int,
    radius: float | None = None,
    norms: Sequence[float] | None = None,
) -> Bound | None:
    """Returns the bound of an answer from a state that has read the last `k` of `position` tokens. Returns None if
    there is no bound.

    `radius` is an output of the run over these k tokens. It bounds the distance of this run's last state from the last
    state of any run that ends in the same k tokens. `norms` describes the LayerNorms of the answer's run (see `Row`).
    Without it, the largest possible rounding is assumed.
    """
    rounding = certificate.between_runs(norms)
    if k >= position and certificate.bit_identical:
        return Bound(0.0, 0.0, rounding)
    return None if rounding is None else _after(certificate, k, position, radius, rounding)


def expected(certificate: Certificate, k: int, position: int) -> Bound | None:
    """Like `bound`, before the run. The result does not include a rounding that depends on the run, so that it is no
    bound, but an expectation."""
    if certificate.readout is None or k >= position or not certificate.has_rounding:
        return bound(certificate, k, position)
    return _after(certificate, k, position, None, 0.0)


def smallest_window(certificate: Certificate, tolerance: float, largest: int) -> int | None:
    """Returns the smallest k, at most `largest`, for which the expected bound of a window of k tokens is within the
    tolerance for all windows of at least k tokens. Returns None if there is no such k."""
    k = certificate.smallest_window(tolerance)
    if k is None or not meets(expected(certificate, largest, largest + 1), tolerance):
        return None
    while k <= largest and not meets(expected(certificate, k, k + 1), tolerance):
        k += 1
    return k if k <= largest else None


class StepBounds(NamedTuple):
    """The bounds of B answers: see `Bound`. `states` and `variations` are None for an answer without a bound. `runs` is
    infinite for an answer whose most probable token cannot be proved."""

    states: list[float | None]
    variations: list[float | None]
    runs: list[float]

    @classmethod
    def of(cls, bounds: Sequence[Bound | None]) -> StepBounds:
        """Returns the bounds of B answers as columns."""
        return cls(
            [None if bound is None else bound.state for bound in bounds],
            [None if bound is None else bound.variation for bound in bounds],
            [math.inf if bound is None or bound.runs is None else bound.runs for bound in bounds],
        )


def of_steps(certificate: Certificate, known: Sequence[int], norms: NDArray[np.float32]) -> StepBounds:
    """Like `bound`, for B steps of a model with a `readout`. `known`: k for a state that has not read the whole
    sequence, 0 for a state that has read it. `norms`: (B, columns)."""
    assert certificate.readout is not None, "the certificate has no readout: this is a bug"
    if len(norms) <= FEW_ROWS:
        roundings = [certificate.readout.between(row) for row in norms.tolist()]
    else:
        roundings = certificate.readout.between_all(norms).tolist()
    if not any(known):
        exact: list[float | None] = [0.0] * len(roundings)
        return StepBounds(exact, exact, roundings)
    return StepBounds.of(
        [
            _after(certificate, k, k + 1, None, rounding) if k else Bound(0.0, 0.0, rounding)
            for k, rounding in zip(known, roundings, strict=True)
        ]
    )


def _after(certificate: Certificate, k: int, position: int, radius: float | None, rounding: float) -> Bound | None:
    """Returns the bound of an answer whose rounding is not 0. rounding: the bound of the distance between the `hidden`
    of two runs over the same tokens."""
    readout = certificate.readout
    if k >= position:
        return Bound(rounding, _variation(certificate, rounding), rounding)
    if k < 1:
        return None
    curve = certificate.state_error_at(k)
    states = []
    if curve is not None:
        states.append(curve * (1.0 if readout is None else (1 + readout.gate) ** k) + rounding)
    if radius is not None:
        states.append(radius + (rounding if readout is None else 0.0))
    if not states:
        return None
    state = min(states)
    if not certificate.layers and curve:
        # The memory is finite, and the window does not hold it.
        return Bound(state, 1.0, None)
    return Bound(state, _variation(certificate, state), state)


def of_mixture(of_network: Bound | None, weight: float, unknown: float) -> Bound | None:
    """Returns the bound of a mixture with a cache, given that of its network. `weight` is the network's
    weight in the mixture. `unknown` is the total variation that tokens missing from the cache can add."""
    if of_network is None:
        return None
    return of_network._replace(variation=variation_of_mixture(of_network.variation, weight, unknown))


def variation_of_mixture(variation: float, weight: float, unknown: float) -> float:
    """Returns the bound of the total variation of a mixture, given that of its network: see `of_mixture`."""
    return min(weight * variation + unknown, 1.0)


def _variation(certificate: Certificate, state: float) -> float:
    return float(total_variation(certificate.head_diameter, np.array(state)))


def largest(variations: Sequence[float | None]) -> float | None:
    """Returns the largest of the bounds; None if any of the bounds is None."""
    known = [variation for variation in variations if variation is not None]
    return max(known) if len(known) == len(variations) else None


def meets(bound: Bound | None, tolerance: float) -> bool:
    """Returns whether a bound is within the tolerance. False for None."""
    return bound is not None and bound.variation <= tolerance
