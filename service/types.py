"""The requests and results of the engine, and other types that several parts of the service use.

All of these types are immutable. The constructor of a request validates its fields and raises `InvalidRequest`. The
engine checks the limits that depend on a model or on the settings (vocabulary, largest window, longest input).

`service/api/encode.py` encodes results field by field. The OpenAPI description is generated from the results'
docstrings and fields. Each field is a member of a JSON object. A field with the default None is omitted if its value is
None. Every other field is always present.

Token ids are ints. A *position* is the number of tokens of a sequence, without its leading start token. Deadlines are
in seconds on the event loop's clock. Durations are in milliseconds.

Inside the service, a session's name consists of its owner's name, a slash, and the session's id. Two owners may
therefore use the same id for different sessions, and an owner cannot access another owner's session. Without API keys,
a session's name is its id. An id has no slash, so such a name never equals the name of another owner's session.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.errors import InvalidRequest


class Mode(StrEnum):
    """The mode of a request."""

    AUTO = "auto"
    RECURRENT = "recurrent"
    WINDOW = "window"
    BOTH = "both"


class StateSource(StrEnum):
    """The source of the state from which an answer was computed. It is the answer's field `state`."""

    RESIDENT = "resident"
    REBUILT = "rebuilt"
    WINDOW = "window"
    FULL = "full"


Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""The state of a model version, as in the Open Inference Protocol's model repository."""

SLASH = "/"


class Owner(NamedTuple):
    """The owner of sessions. `name` is the name of an API key, or "" without API keys. `sessions` is the largest number
    of sessions that the owner may have. None means no limit."""

    name: str = ""
    sessions: int | None = None


ANYBODY = Owner()


def name_within(owner: str, session: str) -> str:
    """Returns the name of the session with the id `session` that belongs to the owner with the name `owner`. Raises
    InvalidRequest if the id is invalid."""
    check_session_id(session)
    return owner + SLASH + session if owner else session


def id_of(session: str) -> str:
    """Returns a session's id, given the session's name."""
    return session.rpartition(SLASH)[2]


def owner_of(session: str) -> str:
    """Returns the name of a session's owner, given the session's name."""
    return session.rpartition(SLASH)[0]


# An id must not be `.` or `..`, because clients and proxies remove them from a path.
SESSION_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:-]{1,128}")

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PENALTY = 2
MAX_BIAS = 100
MAX_COMPARED_MODELS = 8
MAX_COMPARED_WINDOWS = 32
MAX_REPEAT = 1000
MAX_KEY_CHARACTERS = 255
MAX_POSITION = 10**14  # integers in the stores' scripts are exact up to 2^53, about 9 * 10^15

WINDOW_MODES = (Mode.AUTO, Mode.WINDOW, Mode.BOTH)
"""The modes in which a prediction request may set `window`."""

TOLERANCE_MODES = (Mode.AUTO,)
GENERATED_MODES = (Mode.AUTO, Mode.RECURRENT, Mode.WINDOW)
GENERATED_WINDOW_MODES = (Mode.WINDOW,)


class ScoreMethod(StrEnum):
    """The methods of scoring a text."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the tokens that an answer may list. The filter does not change the tokens' probabilities: they remain
    those of the whole distribution. All fields except `include_unknown` are only for models of events.

    `exclude` are the ids of tokens that are not listed. If `exclude_seen`, the sequence's own tokens are not listed
    either, as far as the server knows them. If `candidates` is not None, only these ids are listed. `<eos>` is listed
    only if `include_end`, and `<unk>` only if `include_unknown`. `unknown` are the names of the request's candidates
    that the vocabulary lacks.
    """

    exclude: tuple[int, ...] = ()
    exclude_seen: bool = False
    candidates: tuple[int, ...] | None = None
    include_end: bool = False
    unknown: tuple[str, ...] = ()
    include_unknown: bool = False


NO_FILTER = Filter()


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Predict the token after `tokens`, or the next token of `session` without appending to it.

    `window` is k, the number of tokens in a window of mode auto, window or both. The default is the model's own k.
    `tolerance` is the largest accepted error bound of an answer in mode auto. With a session, auto means the session's
    own mode, and an answer whose bound exceeds the tolerance is an error. A request with a field that its mode does not
    use is invalid. If `truncated`, the tokens are the end of a longer sequence, and the start token is not fed. If
    `prove`, run the gradient proof (`engine/top1_proof.py`), which may prove the most probable token and may lower the
    error bound. If `cache`, mix the network's distribution with the distribution of the model's cache, if the model has
    a cache. If `logits`, the answer has `logits`. `filter` selects the tokens that the answer lists. `unknown` are the
    names of the request's events that the vocabulary lacks. If all events were skipped, `tokens` is empty, and the
    answer is the prediction after an empty sequence.
    """

    tokens: tuple[int, ...] = ()
    mode: Mode = Mode.AUTO
    window: int | None = None
    tolerance: float | None = None
    top_k: int = 5
    session: str | None = None
    deadline: float | None = None
    truncated: bool = False
    prove: bool = False
    cache: bool = True
    logits: bool = False
    filter: Filter = NO_FILTER
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.session is None:
            _some_tokens(self.tokens, self.unknown)
        elif self.tokens:
            raise InvalidRequest(
                "a prediction from a session cannot append tokens to it: give session or tokens, not both", "session"
            )
        elif self.truncated:
            raise InvalidRequest("truncated cannot be combined with session", "truncated")
        _window(self.window, self.mode, *WINDOW_MODES)
        if self.tolerance is not None:
            _within("tolerance", self.tolerance, 0, 1)
            if self.mode not in TOLERANCE_MODES:
                raise InvalidRequest(
                    f"tolerance is given, but mode is {self.mode}; only mode auto has a tolerance", "tolerance"
                )
        _at_least("top_k", self.top_k, 1)


@dataclass(frozen=True, slots=True)
class History:
    """The last tokens of a sequence that a new session continues at `position`.

    If there are `position` tokens, they are the whole sequence, and the start token is fed before them. If there are
    fewer tokens, they are the end of the sequence.
    """

    tokens: tuple[int, ...]
    position: int

    def __post_init__(self) -> None:
        _within("position", self.position, 0, MAX_POSITION)
        if self.position and not self.tokens:
            raise InvalidRequest(
                f"position is {self.position}, but the history is empty: give the last tokens before that position",
                "history",
            )
        if len(self.tokens) > self.position:
            raise InvalidRequest(
                f"the history has {len(self.tokens)} tokens, but must have at most {self.position}, because "
                f"position is {self.position}",
                "position",
            )


@dataclass(slots=True)
class StepRequest:
    """Append `tokens` to a session and predict the next token. `mode` defaults to the session's mode. `PredictRequest`
    describes `prove`, `cache`, `logits`, `filter` and `unknown`. A step whose events were all skipped has no tokens and
    appends nothing. If `token_logprobs`, the answer has the log-probability of each token. If the session does not
    exist, the step creates it for `creator`, in mode auto. If `creator` is None, such a step fails."""

    session: str
    tokens: tuple[int, ...]
    mode: Mode | None = None
    expected_position: int | None = None
    idempotency_key: str | None = None
    top_k: int = 5
    deadline: float | None = None
    prove: bool = False
    cache: bool = True
    logits: bool = False
    token_logprobs: bool = False
    filter: Filter = NO_FILTER
    unknown: tuple[str, ...] = ()
    creator: Owner | None = None

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown)
        if self.expected_position is not None:
            _at_least("expected_position", self.expected_position, 0)
        if self.idempotency_key is not None and not 1 <= len(self.idempotency_key) <= MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"idempotency_key has {len(self.idempotency_key)} characters, but must have 1 to {MAX_KEY_CHARACTERS}",
                "idempotency_key",
            )
        _at_least("top_k", self.top_k, 1)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Compute the log-probability of each token, given the tokens before it. `tolerance` is the largest accepted bound
    of the error (total variation) that the method parallel adds. The method sequential adds no error. If `truncated`,
    the tokens are the end of a longer sequence. The start token is not fed, so the first token has no prediction.
    `PredictRequest` describes `cache`. `top_k` is the number of most probable tokens to list at the position of each
    token. If `top_k` is None, no tokens are listed. `include_unknown` says whether the lists may contain `<unk>` where
    it is not the token itself. `unknown`: see `PredictRequest`. `skipped` are the indexes of the
    skipped events in the request's list of events, ascending. The score has null at these indexes.
    """

    tokens: tuple[int, ...]
    method: ScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: float | None = None
    deadline: float | None = None
    truncated: bool = False
    cache: bool = True
    top_k: int | None = None
    unknown: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    include_unknown: bool = False

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown)
        if self.tolerance is not None:
            _within("tolerance", self.tolerance, 0, 1)
        if self.top_k is not None:
            _at_least("top_k", self.top_k, 0)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Generate up to `max_tokens` tokens that continue `tokens`, or the tokens of `session`. The session does not
    change. `position` is the session's expected position.

    A `temperature` of 0 always selects the most probable token. If `top_k` and `top_p` are None, every token can be
    sampled. The same `seed` gives the same text. If the client wants several samples, each is a request of its own, and
    `sample` is its index. Samples with the same seed and different indices use different random numbers. The text ends
    before the first of the `stop` strings. Mode auto means the session's own mode or, without a session, recurrent.
    `window` is the number of tokens in a window of mode window. If `truncated`, the tokens are the end of a longer
    sequence, and the start token is not fed. `PredictRequest` describes `cache` and `unknown`. `engine/logits.py`
    describes `presence_penalty`, `frequency_penalty` and `logit_bias`. `top_logprobs` is the number of most probable
    tokens to list at the position of each token. If `top_logprobs` is None, no tokens are listed. `<unk>` is drawn and
    listed only if `include_unknown`.
    """

    tokens: tuple[int, ...] = ()
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    mode: Mode = Mode.AUTO
    window: int | None = None
    deadline: float | None = None
    truncated: bool = False
    cache: bool = True
    session: str | None = None
    position: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int | None = None
    sample: int = 0
    unknown: tuple[str, ...] = ()
    include_unknown: bool = False

    def __post_init__(self) -> None:
        if self.session is None:
            _some_tokens(self.tokens, self.unknown)
            if self.position is not None:
                raise InvalidRequest("position is given without a session", "position")
        elif self.tokens:
            raise InvalidRequest(
                "a generation from a session cannot append input to it: give session or tokens, not both", "session"
            )
        elif self.truncated:
            raise InvalidRequest("truncated cannot be combined with session", "truncated")
        if self.position is not None:
            _at_least("position", self.position, 0)
        _within("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _within("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        for token, value in (self.logit_bias or {}).items():
            if not -MAX_BIAS <= value <= MAX_BIAS:
                raise InvalidRequest(
                    f"logit_bias of token {token} is {value}, but must be a number from -{MAX_BIAS} to {MAX_BIAS}",
                    "logit_bias",
                )
        if self.top_logprobs is not None:
            _at_least("top_logprobs", self.top_logprobs, 0)
        _at_least("max_tokens", self.max_tokens, 1)
        if not 0 <= self.temperature < math.inf:
            raise InvalidRequest(
                f"temperature is {self.temperature}, but must be a finite number, 0 or more", "temperature"
            )
        if self.top_k is not None:
            _at_least("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}, but must be over 0 and at most 1", "top_p")
        if self.seed is not None:
            _at_least("seed", self.seed, 0)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop holds {len(self.stop)} strings, but must hold at most {MAX_STOPS}", "stop")
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"stop[{index}] has {len(text)} characters, but must have 1 to {MAX_STOP_CHARACTERS}",
                    f"stop[{index}]",
                )
        if self.mode not in GENERATED_MODES:
            raise InvalidRequest("mode is both, but text is generated only in mode auto, recurrent or window", "mode")
        _window(self.window, self.mode, *GENERATED_WINDOW_MODES)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Measure recurrent mode and windows of several sizes. Recurrent mode and each window predict the token after
    `tokens`, `repeat` times. `PredictRequest` describes `cache` and `unknown`."""

    tokens: tuple[int, ...]
    windows: tuple[int, ...] = (8, 16, 32, 64)
    repeat: int = 20
    deadline: float | None = None
    cache: bool = True
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown)
        if not 1 <= len(self.windows) <= MAX_COMPARED_WINDOWS:
            raise InvalidRequest(
                f"windows holds {len(self.windows)} values, but must hold 1 to {MAX_COMPARED_WINDOWS}",
                "windows",
            )
        for index, window in enumerate(self.windows):
            _at_least(f"windows[{index}]", window, 1)
        _within("repeat", self.repeat, 1, MAX_REPEAT)


def check_session_id(session: str) -> None:
    """Raises InvalidRequest unless `session` has 1 to 128 letters, digits and `.` `_` `~` `:` `-`, and is not `.` or
    `..`."""
    if SESSION_ID.fullmatch(session) is None:
        raise InvalidRequest('session must be 1 to 128 letters, digits and . _ ~ : -, but not "." or ".."', "session")


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidRequest(f"{field} is {value}, but must be at least {least}", field)


def _within(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest unless `value` is in the range. NaN is always invalid."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}, but must be a number from {low:g} to {high:g}", field)


def _some_tokens(tokens: tuple[int, ...], unknown: tuple[str, ...]) -> None:
    if not tokens and not unknown:
        raise InvalidRequest("the input is empty: give at least one token", "tokens")


def _window(window: int | None, mode: Mode, *takes: Mode) -> None:
    """Raises InvalidRequest if the window is invalid or the mode does not use a window."""
    if window is None:
        return
    _at_least("window", window, 1)
    if mode not in takes:
        raise InvalidRequest(
            f"window is given, but mode is {mode}; modes with a window are {', '.join(takes)}", "window"
        )


ErrorBound = Annotated[
    float | None,
    Field(
        description="upper bound of the total variation between the answer's distribution and the never-interrupted "
        "model's distribution, at temperature 1 and before "
        "top-k or top-p. The bound is proved, except for the rounding of float32 runs, which was measured. 0: the "
        "answer is exact, except for that rounding. null: the answer is not certified. 1: the bound guarantees nothing"
    ),
]
StateErrorBound = Annotated[
    float | None,
    Field(
        description="upper bound of the 2-norm distance between the output layer's input in this run and its input in "
        "the never-interrupted model; null: the answer is not certified"
    ),
]


def _never_null(schema: dict[str, Any]) -> None:
    del schema["default"]
    schema.update(schema.pop("anyOf")[0])


LEFT_OUT = Field(json_schema_extra=_never_null)
"""Marks a field that is omitted from JSON if its value is None. In JSON, the field is therefore never null."""

CACHE_TOKENS = (
    "the number of tokens in the model's cache; present only if the model has a cache and the request uses it"
)
CacheTokens = Annotated[
    int | None,
    Field(description=CACHE_TOKENS),
    LEFT_OUT,
]

UNKNOWN = (
    "the names of events that the vocabulary lacks; present only if the request has such a name in its events or "
    "candidates"
)
UnknownNames = Annotated[tuple[str, ...] | None, Field(description=UNKNOWN), LEFT_OUT]

SEEN_TOKENS = (
    "the number of the sequence's last tokens that the server knows, and that are therefore not listed; present only "
    "with `exclude_seen`"
)

PLACES = (
    "only if the request asks for them: for each token, the most probable tokens at its position, "
    "most probable first, and "
    "the token itself at the end if it is not one of them; null for a token that has no prediction"
)

CREATED = (
    "true if the step created the session, or is a retry of the step that created it; otherwise absent. If it is true, "
    "but the client expected the session to exist, the session's earlier tokens have expired"
)

DURABLE = (
    "true: the session store has acknowledged the session's latest tokens; present only if replicas share the store"
)


class ModelDocument(TypedDict):
    """The model version that computed an answer, and its device."""

    model: str
    model_version: str
    device: str


class PredictionDocument(TypedDict):
    """A candidate for the next token. `bytes` is present only if the token alone is not valid UTF-8."""

    token_id: int
    token: str
    probability: float
    logprob: float
    bytes: NotRequired[list[int]]


class LatencyDocument(TypedDict):
    """The latency of each phase of a request in the engine, in milliseconds. It does not include tokenising the
    text."""

    queue_ms: float
    compute_ms: float
    total_ms: float


class Prediction(NamedTuple):
    """A candidate for the next token. `token_bytes` is present only if the token alone is not valid UTF-8."""

    token_id: int
    token: str
    probability: float
    logprob: float
    token_bytes: bytes | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema of a JSON object, because pydantic would describe a named tuple as an array. The class is
        a named tuple because a tuple is created faster than a dataclass."""
        return handler(PredictionDocument)


class Latency(NamedTuple):
    """The latency of a request in the engine: the time in the queue, the time of the run, and the total. This latency
    does not include reading the request and tokenising its text. `batch_items` is the number of requests in the largest
    batch that contained the request.
    """

    queue_ms: float
    compute_ms: float
    total_ms: float
    batch_items: int = 0

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the schema of a JSON object, because pydantic would describe a named tuple as an array. The class is
        a named tuple because a tuple is created faster than a dataclass."""
        return handler(LatencyDocument)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of the window's answer with the recurrent answer. `top1_match` is true if the two answers have the
    same most probable token. `top1_proved` is true if the window's run alone, without the recurrent answer, proves that
    they match."""

    top1_match: bool
    top1_proved: bool
    total_variation: float
    kl: float
    max_logit_difference: float
    state_distance: float
    state_error_bound: StateErrorBound
    error_bound: ErrorBound


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The answer of one of the two modes, as a part of an answer in mode `both`."""

    predictions: tuple[Prediction, ...]
    latency: Latency


@dataclass(slots=True)
class Answer:
    """The predictions of the next token, and how they were computed.

    `mode` is the mode that was used. `window` is the window size k of an answer from a window. `top1_proved` is true if
    the never-interrupted model provably has the same first prediction. `position` is present for sessions only, and
    `replayed` for steps only. `created` is true if the step created the session, or if the step is a replay of the step
    that created it. `durable` is true if replicas share the session store, which has acknowledged the session's tokens.
    Otherwise it is absent. `cache_tokens` is present if the answer is a mixture with the model's cache, and is the
    number of tokens in the cache. `logits`, float32 (V), are present if the request asked for them, and are never in
    JSON. The logits of a mixture are its log-probabilities. `token_logprobs` are present if the request asked for them:
    the log-probability of each token of a step, in recurrent mode. With a zero start, the value of the sequence's first
    token is None. `unknown` is present if the request has events that the vocabulary lacks, and lists their names.
    `seen_tokens` is present if the request has `exclude_seen`, and is the number of the sequence's tokens that the
    server knows. A model with a zero start predicts nothing before the first token, so `predictions` is empty there.
    """

    mode: Mode
    predictions: tuple[Prediction, ...]
    latency: Latency
    state: StateSource
    error_bound: float | None
    window: int | None = None
    modes: dict[Mode, ModeAnswer] | None = None
    agreement: Agreement | None = None
    state_error_bound: float | None = None
    top1_proved: bool = False
    session: str | None = None
    position: int | None = None
    replayed: bool | None = None
    created: bool | None = None
    durable: bool | None = None
    cache_tokens: int | None = None
    logits: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    token_logprobs: tuple[float | None, ...] | None = None
    unknown: tuple[str, ...] | None = None
    seen_tokens: int | None = None


Identity = tuple[str, str, str]
"""The model, version and device of an engine, in the order of the fields of `Served`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model version that computed an answer, and its device."""

    model: str
    model_version: str
    device: str


@dataclass(frozen=True, slots=True)
class SessionView(Served):
    """A session as its owner sees it. `position` is the number of the session's tokens, without the start token <eos>.

    `state` is the source of the state for an answer in the session's own mode at this time. `state` is `resident`, or
    `rebuilt` for a session without a resident state, or `window`. `error_bound` is the error bound of such an answer.
    """

    session: str
    mode: Mode
    position: int
    state: StateSource
    error_bound: ErrorBound
    idle_s: float
    durable: Annotated[bool | None, Field(description=DURABLE), LEFT_OUT] = None
    unknown: UnknownNames = None


@dataclass(frozen=True, slots=True)
class SessionState(Served):
    """The hidden vector of a session, for a ranker or an index outside of the server. `hidden` is the input of the
    output layer after `position` tokens, float32 (H). JSON contains the exact float32 values. `state` says where the
    state comes from (`StateSource`)."""

    session: str
    position: int
    state: StateSource
    hidden: tuple[float, ...]
    state_error_bound: StateErrorBound
    durable: Annotated[bool | None, Field(description=DURABLE), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class NewSession(SessionView):
    """A session that the request has created."""


@dataclass(frozen=True, slots=True)
class ScoreProgress:
    """An event in the stream of a score. `done` is the number of tokens that have been run, out of `total`."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """An event in the stream of a score: the next scored tokens, of which the first is at `position`, and the
    log-probability of each token. With `truncated`, it also has the error bound of each token. The first token then has
    no prediction, so its log-probability and its error bound are null. With `top_k`, it also has the most probable
    tokens at each position. At the place of a skipped event, all of these are null."""

    position: int
    tokens: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    error_bounds: Annotated[tuple[ErrorBound, ...] | None, LEFT_OUT] = None
    predictions: Annotated[tuple[tuple[Prediction, ...] | None, ...] | None, Field(description=PLACES), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class ScoreSummary(Served):
    """How a text was scored. `chunks` is the number of chunks that ran in parallel. Each chunk started at least
    `warm_up` tokens before its first scored token. `rounds` is 1 plus the number of parts of chunks that were run
    again. `max_residual` is the largest difference between a unit of a chunk's start state and the same unit of the
    previous chunk's end state. If `max_residual` is 0, the result is bit for bit that of a sequential run.
    `error_bound` is the largest error bound of all positions. `perplexity` is computed from the tokens that have a
    log-probability. `perplexity` is null if no token has a log-probability.
    """

    perplexity: float | None
    chunks: int
    warm_up: int | None
    rounds: int
    max_residual: float
    state: StateSource
    error_bound: ErrorBound
    latency: Latency
    cache_tokens: CacheTokens = field(default=None, kw_only=True)
    unknown: UnknownNames = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Score(ScoreSummary):
    """The tokens that were scored, and the log-probability of each token. With `truncated`, the score also has the
    error bound of each token, which depends on the number of tokens before it. The first token then has no prediction,
    so its log-probability and its error bound are null. The first token of a model with a zero start has no prediction
    either. At the place of a skipped event, all of these are null.
    """

    tokens: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    error_bounds: Annotated[tuple[ErrorBound, ...] | None, LEFT_OUT] = None
    predictions: Annotated[tuple[tuple[Prediction, ...] | None, ...] | None, Field(description=PLACES), LEFT_OUT] = None


class FinishReason(StrEnum):
    """Why a generation ended. `stop` means a stop string or the end of an event sequence. `length` means the limit on
    the number of tokens."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A generated token. In a stream, `text` is the additional text that is final after this token. `text` is empty
    while a character or a possible stop string is incomplete. `bytes` is present only if the token alone is not valid
    UTF-8."""

    token_id: int
    token: str
    text: str
    logprob: float
    bytes: Annotated[tuple[int, ...] | None, LEFT_OUT] = None
    predictions: Annotated[
        tuple[Prediction, ...] | None,
        Field(
            description="only with `top_logprobs`: the most probable tokens at this token's position, most "
            "probable first,"
            " and the token itself at the end if it is not one of them; before bias and penalties"
        ),
        LEFT_OUT,
    ] = None


@dataclass(frozen=True, slots=True)
class Finish(Served):
    """The last event in the stream of a generation. This event has the whole answer, except the tokens'
    log-probabilities. `error_bound` is the largest error bound of the distributions from which the tokens were sampled.
    Each bound compares a distribution with the never-interrupted model's distribution after the same tokens. `session`
    and its `position` are present if the generation continued a session."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    mode: Mode
    window: int | None
    state: StateSource
    error_bound: ErrorBound
    latency: Latency
    cache_tokens: CacheTokens = field(default=None, kw_only=True)
    session: Annotated[str | None, LEFT_OUT] = field(default=None, kw_only=True)
    position: Annotated[int | None, LEFT_OUT] = field(default=None, kw_only=True)
    unknown: UnknownNames = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Generated(Finish):
    """The generated text and tokens."""

    logprobs: tuple[float, ...]
    predictions: Annotated[tuple[tuple[Prediction, ...], ...] | None, Field(description=PLACES), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Statistics of the latency of one phase, over the repeated runs."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Statistics of the latency of each phase, over the repeated runs."""

    queue: Percentiles
    compute: Percentiles
    total: Percentiles


@dataclass(frozen=True, slots=True)
class ComparedMode:
    """The results of one mode or window in a comparison. The recurrent result's latency is that of one step from a
    resident state, as for one new token of a session. `agreement` compares a window with the recurrent answer.
    `agreement` is null for the recurrent result."""

    mode: Mode
    window: int | None
    state: StateSource
    predictions: tuple[Prediction, ...]
    latency: Phases
    error_bound: ErrorBound
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class Comparison(Served):
    """The comparison of recurrent mode with windows, for one model. `windows` are in the request's order. `tokens` is
    the number of tokens in the input."""

    tokens: int
    repeat: int
    recurrent: ComparedMode
    windows: tuple[ComparedMode, ...]
    cache_tokens: CacheTokens = field(default=None, kw_only=True)
    unknown: UnknownNames = field(default=None, kw_only=True)
