"""One token drawn from logits, by temperature, top-k and top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.engine.distribution import log_softmax


class Sampler:
    """Draws tokens; the same seed and the same logits give the same tokens."""

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> None:
        """`temperature` 0 always takes the most probable token; top_k and top_p of None keep all of them."""
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._random = np.random.default_rng(seed)

    def draw(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """A token and its log-probability at temperature 1, before anything was left out."""
        logprobs = log_softmax(logits)
        token = int(logprobs.argmax()) if self._temperature == 0 else self._sample(logprobs)
        return token, float(logprobs[token])

    def _sample(self, logprobs: NDArray[np.float64]) -> int:
        """Temperature first, then the k most probable, then the fewest that make up the share p."""
        # The largest becomes exactly 0, so that the smallest temperatures end in 0 and -inf, never in NaN.
        with np.errstate(over="ignore"):
            scaled = (logprobs - logprobs.max()) / self._temperature
        order = np.argsort(-scaled, kind="stable")[: self._top_k]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        cumulative = np.cumsum(weights)
        if self._top_p is not None:
            # A token stays while those before it fall short of the share; so at least one does.
            keep = int(np.searchsorted(cumulative, self._top_p, side="left")) + 1
            order, cumulative = order[:keep], cumulative[:keep]
        drawn = self._random.random() * cumulative[-1]
        return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(order) - 1)])
