"""What logits say of the next token: log-probabilities, and the most probable tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.vocabulary import Vocabulary
from service.engine.answers import Prediction


class Top(NamedTuple):
    """The largest of some logits, K of them in falling order, the smaller id first among equals, as a graph put them
    out; and what they come to, by the logarithm of the sum of the exponentials of all."""

    ids: list[int]
    logits: list[float]
    logprobs: list[float]
    probabilities: list[float]


_made = partial(tuple.__new__, Prediction)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities at temperature 1: float64 (V), from finite logits."""
    shifted = logits.astype(np.float64) - logits.max()
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def predictions(
    logits: NDArray[np.float32], count: int, vocabulary: Vocabulary, top: Top | None = None
) -> tuple[Prediction, ...]:
    """The `count` most probable tokens, most probable first, the smaller id first among equals.

    `top`: of the same logits; where it holds as many, they are not looked at.
    """
    count = min(count, len(logits))
    if top is not None and count <= len(top.ids):
        ids, _, logprobs, probabilities = top
        return _listed(ids[:count], probabilities, logprobs, vocabulary)
    of_all = log_softmax(logits)
    least = np.partition(of_all, -count)[-count]
    candidates = np.flatnonzero(of_all >= least)  # with all that tie for the last places
    order = candidates[np.argsort(-of_all[candidates], kind="stable")][:count]
    found = of_all[order]
    return _listed(order.tolist(), np.exp(found).tolist(), found.tolist(), vocabulary)


def _listed(
    tokens: list[int], probabilities: list[float], logprobs: list[float], vocabulary: Vocabulary
) -> tuple[Prediction, ...]:
    """One for each token. There are some with every answer: hence no call for each of their fields."""
    texts, partials = vocabulary.texts, vocabulary.partials
    return tuple(
        [
            _made((token, texts[token], probability, logprob, partials[token]))
            for token, probability, logprob in zip(tokens, probabilities, logprobs, strict=False)
        ]
    )
