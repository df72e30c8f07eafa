"""After how many tokens a model was seen to have forgotten where it came from: measured at warm-up.

It is the warm-up to begin with, and no promise: what a warm-up left is measured again wherever one is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.engine.slab import ZERO, Slab
from service.runners.runner import NEXT, Array, Runner

LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Warm-ups that are tried."""

ROWS = 4
MARGIN = 0.25
"""For tokens that were not tried, over which a model may forget a little later."""

PAST = 512
"""Tokens that one of two runs knows before those that both read, in each of ROWS pairs."""


class Forgetting:
    """How far apart two runs over the same tokens were, by their number, at most in any unit of the state."""

    def __init__(self, residuals: Sequence[tuple[int, float]]) -> None:
        """`residuals`: (tokens, difference), fewest tokens first."""
        self._residuals = tuple(residuals)

    def warm_up(self, residual: float) -> int | None:
        """The fewest tokens after which, and ever since, only MARGIN of this was left. None: there are none."""
        found: int | None = None
        for tokens, left in reversed(self._residuals):
            if left > residual * MARGIN:
                break
            found = tokens
        return found


def measure(runner: Runner, slab: Slab, vocabulary_size: int) -> Forgetting:
    """Runs random tokens from where random tokens led to, and from the zero state. Blocks."""
    random = np.random.default_rng(4)
    zeros = slab.gather([ZERO] * ROWS)
    past = _advance(runner, random.integers(vocabulary_size, size=(ROWS, PAST)), zeros)
    both = {name: np.concatenate([past[name], zeros[name]]) for name in zeros}
    residuals: list[tuple[int, float]] = []
    before = 0
    for length in LENGTHS:
        tokens = random.integers(vocabulary_size, size=(ROWS, length - before))
        both = _advance(runner, np.concatenate([tokens, tokens]), both)
        before = length
        apart = max(float(np.abs(each[:ROWS] - each[ROWS:]).max()) for each in both.values())
        residuals.append((length, apart if np.isfinite(apart) else np.inf))
    return Forgetting(residuals)


def _advance(runner: Runner, tokens: Array, state: dict[str, Array]) -> dict[str, Array]:
    """The states after tokens (B, T)."""
    outputs = runner.run("advance", {"tokens": tokens, "lengths": np.full(len(tokens), tokens.shape[1]), **state})
    return {name: outputs[NEXT + name] for name in state}
