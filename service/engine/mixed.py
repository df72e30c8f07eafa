"""One answer of a model with a cache: the mixture of the network's distribution and the cache's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture, TopTokens
from wane.service.batching.batch import Row
from wane.service.runners.outputs import FEW, Largest
from wane.service.runners.runner import LOG_SUM_EXP, TOP_IDS


class Mixed:
    """The mixture of the network's and the cache's distribution of the token that follows one sequence."""

    def __init__(
        self,
        cache: CacheMixture,
        history: Sequence[int] | NDArray[np.int64],
        logits: NDArray[np.float32],
        row: Row,
        known: int,
    ) -> None:
        """See `RunResult.mix`. logits: the network's logits from `row`, float32 (V)."""
        self._cache = cache
        self._logits = logits
        self._row = row
        self._found = cache.of(np.asarray(history, np.int64))
        self.weight = self._found.network.item(0)
        """The weight of the network's distribution."""
        self.tokens = self._found.tokens.item(0)
        """Number of tokens in the cache."""
        self.unknown = cache.unknown(self.tokens, known)
        """The largest total variation that tokens missing from the cache can add."""

    @cached_property
    def added(self) -> NDArray[np.float64]:
        """The part of each token's probability in the mixture that comes from the cache: float64 (V)."""
        return self._cache.added_to(self._found, 0)

    @cached_property
    def log_probabilities(self) -> NDArray[np.float32]:
        """The log-probabilities of the mixture at temperature 1: float32 (V)."""
        found: NDArray[np.float32] = self._cache.log_probabilities(self._logits[None], self._found)[0].astype(
            np.float32
        )
        return found

    def top(self, count: int) -> TopTokens | None:
        """Returns the `count` most probable tokens of the mixture; None if the graph outputs fewer of the network's
        most probable tokens."""
        ids = self._row.output(TOP_IDS)
        if ids is None or count > len(ids):
            return None
        return self._cache.top(self._logits[None], self.log_sum_exp, ids[None], self._found, count)

    @property
    def log_sum_exp(self) -> NDArray[np.float64]:
        """The log-sum-exp of the network's logits: float64 (1)."""
        found = self._row.output(LOG_SUM_EXP)
        assert found is not None, "a graph outputs the most probable tokens, but not the log-sum-exp: this is a bug"
        sums: NDArray[np.float64] = found.astype(np.float64).reshape(1)
        return sums

    def largest(self, count: int) -> Largest | None:
        """Like `top`, but may return more than `count` tokens."""
        found = self.top(min(max(count, FEW), self._cache.vocabulary_size))
        if found is None:
            return None
        probabilities = found.probabilities[0]
        logprobs = np.log(probabilities).tolist()
        return Largest(found.ids[0].tolist(), logprobs, logprobs, probabilities.tolist())
