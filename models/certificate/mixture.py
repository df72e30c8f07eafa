"""Proves that a token is the most probable one of a network's distribution, or of its mixture with a cache
(`models/cache_mixture.py`), in every uninterrupted run that ends in a window's tokens.

Let q be the network's distribution at a window's end, and p = w q + c the mixture. w and c depend on the last tokens
alone. A run that ends in the same tokens has the same w and c, but another network distribution q~ and another mixture
p~. Token a is the most probable one of p~ if p~_a > p~_b for every other token b. Two facts about q~ are used:

- Let eta_t be the change of token t's logit, relative to the mean of the changes under q. |eta_t| is at most M_t. `log
  q~_t - log q_t = eta_t - log sum_u q_u exp(eta_u)` is at least `-M_t - log sum_u q_u exp(M_u)`. If `sum_u q_u eta_u`
  is at least -off, then `sum_u q_u exp(eta_u)` is at least exp(-off) (Jensen), so `log q~_t - log q_t` is at most `M_t
  + off`.
- The difference of two logits, z_a - z_b, changes by at most R_ab. Let d = z_a - z_b - R_ab be its least value in the
  run. Then q~_b <= q~_a exp(-d).

For nearly all b the first fact is enough, because the lower bound of w q~_a + c_a exceeds the upper bound of w q~_b +
c_b. All other b need the second fact. If c_a >= c_b, then p~_a > p~_b if d > 0, or if w q~_b (1 - exp(d)) < c_a - c_b
with the upper bound of q~_b. If c_a < c_b, then p~_a > p~_b if d > 0 and w q~_a (1 - exp(-d)) > c_b - c_a with the
lower bound of q~_a. Without a cache, w is 1 and c is 0.

The evaluation is in float64. SLACK covers its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wane.models.certificate.interval_rounding import Vector

SLACK = 1e-10
"""The relative margin of the comparisons of probabilities. It is far above the rounding of probabilities in float64."""

FIRST, MOST_AT_ONCE = 16, 512
"""The tokens b that need the second fact are tested in chunks, in descending order of probability. These are the number
of tokens in the first chunk and the largest number in any chunk. A failed test is mostly in the first chunk."""


class LogitMoves(NamedTuple):
    """Bounds of the distance between one window's logits and any run's. The module's docstring defines the symbols.

    logits: (V), the window's logits z.
    shares: (V), the network's distribution q.
    moved: (V), the bounds M.
    off: the bound of `|sum_u q_u eta_u|`.
    """

    logits: Vector
    shares: Vector
    moved: Vector
    off: float


def first_is_proved(
    first: int,
    weight: float,
    added: Vector | None,
    moves: LogitMoves,
    lead_moved: Callable[[NDArray[np.intp]], Vector],
    among: NDArray[np.int64] | None = None,
) -> bool:
    """Returns whether token `first` is more probable than every other token in every run's mixture. The module's
    docstring defines the symbols.

    weight: w. added: (V), c, or None for a network alone. lead_moved: a function that returns R_ab, (P), for the ids of
    tokens b, (P). among: the ids of the tokens b with which `first` is compared, ascending, or None for all tokens.
    """
    if not math.isfinite(moves.off):
        return False
    log_shares = moves.logits - _log_sum_exp(moves.logits)  # logarithms are used, because a share may underflow to 0
    fallen = max(_log_sum_exp(log_shares + moves.moved), 0.0) + moves.moved[first]
    lowest_share = weight * np.exp(log_shares[first] - fallen) * (1 - SLACK)
    highest_shares = weight * np.exp(np.minimum(log_shares + moves.moved + moves.off, 0.0)) * (1 + SLACK)
    cached = np.zeros_like(log_shares) if added is None else added
    left_of_first = cached[first] * (1 - SLACK)
    rivals = np.flatnonzero(~(highest_shares + cached * (1 + SLACK) < lowest_share + left_of_first))
    if among is not None:
        rivals = rivals[np.isin(rivals, among)]
    rivals = rivals[rivals != first]
    rivals = rivals[np.argsort(-(highest_shares + cached)[rivals], kind="stable")]
    start, size = 0, FIRST
    while start < len(rivals):
        now = rivals[start : start + size]
        start, size = start + size, min(8 * size, MOST_AT_ONCE)
        left = moves.logits[first] - moves.logits[now] - lead_moved(now)
        ahead = left_of_first - cached[now] * (1 + SLACK)
        behind = highest_shares[now] * -np.expm1(np.minimum(left, 0.0))
        lead = lowest_share * -np.expm1(-np.maximum(left, 0.0))
        if not np.where(ahead >= 0, (left > 0) | (behind < ahead), lead > -ahead).all():
            return False
    return True


def _log_sum_exp(values: Vector) -> float:
    highest = float(values.max())
    return highest + float(np.log(np.exp(values - highest).sum())) if math.isfinite(highest) else highest
