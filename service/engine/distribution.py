"""What logits say of the next token: log-probabilities, and the most probable tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from models.vocabulary import Vocabulary
from service.engine.answers import Prediction
from service.engine.outputs import Largest, Top

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
    found = None if top is None else top.first(count)
    if found is not None:
        return listed(found, count, vocabulary)
    of_all = log_softmax(logits)
    least = np.partition(of_all, -count)[-count]
    candidates = np.flatnonzero(of_all >= least)  # with all that tie for the last places
    order = candidates[np.argsort(-of_all[candidates], kind="stable")][:count]
    logprobs = of_all[order]
    return listed(
        Largest(order.tolist(), logits[order].tolist(), logprobs.tolist(), np.exp(logprobs).tolist()), count, vocabulary
    )


def listed(found: Largest, count: int, vocabulary: Vocabulary) -> tuple[Prediction, ...]:
    """The first `count` of them. There are some with every answer: hence no call for each of their fields."""
    texts, partials = vocabulary.texts, vocabulary.partials
    ids = found.ids[:count]
    return tuple(
        [
            _made((token, texts[token], probability, logprob, partials[token]))
            for token, probability, logprob in zip(ids, found.probabilities, found.logprobs, strict=False)
        ]
    )
