"""What logits say of the next token: log-probabilities, and the most probable tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.vocabulary import Vocabulary
from service.engine.types import Prediction


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities at temperature 1: float64 (V), from finite logits."""
    shifted = logits.astype(np.float64) - logits.max()
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def predictions(logits: NDArray[np.float32], count: int, vocabulary: Vocabulary) -> tuple[Prediction, ...]:
    """The `count` most probable tokens, most probable first, the smaller id first among equals."""
    logprobs = log_softmax(logits)
    count = min(count, len(logprobs))
    least = np.partition(logprobs, -count)[-count]
    candidates = np.flatnonzero(logprobs >= least)  # with all that tie for the last places
    order = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count]
    return tuple(_prediction(int(token), float(logprobs[token]), vocabulary) for token in order)


def _prediction(token: int, logprob: float, vocabulary: Vocabulary) -> Prediction:
    return Prediction(
        token_id=token,
        token=vocabulary.token(token),
        probability=float(np.exp(logprob)),
        logprob=logprob,
        token_bytes=partial_bytes(token, vocabulary),
    )


def partial_bytes(token: int, vocabulary: Vocabulary) -> bytes | None:
    """A token's bytes where its text does not say them all: where they are no whole UTF-8 characters."""
    raw = vocabulary.token_bytes(token)
    return None if raw == vocabulary.token(token).encode() else raw
