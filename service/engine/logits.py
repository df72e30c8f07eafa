"""Computes log-probabilities and the most probable tokens from logits, and samples by temperature, top-k and top-p."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import Largest, Top
from wane.service.types import Prediction

_made = partial(tuple.__new__, Prediction)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns log-probabilities at temperature 1: float64 (V), from finite logits."""
    shifted = logits.astype(np.float64) - logits.max()
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def predictions(
    logits: NDArray[np.float32], count: int, vocabulary: Vocabulary, top: Top | None = None
) -> tuple[Prediction, ...]:
    """Returns the `count` most probable tokens in descending order. Among equal probabilities, the smaller id comes
    first.

    `top` holds the largest values of `logits`. If `top` holds at least `count` values, `logits` is not read.
    """
    count = min(count, len(logits))
    found = None if top is None else top.first(count)
    if found is not None:
        return listed(found, count, vocabulary)
    of_all = log_softmax(logits)
    least = np.partition(of_all, -count)[-count]
    candidates = np.flatnonzero(of_all >= least)  # includes all tokens that tie for the last place
    order = candidates[np.argsort(-of_all[candidates], kind="stable")][:count]
    logprobs = of_all[order]
    return listed(
        Largest(order.tolist(), logits[order].tolist(), logprobs.tolist(), np.exp(logprobs).tolist()), count, vocabulary
    )


def listed(found: Largest, count: int, vocabulary: Vocabulary) -> tuple[Prediction, ...]:
    """Returns the first `count` tokens as predictions. This function runs for every answer, so it avoids a constructor
    call for each prediction."""
    texts, partials = vocabulary.texts, vocabulary.partials
    ids = found.ids[:count]
    return tuple(
        [
            _made((token, texts[token], probability, logprob, partials[token]))
            for token, probability, logprob in zip(ids, found.probabilities, found.logprobs, strict=False)
        ]
    )


class Sampler:
    """Draws tokens. Equal seeds and logits give equal tokens."""

    def __init__(self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> None:
        """`temperature` 0 always draws the most probable token. If `top_k` or `top_p` is None, that limit excludes no
        tokens."""
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._random = np.random.default_rng(seed)

    def draw(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """Draws a token. Returns the token and its log-probability at temperature 1, without top-k and top-p."""
        logprobs = log_softmax(logits)
        token = int(logprobs.argmax()) if self._temperature == 0 else self._sample(logprobs)
        return token, float(logprobs[token])

    def _sample(self, logprobs: NDArray[np.float64]) -> int:
        """Applies the temperature, top-k and top-p, and draws a token. Top-p keeps the fewest tokens with a total
        probability of at least p."""
        # The largest value becomes exactly 0. Tiny temperatures therefore give 0 and -inf, never NaN.
        with np.errstate(over="ignore"):
            scaled = (logprobs - logprobs.max()) / self._temperature
        order = np.argsort(-scaled, kind="stable")[: self._top_k]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        cumulative = np.cumsum(weights)
        if self._top_p is not None:
            # A token is kept if the probabilities of all more probable tokens add up to less than p. At least one token
            # is kept.
            keep = int(np.searchsorted(cumulative, self._top_p, side="left")) + 1
            order, cumulative = order[:keep], cumulative[:keep]
        drawn = self._random.random() * cumulative[-1]
        return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(order) - 1)])
