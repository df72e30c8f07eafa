"""The answers of a server. Durations are in milliseconds, probabilities in [0, 1].

`error_bound` bounds the total variation between the answered distribution and that of the model after the whole,
never-interrupted sequence. 0: the answer is exact. None: nothing is certified. 1 promises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, dataclass_transform

Mode = Literal["auto", "recurrent", "window", "both"]


@dataclass_transform(frozen_default=True)
class Data:
    """A frozen dataclass, as every class below it."""

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)


class Prediction(Data):
    """A candidate for the next token or event. `bytes` is present if the token alone is not valid UTF-8."""

    token_id: int
    token: str
    probability: float
    logprob: float
    bytes: tuple[int, ...] | None = None


class Latency(Data):
    """The time of a request in the engine: in the queue, in the run, and in total."""

    queue_ms: float
    compute_ms: float
    total_ms: float


class Agreement(Data):
    """How a window's answer agrees with the recurrent answer."""

    top1_match: bool
    top1_proved: bool
    total_variation: float
    kl: float
    max_logit_difference: float
    state_distance: float
    state_error_bound: float | None
    error_bound: float | None


class ModeAnswer(Data):
    """The answer of one mode, as a part of an answer in mode `both`."""

    predictions: tuple[Prediction, ...]
    latency: Latency


class Served(Data):
    """The model version that answered, and its device."""

    model: str
    model_version: str
    device: str


class Ran(Served, kw_only=True):
    """What the answers of a model's run have in common. `unknown` are the events that the vocabulary lacks.
    `cached_tokens` is the number of the first tokens that did not run, because the server had kept the state after
    them."""

    state: str
    error_bound: float | None
    latency: Latency
    cache_tokens: int | None = None
    unknown: tuple[str, ...] = ()
    cached_tokens: int = 0


class Answer(Ran, kw_only=True):
    """The predictions of the next token, the most probable first. `position` is the session's position."""

    mode: str
    window: int | None
    predictions: tuple[Prediction, ...]
    state_error_bound: float | None
    top1_proved: bool
    modes: dict[str, ModeAnswer] | None = None
    agreement: Agreement | None = None
    session: str | None = None
    position: int | None = None
    replayed: bool = False
    created: bool = False
    durable: bool | None = None
    seen_tokens: int | None = None


class Continuation(Answer, kw_only=True):
    """A continuation of a session, the log-probability of each of its tokens, and the prediction of the next one."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    error_bounds: tuple[float | None, ...]


class Continuations(Served):
    """The continuations of a session at `position`, in their order."""

    position: int
    results: tuple[Continuation, ...]


class SessionView(Served):
    """A session on a server."""

    mode: str
    position: int


class Score(Ran, kw_only=True):
    """The tokens of a sequence, and the log-probability of each. None: the token has no prediction, or the event was
    skipped."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    perplexity: float | None
    chunks: int
    rounds: int
    max_residual: float
    error_bounds: tuple[float | None, ...] | None = None
    predictions: tuple[tuple[Prediction, ...] | None, ...] | None = None
    warm_up: int | None = None


class GeneratedToken(Data):
    """A generated token. In a stream, `text` is what is final after it."""

    token_id: int
    token: str
    text: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    predictions: tuple[Prediction, ...] | None = None


class Generated(Ran, kw_only=True):
    """A generated text and its tokens. A stream's result has no `logprobs`: each of its tokens has its own."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    mode: str
    window: int | None
    logprobs: tuple[float, ...] = ()
    predictions: tuple[tuple[Prediction, ...], ...] | None = None
    session: str | None = None
    position: int | None = None


class Percentiles(Data):
    """The percentiles of a latency over repeated runs."""

    p50_ms: float
    p99_ms: float


class ComparedMode(Data):
    """Recurrent mode, or a window of one size, in a comparison. `latency` is by phase: queue, compute and total.
    `agreement` is None for recurrent mode."""

    mode: str
    window: int | None
    state: str
    predictions: tuple[Prediction, ...]
    latency: dict[str, Percentiles]
    error_bound: float | None
    agreement: Agreement | None


class Comparison(Served):
    """The comparison of one model's recurrent mode with windows, in the order of the request."""

    tokens: int
    repeat: int
    recurrent: ComparedMode
    windows: tuple[ComparedMode, ...]
    cache_tokens: int | None = None
    unknown: tuple[str, ...] = ()


class Certificate(Data):
    """Whether the model provably forgets. `reason` says why it is not certified."""

    contractive: bool
    certified: bool
    reason: str | None


class VocabularyFacts(Data):
    """The tokens of a model: of text, or `events`."""

    kind: str
    size: int
    eos_id: int


class Model(Data):
    """A served model. `k` is the number of tokens in its own window, and `k_epsilon` the smallest such number for each
    bound. `quality` has its claimed perplexities or recalls."""

    id: str
    model_version: str
    device: str
    description: str
    family: str
    k: int
    max_window: int
    k_epsilon: dict[str, int | None]
    vocabulary: VocabularyFacts
    certificate: Certificate
    unknown: str = "refuse"
    quality: Mapping[str, Any] | None = None


class Bucket(Data):
    """A bucket of a histogram: how many requests took at most `le_ms`; None: any time."""

    le_ms: float | None
    count: int


class Durations(Data):
    """The latency of `count` requests: quantiles, sum and histogram."""

    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    count: int
    sum_ms: float
    buckets: tuple[Bucket, ...]


class ModeReport(Data):
    """The requests of one mode, and the latency of each phase: queue, compute and total."""

    requests: int
    latency: dict[str, Durations]


class AgreementReport(Data):
    """The agreement of both modes over all comparisons, and by the source of the compared answers."""

    compared: int
    top1_match_rate: float | None
    top1_proved_rate: float | None
    total_variation: dict[str, float | None]
    max_logit_difference: float | None
    error_bound: dict[str, float | None]
    bound_violations: int
    sources: dict[str, AgreementReport] = field(default_factory=dict)


class ModelReport(Served):
    """One model's statistics since the start. `sessions` counts resident, parked and rebuilt ones."""

    modes: dict[str, ModeReport]
    operations: dict[str, int]
    agreement: AgreementReport
    shadow: dict[str, float]
    sessions: dict[str, int]


class Report(Data):
    """A server's statistics. `document` is all of it, as it was sent."""

    device: str
    models: tuple[ModelReport, ...]
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)
