"""The requests and results of the engine, and the other types that the rest of the service shares.

All of them are immutable. A request checks itself when it is constructed, and raises `InvalidRequest`. The engine
checks the limits that depend on a model or on the settings (vocabulary, largest window, longest input).

`service/api/encode.py` encodes results field by field, and the OpenAPI description is generated from them: their
docstrings are its texts, their fields are the members of a JSON object. JSON omits a field whose default is None if its
value is None; it always has every other field.

Token ids are plain ints. A *position* counts the tokens of a sequence; its leading start token is not counted.
Deadlines are seconds on the event loop's clock, durations are milliseconds.

Inside the service a session's name is its owner's name, a slash, and the id that the owner knows. So two owners may use
the same id for different sessions, and neither can name the other's. Without API keys a session's name is its id.
An id contains no slash, so no owner's id equals another owner's session name, in any store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import TypedDict  # before Python 3.12 pydantic accepts only this one

from wane.service.errors import InvalidRequest


class Mode(StrEnum):
    """The mode that a request may ask for."""

    AUTO = "auto"
    RECURRENT = "recurrent"
    WINDOW = "window"
    BOTH = "both"


class StateSource(StrEnum):
    """Where the state behind an answer came from (the answer's `state`)."""

    RESIDENT = "resident"
    REBUILT = "rebuilt"
    WINDOW = "window"
    FULL = "full"


Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""The state of a model version, as in the Open Inference Protocol's model repository."""

SLASH = "/"


class Owner(NamedTuple):
    """The owner of sessions: the name of an API key, or "" without API keys. `sessions`: its quota; None: no quota."""

    name: str = ""
    sessions: int | None = None


ANYBODY = Owner()


def name_within(owner: str, session: str) -> str:
    """Returns the name of the owner's session with this id. Raises InvalidRequest if the id is invalid."""
    check_session_id(session)
    return owner + SLASH + session if owner else session


def id_of(session: str) -> str:
    """Returns the id by which its owner knows a session."""
    return session.rpartition(SLASH)[2]


def owner_of(session: str) -> str:
    """Returns the name of a session's owner."""
    return session.rpartition(SLASH)[0]


SESSION_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:-]{1,128}")  # clients and proxies remove `.` and `..` from a path

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PENALTY = 2
MAX_BIAS = 100
MAX_COMPARED_MODELS = 8
MAX_COMPARED_WINDOWS = 32
MAX_REPEAT = 1000
MAX_KEY_CHARACTERS = 255
MAX_POSITION = 10**14  # the stores' scripts count exactly up to 2^53, about 9 * 10^15

WINDOW_MODES = (Mode.AUTO, Mode.WINDOW, Mode.BOTH)
"""The modes of a prediction that take a window."""

TOLERANCE_MODES = (Mode.AUTO,)
GENERATED_MODES = (Mode.AUTO, Mode.RECURRENT, Mode.WINDOW)
GENERATED_WINDOW_MODES = (Mode.WINDOW,)


class ScoreMethod(StrEnum):
    """The methods of scoring a text."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Predict the token after `tokens`, or the next token of `session` without appending to it.

    `window` is the k of modes auto, window and both (default: the model's own). `tolerance` is the largest error bound
    that auto may answer with. With a session, auto means the session's own mode, and an answer whose bound exceeds the
    tolerance is rejected. A field that the mode does not use is rejected too. `truncated`: the tokens end a longer
    sequence, and no start token is fed. `prove`: search for a proof of the first token if its margin proves nothing.
    `cache`: mix the network with the model's cache, if it has one.
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

    def __post_init__(self) -> None:
        if self.session is None:
            _some_tokens(self.tokens)
        elif self.tokens:
            raise InvalidRequest(
                "predicting from a session appends nothing: give session or tokens, not both", "session"
            )
        elif self.truncated:
            raise InvalidRequest("truncated cannot be combined with session", "truncated")
        _window(self.window, self.mode, *WINDOW_MODES)
        if self.tolerance is not None:
            _within("tolerance", self.tolerance, 0, 1)
            if self.mode not in TOLERANCE_MODES:
                raise InvalidRequest(
                    f"tolerance is given, but mode is {self.mode}; it is for auto, which chooses by it", "tolerance"
                )
        _at_least("top_k", self.top_k, 1)


@dataclass(frozen=True, slots=True)
class History:
    """The last tokens of a sequence that a new session continues at `position`.

    If there are `position` tokens, they are the whole sequence, and the start token is fed before them. Fewer tokens
    are the end of the sequence.
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
                f"the history has {len(self.tokens)} tokens, but position is {self.position}: there cannot be more",
                "position",
            )


@dataclass(slots=True)
class StepRequest:
    """Append `tokens` to a session and predict the next one. `mode` defaults to the session's own. `prove` and `cache`:
    see `PredictRequest`."""

    session: str
    tokens: tuple[int, ...]
    mode: Mode | None = None
    expected_position: int | None = None
    idempotency_key: str | None = None
    top_k: int = 5
    deadline: float | None = None
    prove: bool = False
    cache: bool = True

    def __post_init__(self) -> None:
        _some_tokens(self.tokens)
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
    """Compute the log-probability of each of `tokens`, given those before it.

    `tolerance` is the largest error that method parallel may add; method sequential adds none. `truncated`: the tokens
    end a longer sequence, and no start token is fed, so the first token has no prediction. `cache`: see
    `PredictRequest`. `top_k`: how many of the most probable tokens are listed in the place of each token; None: no
    list.
    """

    tokens: tuple[int, ...]
    method: ScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: float | None = None
    deadline: float | None = None
    truncated: bool = False
    cache: bool = True
    top_k: int | None = None

    def __post_init__(self) -> None:
        _some_tokens(self.tokens)
        if self.tolerance is not None:
            _within("tolerance", self.tolerance, 0, 1)
        if self.top_k is not None:
            _at_least("top_k", self.top_k, 0)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue `tokens`, or the tokens of `session`, by up to `max_tokens` more. The session does not change.

    `position` is the position at which the session must be. `temperature` 0 is greedy. `top_k` and `top_p` of None keep
    every token. The same `seed` gives the same text; `sample` is the number of one of several samples of a seed, which
    differ. The text ends before the first of the `stop` strings. Mode auto means recurrent, or the session's own mode;
    `window` is for mode window. `truncated`: the tokens end a longer sequence, and no start token is fed. `cache`: see
    `PredictRequest`. `presence_penalty`, `frequency_penalty` and `logit_bias`: see `engine/logits.py`. `top_logprobs`:
    how many of the most probable tokens are listed in the place of each token; None: no list.
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

    def __post_init__(self) -> None:
        if self.session is None:
            _some_tokens(self.tokens)
            if self.position is not None:
                raise InvalidRequest("position is given without a session, whose position it is", "position")
        elif self.tokens:
            raise InvalidRequest(
                "generating from a session appends nothing: give session or tokens, not both", "session"
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
            raise InvalidRequest(f"stop holds {len(self.stop)} strings, but may hold {MAX_STOPS}", "stop")
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"stop[{index}] has {len(text)} characters, but must have 1 to {MAX_STOP_CHARACTERS}",
                    f"stop[{index}]",
                )
        if self.mode not in GENERATED_MODES:
            raise InvalidRequest("mode is both, but generate takes auto, recurrent or window", "mode")
        _window(self.window, self.mode, *GENERATED_WINDOW_MODES)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Measure the recurrent mode and windows of several k, `repeat` times each, on the token after `tokens`. `cache`:
    see `PredictRequest`."""

    tokens: tuple[int, ...]
    windows: tuple[int, ...] = (8, 16, 32, 64)
    repeat: int = 20
    deadline: float | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        _some_tokens(self.tokens)
        if not 1 <= len(self.windows) <= MAX_COMPARED_WINDOWS:
            raise InvalidRequest(
                f"windows holds {len(self.windows)} values, but must hold 1 to {MAX_COMPARED_WINDOWS}",
                "windows",
            )
        for index, window in enumerate(self.windows):
            _at_least(f"windows[{index}]", window, 1)
        _within("repeat", self.repeat, 1, MAX_REPEAT)


def check_session_id(session: str) -> None:
    """Raises InvalidRequest unless `session` is 1 to 128 letters, digits and `.` `_` `~` `:` `-`, and not just `.` or
    `..`."""
    if SESSION_ID.fullmatch(session) is None:
        raise InvalidRequest('session must be 1 to 128 letters, digits and . _ ~ : -, but not "." or ".."', "session")


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidRequest(f"{field} is {value}, but must be at least {least}", field)


def _within(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest unless `value` is in the range. NaN never is."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}, but must be a number from {low:g} to {high:g}", field)


def _some_tokens(tokens: tuple[int, ...]) -> None:
    if not tokens:
        raise InvalidRequest("the input is empty: give at least one token", "tokens")


def _window(window: int | None, mode: Mode, *takes: Mode) -> None:
    """Raises InvalidRequest if the window is invalid, or if the mode does not use one."""
    if window is None:
        return
    _at_least("window", window, 1)
    if mode not in takes:
        raise InvalidRequest(f"window is given, but mode is {mode}; it is for {', '.join(takes)}", "window")


ErrorBound = Annotated[
    float | None,
    Field(
        description="upper bound of the total variation from the never-interrupted model, at temperature 1 and before "
        "top-k or top-p. The bound is proved, except for the rounding of float32 runs, which was measured. 0: exact, "
        "except for that rounding. null: not certified. A bound of 1 is no guarantee"
    ),
]
StateErrorBound = Annotated[
    float | None,
    Field(
        description="upper bound of the 2-norm distance from the never-interrupted model at the output layer's input; "
        "null: not certified"
    ),
]


def _never_null(schema: dict[str, Any]) -> None:
    del schema["default"]
    schema.update(schema.pop("anyOf")[0])


LEFT_OUT = Field(json_schema_extra=_never_null)
"""Marks a field that JSON omits if it is None, so that it is never null."""

CACHE_TOKENS = "only if the model has a cache and the request uses it: the number of tokens that the cache holds"
CacheTokens = Annotated[
    int | None,
    Field(description=CACHE_TOKENS),
    LEFT_OUT,
]

PLACES = (
    "only if the request asks for them: for each token the most probable tokens in its place, most probable first, and "
    "the token itself at the end if it is not one of them; null for a token that has no prediction"
)

DURABLE = (
    "only if replicas share the session store: whether the store has acknowledged the session's latest tokens; "
    "if false, they may be lost"
)


class ModelDocument(TypedDict):
    """The model version that answered, and its device."""

    model: str
    model_version: str
    device: str


class PredictionDocument(TypedDict):
    """One possible next token; `bytes` only if `token` is not valid UTF-8 on its own."""

    token_id: int
    token: str
    probability: float
    logprob: float
    bytes: NotRequired[list[int]]


class LatencyDocument(TypedDict):
    """The latency of a request in the engine, by phase, in milliseconds. Tokenising text is not included."""

    queue_ms: float
    compute_ms: float
    total_ms: float


class Prediction(NamedTuple):
    """One possible next token; `token_bytes` only if the token's text is not valid UTF-8 on its own."""

    token_id: int
    token: str
    probability: float
    logprob: float
    token_bytes: bytes | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Describes the named tuple as a JSON object. It is a tuple for speed."""
        return handler(PredictionDocument)


class Latency(NamedTuple):
    """The latency of a request in the engine: waiting for the runner, running, and in total.

    It does not include reading the request and tokenising its text. `batch_items`: the size of the largest batch that
    the request was in.
    """

    queue_ms: float
    compute_ms: float
    total_ms: float
    batch_items: int = 0

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Describes the named tuple as a JSON object. It is a tuple for speed."""
        return handler(LatencyDocument)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The distance of the window's answer from the recurrent one. `top1_match`: both have the same first token.
    `top1_proved`: the margin of the window's first token alone proves that."""

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
    """One mode's part of an answer in mode `both`."""

    predictions: tuple[Prediction, ...]
    latency: Latency


@dataclass(slots=True)
class Answer:
    """The predictions of the next token, and how they were made.

    `mode` is the one that was used, `window` the k of a windowed answer. `top1_proved`: the first prediction is proved
    to be the never-interrupted model's. `position` is present for sessions only, and `replayed` for steps only.
    `durable` is present if replicas share the store: whether the store has the session's tokens. `cache_tokens` is
    present if the answer is a mixture with a cache: the number of tokens that the cache holds.
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
    durable: bool | None = None
    cache_tokens: int | None = None


Identity = tuple[str, str, str]
"""An engine's model, version and device: the fields of `Served`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model version that answered, and its device."""

    model: str
    model_version: str
    device: str


@dataclass(frozen=True, slots=True)
class SessionView(Served):
    """A session as its owner sees it. `position` counts its tokens without the start token <eos>.

    `state` is the source that an answer in the session's own mode would use now: `resident`, `rebuilt` for a parked
    session, or `window`. `error_bound` bounds that answer.
    """

    session: str
    mode: Mode
    position: int
    state: StateSource
    error_bound: ErrorBound
    idle_s: float
    durable: Annotated[bool | None, Field(description=DURABLE), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class NewSession(SessionView):
    """A session that this request created."""


@dataclass(frozen=True, slots=True)
class ScoreProgress:
    """In a stream: how many of the `total` tokens have been run."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """In a stream: the tokens from `position` on, and the log-probability of each. With `truncated`, also the error
    bound of each; the first token has no prediction, so both of its values are null. With `top_k`, also the most
    probable tokens in each place."""

    position: int
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    error_bounds: Annotated[tuple[ErrorBound, ...] | None, LEFT_OUT] = None
    predictions: Annotated[tuple[tuple[Prediction, ...] | None, ...] | None, Field(description=PLACES), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class ScoreSummary(Served):
    """How a text was scored.

    `chunks` ran in parallel, each from at least `warm_up` tokens before its first. `rounds` is 1, plus 1 for every
    part of them that was run again. `max_residual`: the largest difference of a state unit from the end of the chunk
    before; 0: bit for bit as in sequence. `error_bound`: the largest over all positions. `perplexity` is over the
    tokens that have a log-probability, and null if none has.
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


@dataclass(frozen=True, slots=True)
class Score(ScoreSummary):
    """The tokens that were scored, and the log-probability of each. With `truncated`, also the error bound of each,
    which depends on the number of tokens before it; the first token has no prediction, so both of its values are null.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    error_bounds: Annotated[tuple[ErrorBound, ...] | None, LEFT_OUT] = None
    predictions: Annotated[tuple[tuple[Prediction, ...] | None, ...] | None, Field(description=PLACES), LEFT_OUT] = None


class FinishReason(StrEnum):
    """Why a generation ended: at a stop string or the end of an event sequence, or at its token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A generated token. In a stream, `text` is the text that is final after this token: empty while a character or a
    possible stop string is incomplete. `bytes` only if `token` is not valid UTF-8 on its own."""

    token_id: int
    token: str
    text: str
    logprob: float
    bytes: Annotated[tuple[int, ...] | None, LEFT_OUT] = None
    predictions: Annotated[
        tuple[Prediction, ...] | None,
        Field(
            description="only with `top_logprobs`: the most probable tokens in this token's place, most probable first,"
            " and the token itself at the end if it is not one of them; before bias and penalties"
        ),
        LEFT_OUT,
    ] = None


@dataclass(frozen=True, slots=True)
class Finish(Served):
    """The end of a stream: the whole answer without the tokens' log-probabilities. `error_bound` is the largest bound
    of its distributions, each compared with the never-interrupted model's after the same tokens. `session` and its
    `position` are present if a session was continued."""

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


@dataclass(frozen=True, slots=True)
class Generated(Finish):
    """The generated text and tokens."""

    logprobs: tuple[float, ...]
    predictions: Annotated[tuple[tuple[Prediction, ...], ...] | None, Field(description=PLACES), LEFT_OUT] = None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Latency of one phase, over the repeated runs."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Latency by phase, over the repeated runs."""

    queue: Percentiles
    compute: Percentiles
    total: Percentiles


@dataclass(frozen=True, slots=True)
class ComparedMode:
    """One line of a comparison. The recurrent line is one step from a resident state: the cost of a session's token.
    `agreement` compares a window with the recurrent answer; it is null for the recurrent line."""

    mode: Mode
    window: int | None
    state: StateSource
    predictions: tuple[Prediction, ...]
    latency: Phases
    error_bound: ErrorBound
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class Comparison(Served):
    """One model's comparison: recurrent, then every window in the request's order. `tokens` is the input's length."""

    tokens: int
    repeat: int
    recurrent: ComparedMode
    windows: tuple[ComparedMode, ...]
    cache_tokens: CacheTokens = field(default=None, kw_only=True)
