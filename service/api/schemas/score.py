"""A text's log-probabilities, whole or as a stream."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.api.schemas.common import (
    HISTORY,
    AtMost,
    Model,
    SequenceBody,
    Tokens,
    Tolerance,
    Truncated,
    WireScoreMethod,
)
from wane.service.api.schemas.predict import ErrorBound, LatencyDocument, ModelDocument
from wane.service.types import (
    ScoreMethod,
    StateSource,
)


class ScoreBody(SequenceBody):
    """One log-probability for each token of a sequence."""

    examples = (
        {"input": f"{HISTORY} town"},
        {"tokens": [5, 6, 7], "method": "sequential"},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": f"{HISTORY} town", "method": "parallel", "tolerance": 0, "stream": True},
    )

    tokens: Annotated[Tokens | None, AtMost("max_scored_tokens", of_tokens=True)] = None
    model: Model = None
    method: WireScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: Tolerance | None = Field(
        default=None, description="the largest error, as total variation, that chunks side by side may add, 0 to 1"
    )
    truncated: Truncated = False
    stream: bool = Field(
        default=False, description="answer by server-sent events: `progress`, `tokens`, then `finish` or `error`"
    )


class ScoreProgressDocument(TypedDict):
    """In a stream: how many of all tokens were run."""

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
