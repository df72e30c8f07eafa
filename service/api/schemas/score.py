"""A text's log-probabilities, whole or as a stream."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.api.schemas.predict import ErrorBound, LatencyDocument, ModelDocument
from wane.service.types import StateSource


class ScoreProgressDocument(TypedDict):
    """In a stream: so many of all tokens were run."""

    done: int
    total: int


class ScoredTokensDocument(TypedDict):
    """In a stream: the tokens from `position` on, and the log-probability of each. With `truncated`, also the error
    bound of each; the first token's are null, for nothing predicts it."""

    position: int
    tokens: list[int]
    logprobs: list[float | None]
    error_bounds: NotRequired[list[ErrorBound]]


class ScoreSummaryDocument(ModelDocument):
    """How a text was scored.

    `chunks` ran side by side, each `warm_up` tokens or more before its first; `rounds` is 1, and 1 for every part of
    them that was run again. `max_residual`: how far a unit of the state was, at most, from where the chunk before had
    ended; 0: as in order, bit for bit. `error_bound`: the worst over all positions. `perplexity` is over the tokens
    that have a log-probability; null where none has.
    """

    perplexity: float | None
    chunks: int
    warm_up: int | None
    rounds: int
    max_residual: float
    state: StateSource
    error_bound: ErrorBound
    latency: LatencyDocument


class ScoreDocument(ScoreSummaryDocument):
    """The tokens that were scored, and the log-probability of each. With `truncated`, also the error bound of each, by
    the number of tokens before it; the first token's are null, for nothing predicts it."""

    tokens: list[int]
    logprobs: list[float | None]
    error_bounds: NotRequired[list[ErrorBound]]
