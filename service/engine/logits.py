"""Computes log-probabilities and the most probable tokens from logits. Draws tokens, with a bias for each token,
penalties, temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wane.models.vocabulary import Vocabulary
from wane.service.batching.batch import Top
from wane.service.runners.outputs import Largest
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


def most_probable(
    logprobs: NDArray[np.float64], count: int, also: int, vocabulary: Vocabulary
) -> tuple[Prediction, ...]:
    """Returns the `count` most probable tokens, as in `predictions`, and the token `also` at the end if it is not one
    of them. Its log-probability is the same float as in `logprobs`, float64 (V)."""
    count = min(count, len(logprobs))
    ids: list[int] = []
    if count:
        least = np.partition(logprobs, -count)[-count]
        candidates = np.flatnonzero(logprobs >= least)  # includes all ties for the last place
        ids = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count].tolist()
    if also not in ids:
        ids.append(also)
    texts, partials = vocabulary.texts, vocabulary.partials
    found = logprobs[ids]
    return tuple(
        [
            _made((token, texts[token], probability, logprob, partials[token]))
            for token, probability, logprob in zip(ids, np.exp(found).tolist(), found.tolist(), strict=True)
        ]
    )


FORCE, FORBID = 100.0, -100.0
"""If any token has the bias FORCE, only tokens with that bias are drawn. A token with the bias FORBID is never drawn.
"""


class Preferences:
    """Changes log-probabilities before a token is drawn. Adds a bias to each token, and subtracts penalties from the
    tokens that were drawn before.

    `presence` is subtracted once from every token that was drawn before. `frequency` is subtracted once for each time
    that the token was drawn. If any token's bias is FORCE or more, only tokens with such a bias are drawn. Tokens with
    a bias of FORBID or less are never drawn.
    """

    def __init__(self, size: int, bias: Mapping[int, float], presence: float, frequency: float) -> None:
        """`size` is the number of tokens in the vocabulary. `bias` maps token ids to biases. It must not forbid every
        token."""
        self._presence = presence
        self._frequency = frequency
        self._drawn: dict[int, int] = {}
        self._bias = np.zeros(size)
        forced = [token for token, value in bias.items() if value >= FORCE]
        for token, value in bias.items():
            self._bias[token] = -np.inf if value <= FORBID else value
        if forced:
            allowed = np.full(size, -np.inf)
            allowed[forced] = 0.0
            self._bias = allowed

    def apply(self, logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the values to draw from: float64 (V), -inf for a token that is never drawn."""
        preferred: NDArray[np.float64] = logprobs + self._bias
        for token, times in self._drawn.items():
            preferred[token] -= self._presence + self._frequency * times
        return preferred

    def note(self, token: int) -> None:
        """Counts a token that was drawn."""
        if self._presence or self._frequency:
            self._drawn[token] = self._drawn.get(token, 0) + 1


class Sampler:
    """Draws tokens. Samplers with the same parameters, including a seed, draw the same tokens from the same logits."""

    def __init__(
        self,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int | None,
        sample: int = 0,
        preferences: Preferences | None = None,
    ) -> None:
        """`temperature` 0 always draws the most probable token. top_k or top_p excludes no tokens if it is None.
        `sample` is the index of this sample among several samples with the same seed. Different indices give different
        random numbers."""
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._random = np.random.default_rng([seed, sample] if sample and seed is not None else seed)
        self._preferences = preferences

    def draw(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """Draws a token. Returns the token and its log-probability at temperature 1, without bias, penalties, top-k and
        top-p."""
        logprobs = log_softmax(logits)
        token = self.choose(logprobs)
        return token, float(logprobs[token])

    def choose(self, logprobs: NDArray[np.float64]) -> int:
        """Draws a token by its log-probability at temperature 1: float64 (V)."""
        preferences = self._preferences
        if preferences is not None:
            logprobs = preferences.apply(logprobs)
        token = int(logprobs.argmax()) if self._temperature == 0 else self._sample(logprobs)
        if preferences is not None:
            preferences.note(token)
        return token

    def _sample(self, logprobs: NDArray[np.float64]) -> int:
        """Applies the temperature, top-k and top-p, and draws a token. Top-p keeps the fewest tokens with a total
        probability of at least p."""
        # The largest value becomes exactly 0. Tiny temperatures therefore give 0 and -inf, never NaN.
        with np.errstate(over="ignore"):
            scaled = (logprobs - logprobs.max()) / self._temperature
        order = np.argsort(-scaled, kind="stable")[: self._top_k]
        if self._preferences is not None:
            order = order[np.isfinite(scaled[order])]  # without the tokens that are never drawn
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
