"""What logits say of the next token: log-probabilities, and the most probable tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.vocabulary import Vocabulary
from service.engine.answers import Prediction


@dataclass(slots=True, eq=False)
class Top:
    """The largest of some logits, as a graph put them out: ids int64 (K), logits float32 (K), in falling order, the
    smaller id first among equals; and the logarithm of the sum of all their exponentials."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    log_sum_exp: float


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
        total = top.log_sum_exp
        # The sum is rounded: of a token that is all but certain the difference may be above 0.
        logprobs = [min(value - total, 0.0) for value in top.logits[:count].tolist()]
        return _listed(top.ids[:count].tolist(), logprobs, vocabulary)
    of_all = log_softmax(logits)
    least = np.partition(of_all, -count)[-count]
    candidates = np.flatnonzero(of_all >= least)  # with all that tie for the last places
    order = candidates[np.argsort(-of_all[candidates], kind="stable")][:count]
    return _listed(order.tolist(), of_all[order].tolist(), vocabulary)


def _listed(tokens: list[int], logprobs: list[float], vocabulary: Vocabulary) -> tuple[Prediction, ...]:
    """One for each token. There are some with every answer: hence no call for each of their fields."""
    texts, partials, exp, make = vocabulary.texts, vocabulary.partials, math.exp, Prediction._make
    return tuple(
        [
            make((token, texts[token], exp(logprob), logprob, partials[token]))
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
    )
