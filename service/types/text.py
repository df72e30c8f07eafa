"""The results about a whole text: scores, generations, and comparisons of modes and windows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from wane.service.types.answer import Agreement, Places, Prediction
from wane.service.types.common import (
    CacheTokens,
    ErrorBound,
    Logprob,
    Result,
    Served,
    ServedPrompt,
    Source,
    TokenBytes,
    TokenId,
    UnknownNames,
    UsedMode,
    UsedWindow,
    says,
)
from wane.service.types.request import Latency


class ScoreProgress(Result):
    """An event in the stream of a score."""

    done: Annotated[int, says("the number of tokens that have been run")]
    total: Annotated[int, says("the number of tokens of the request")]


ScoredIds = Annotated[Sequence[int | None], says("the scored token ids; null at the place of a skipped event")]
Logprobs = Annotated[
    Sequence[float | None],
    says("the natural logarithm of each token's probability, given the tokens before it; null without a prediction"),
]
ErrorBounds = Annotated[
    Sequence[ErrorBound] | None,
    says("only with `truncated`: the error bound of each token, which depends on the number of tokens before it"),
]


class ScoredTokens(Result):
    """An event in the stream of a score: the next scored tokens. With `truncated`, the first token has no prediction,
    so its log-probability and its error bound are null."""

    position: Annotated[int, says("the index of the first of these tokens in the request")]
    tokens: ScoredIds
    logprobs: Logprobs
    error_bounds: ErrorBounds = None
    predictions: Places = None


class ScoreSummary(ServedPrompt):
    """How a text was scored. Each chunk that ran in parallel started at least `warm_up` tokens before its first scored
    token. If `max_residual` is 0, the result is bit for bit that of a sequential run."""

    perplexity: float | None
    """the perplexity of the tokens that have a log-probability; null if there are none"""
    chunks: Annotated[int, says("the number of chunks that ran in parallel")]
    warm_up: Annotated[int | None, says("the least number of tokens that a chunk ran before its first scored token")]
    rounds: Annotated[int, says("1 plus the number of parts of chunks that were run again")]
    max_residual: float
    """the largest difference between a unit of a chunk's start state and the same unit of the previous chunk's end
    state"""
    state: Source
    error_bound: Annotated[ErrorBound, says("the largest error bound of all positions; null: not certified")]
    latency: Annotated[Latency, says("how long the request took in the engine")]
    cache_tokens: CacheTokens = None
    unknown: UnknownNames = None


class Score(ScoreSummary, kw_only=True):
    """The tokens that were scored, and the log-probability of each token. With `truncated`, the first token has no
    prediction, so its log-probability and its error bound are null. The first token of a model with a zero start has no
    prediction either. At the place of a skipped event, all of these are null."""

    tokens: ScoredIds
    logprobs: Logprobs
    error_bounds: ErrorBounds = None
    predictions: Places = None


class FinishReason(StrEnum):
    """Why a generation ended. `stop` means a stop string or the end of an event sequence. `length` means the limit on
    the number of tokens."""

    STOP = "stop"
    LENGTH = "length"


class GeneratedToken(Result):
    """A generated token."""

    token_id: TokenId
    token: Annotated[str, says("the token's text, or the event's name")]
    text: str
    """the additional text that is final after this token; empty while a character or a possible stop string is
    incomplete"""
    logprob: Logprob
    bytes: TokenBytes = None
    predictions: tuple[Prediction, ...] | None = None
    """only with `top_logprobs`: the most probable tokens at this token's position, most probable first, and the token
    itself at the end if it is not one of them; before bias and penalties"""


class Finish(ServedPrompt):
    """The last event in the stream of a generation. This event has the whole answer, except the tokens'
    log-probabilities."""

    text: Annotated[str, says("the generated text, up to the first stop string")]
    tokens: Annotated[tuple[int, ...], says("the ids of the generated tokens")]
    finish_reason: FinishReason
    """stop: a stop string, or the end of an event sequence; length: the limit `max_tokens`"""
    mode: UsedMode
    window: UsedWindow
    state: Source
    error_bound: ErrorBound
    """the largest error bound of the distributions from which the tokens were sampled, each compared with the
    never-interrupted model's distribution after the same tokens; null: not certified"""
    latency: Annotated[Latency, says("how long the request took in the engine")]
    cache_tokens: CacheTokens = None
    session: Annotated[str | None, says("only if the generation continued a session: its id")] = None
    position: Annotated[int | None, says("only if the generation continued a session: its number of tokens")] = None
    unknown: UnknownNames = None


class Generated(Finish, kw_only=True):
    """The generated text and tokens."""

    logprobs: Annotated[tuple[float, ...], says("the log-probability of each generated token")]
    predictions: Places = None


class Percentiles(Result):
    """Statistics of the latency of one phase, over the repeated runs."""

    p50_ms: Annotated[float, says("the median, in milliseconds")]
    p99_ms: Annotated[float, says("the 99th percentile, in milliseconds")]


class Phases(Result):
    """Statistics of the latency of each phase, over the repeated runs."""

    queue: Annotated[Percentiles, says("the time in the queue")]
    compute: Annotated[Percentiles, says("the time of the run")]
    total: Annotated[Percentiles, says("the time from the start of the request in the engine to its answer")]


class ComparedMode(Result):
    """The results of one mode or window in a comparison. The recurrent result's latency is that of one step from a
    resident state, as for one new token of a session."""

    mode: UsedMode
    window: UsedWindow
    state: Source
    predictions: Annotated[tuple[Prediction, ...], says("the most probable tokens, most probable first")]
    latency: Annotated[Phases, says("how long the repeated runs took")]
    error_bound: ErrorBound
    agreement: Agreement | None
    """the agreement of the window with the recurrent answer; null for the recurrent result"""


class Comparison(Served):
    """The comparison of recurrent mode with windows, for one model."""

    tokens: Annotated[int, says("the number of tokens in the input")]
    repeat: Annotated[int, says("the number of runs of each mode and window")]
    recurrent: Annotated[ComparedMode, says("the result of recurrent mode")]
    windows: Annotated[tuple[ComparedMode, ...], says("the result of each window, in the request's order")]
    cache_tokens: CacheTokens = None
    unknown: UnknownNames = None


class Comparisons(Result):
    """The answer to a comparison request."""

    device: Annotated[str, says("the device that ran the models")]
    models: Annotated[tuple[Comparison, ...], says("a comparison for each requested model")]
