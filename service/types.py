"""The requests and results of the engine, and other types that several parts of the service use.

The constructor of a request validates its fields and raises `InvalidRequest`. The engine checks the limits that depend
on a model or on the settings (vocabulary, largest window, longest input).

A result is a msgspec `Struct`, and each of its fields is declared only here: JSON and the OpenAPI description are
generated from the class (see `Result`).

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
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_type_hints
from unicodedata import is_normalized

import numpy as np
from msgspec import Meta, Struct, defstruct
from numpy.typing import NDArray
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.errors import InvalidRequest, truncate_repr


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


# An id must not be `.` or `..`, because clients and proxies remove them from a path. JSON Schema cannot say more.
SESSION_ID = r"(?!\.{1,2}$)[^/\\\u0000-\u001f\u007f-\u009f\ufffd]{1,128}"
ASCII_ID = re.compile(r"(?!\.{1,2}$)[ -.0-\[\]-~]{1,128}").fullmatch
TEXT_ID = re.compile(SESSION_ID).fullmatch

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

    @property
    def is_plain(self) -> bool:
        """Whether the step asks nothing but the next token."""
        return (
            self.filter is NO_FILTER
            and self.mode is None
            and self.idempotency_key is None
            and self.cache
            and not (self.prove or self.logits or self.token_logprobs or self.unknown)
        )


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


class Bias:
    """The biases of tokens, which all samples of a request share. ids: int64 (n), distinct. values: float64 (n)."""

    def __init__(self, given: Mapping[int, float]) -> None:
        """`given` maps token ids to biases. Raises InvalidRequest for a bias that is out of range."""
        self.ids = np.fromiter(given, np.int64, len(given))
        self.values = np.fromiter(given.values(), np.float64, len(given))
        self.added: NDArray[np.float64] | None = None
        """What `Preferences` adds to the log-probability of each token of the vocabulary: float64 (V). None before the
        first sample."""
        for place in np.flatnonzero(~(abs(self.values) <= MAX_BIAS))[:1]:
            raise InvalidRequest(
                f"logit_bias of token {self.ids[place]} is {self.values[place]:g}, but must be a number from "
                f"-{MAX_BIAS} to {MAX_BIAS}",
                "logit_bias",
            )


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
    logit_bias: Bias | None = None
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
    """Raises InvalidRequest unless `session` is a session's id (see `is_session_id`)."""
    if not is_session_id(session):
        raise InvalidRequest(f"session is {truncate_repr(session)}, but must be {SESSION_RULE}", "session")


SESSION_RULE = '1 to 128 printable characters in the form NFC, without / and \\, and not "." or ".."'


def is_session_id(text: str) -> bool:
    """Returns whether a text is a session's id. Two texts that look alike because they are different forms of the same
    characters are never both ids. An id has no character that `str.isprintable` refuses: controls, formats (such as
    those that change the direction of writing), unassigned and private characters, and separators but the ASCII space.
    Letters, marks and symbols without a visible shape, such as U+3164, U+FE0F and U+2800, are accepted."""
    return ASCII_ID(text) is not None or (
        TEXT_ID(text) is not None and text.isprintable() and is_normalized("NFC", text)
    )


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


def says(text: str, **keywords: object) -> Meta:
    """Describes a field for the OpenAPI description: its meaning, and further JSON Schema keywords."""
    return Meta(description=text, extra_json_schema=keywords or None)


class Result(Struct, omit_defaults=True):
    """The base class of results. Its fields are the members of a JSON object. A member is omitted if the field has its
    default value. Therefore only a field that may be absent has a default value, and a field that may be null has
    none."""


ErrorBound = Annotated[
    float | None,
    says(
        "upper bound of the total variation between the answer's distribution and the never-interrupted model's "
        "distribution, at temperature 1 and before top-k or top-p. The bound is proved, except for the rounding of "
        "float32 runs, which was measured. 0: the answer is exact, except for that rounding. null: the answer is not "
        "certified. 1: the bound guarantees nothing"
    ),
]
StateErrorBound = Annotated[
    float | None,
    says(
        "upper bound of the 2-norm distance between the output layer's input in this run and its input in the "
        "never-interrupted model; null: the answer is not certified"
    ),
]
CacheTokens = Annotated[
    int | None,
    says("the number of tokens in the model's cache; present only if the model has a cache and the request uses it"),
]
UnknownNames = Annotated[
    tuple[str, ...] | None,
    says(
        "the names of events that the vocabulary lacks; present only if the request has such a name in its events or "
        "candidates"
    ),
]
Durable = Annotated[
    bool | None,
    says(
        "true: the session store has acknowledged the session's latest tokens; present only if replicas share the store"
    ),
]
SessionName = Annotated[str, says("the session's id")]
Position = Annotated[int, says("the number of the session's tokens, without the start token <eos>")]
UsedMode = Annotated[Mode, says("the mode that computed the answer")]
UsedWindow = Annotated[int | None, says("the window size k, in tokens; null: the answer is not from a window")]
Source = Annotated[
    StateSource,
    says(
        "the source of the state. resident: the session's state was in memory. rebuilt: it was computed again from "
        "the session's tokens. window: a run of the last k tokens. full: a run of all tokens"
    ),
]
TokenId = Annotated[int, says("the token's id in the model's vocabulary")]
TokenBytes = Annotated[
    tuple[int, ...] | None, says("the token's bytes; present only if the token alone is not valid UTF-8")
]
Logprob = Annotated[float, says("the natural logarithm of the token's probability")]


class Served(Result):
    """The model version that computed an answer, and its device."""

    model: Annotated[str, says("the model's name")]
    model_version: Annotated[str, says("the version of the model's bundle")]
    device: Annotated[str, says("the device that ran the model, such as cpu")]


class Prediction(Result):
    """A candidate for the next token."""

    token_id: TokenId
    token: Annotated[str, says("the token's text, or the event's name")]
    probability: Annotated[float, says("the token's probability, 0 to 1")]
    logprob: Logprob
    bytes: TokenBytes = None


Places = Annotated[
    tuple[tuple[Prediction, ...] | None, ...] | None,
    says(
        "only if the request asks for them: for each token, the most probable tokens at its position, most probable "
        "first, and the token itself at the end if it is not one of them; null for a token that has no prediction"
    ),
]


class Latency(Result, dict=True):
    """The latency of each phase of a request in the engine, in milliseconds. It does not include reading the request
    and tokenising its text."""

    queue_ms: Annotated[float, says("the time in the queue")]
    compute_ms: Annotated[float, says("the time of the run")]
    total_ms: Annotated[float, says("the time from the start of the request in the engine to its answer")]

    batch_items: ClassVar[int] = 0
    """The number of requests in the largest batch that contained the request. It is not in JSON: `with_batch` sets it
    as an attribute of the instance that is not a field."""

    def with_batch(self, items: int) -> Self:
        """Sets `batch_items`."""
        vars(self)["batch_items"] = items
        return self

    def phases(self) -> tuple[float, float, float]:
        """Returns the time in the queue, the time of the run, and the total."""
        return self.queue_ms, self.compute_ms, self.total_ms


class Agreement(Result):
    """The agreement of the window's answer with the recurrent answer."""

    top1_match: Annotated[bool, says("true: the two answers have the same most probable token")]
    top1_proved: Annotated[
        bool, says("true: the window's run alone, without the recurrent answer, proves that the two tokens are equal")
    ]
    total_variation: Annotated[float, says("the measured total variation between the two distributions, 0 to 1")]
    kl: Annotated[float, says("the measured divergence sum p log(p / q), in nats; p is the recurrent distribution")]
    max_logit_difference: Annotated[float, says("the largest difference between the two logits of a token")]
    state_distance: Annotated[float, says("the 2-norm distance between the two inputs of the output layer")]
    state_error_bound: StateErrorBound
    error_bound: ErrorBound


class ModeAnswer(Result):
    """The answer of one of the two modes, as a part of an answer in mode `both`."""

    predictions: Annotated[tuple[Prediction, ...], says("the most probable tokens, most probable first")]
    latency: Latency


class Answer(Served, dict=True):
    """A prediction of the next token, and how it was computed."""

    mode: UsedMode
    window: UsedWindow
    predictions: Annotated[
        tuple[Prediction, ...],
        says(
            "the most probable tokens, most probable first; empty before the first token of a model that reads no "
            "start token"
        ),
    ]
    latency: Latency
    state: Source
    error_bound: ErrorBound
    state_error_bound: StateErrorBound
    top1_proved: Annotated[
        bool,
        says(
            "true: it is proved that recurrent mode over all tokens has the same most probable token. The proof "
            "follows from the margin between the first two predictions or, with `prove`, from a search"
        ),
    ]
    modes: Annotated[dict[str, ModeAnswer] | None, says("only in mode both: the answer of each mode")] = None
    agreement: Annotated[Agreement | None, says("only in mode both: the agreement of the two modes")] = None
    session: Annotated[SessionName | None, says("only for a session: the session's id")] = None
    position: Annotated[Position | None, says("only for a session: the number of its tokens, without <eos>")] = None
    replayed: Annotated[
        bool | None,
        says("only for a step. true: the step is a retry, and its tokens were not appended again"),
    ] = None
    created: Annotated[
        bool | None,
        says(
            "true if the step created the session, or is a retry of the step that created it; otherwise absent. If it "
            "is true, but the client expected the session to exist, the session's earlier tokens have expired"
        ),
    ] = None
    durable: Durable = None
    cache_tokens: CacheTokens = None
    unknown: UnknownNames = None
    seen_tokens: Annotated[
        int | None,
        says(
            "the number of the sequence's last tokens that the server knows, and that are therefore not listed; "
            "present only with `exclude_seen`"
        ),
    ] = None

    logits: ClassVar[NDArray[np.float32] | None] = None
    """float32 (V), if the request asked for them. The logits of a mixture with the cache are its log-probabilities."""

    token_logprobs: ClassVar[tuple[float | None, ...] | None] = None
    """The log-probability of each token of a step, in recurrent mode, if the request asked for them. With a zero start,
    the value of the sequence's first token is None."""

    def with_details(self, logits: NDArray[np.float32] | None, token_logprobs: tuple[float | None, ...] | None) -> Self:
        """Sets `logits` and `token_logprobs`. They are not in JSON: they are attributes of the instance, not fields."""
        vars(self).update(logits=logits, token_logprobs=token_logprobs)
        return self


class Failed(Result):
    """A failed item of a batch."""

    error: Annotated[dict[str, Any], says("a problem document, as in the answer of a failed request")]


REFERENCE = "#/components/schemas/{name}"
"""The reference to the schema of a class in the OpenAPI description."""


def any_of(*kinds: type) -> dict[str, Any]:
    """Returns the JSON schema of a value of one of several classes. msgspec has no unions of such classes."""
    return {"anyOf": [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]}


Results = Annotated[
    tuple[Any, ...], says("an answer or an error for each item, in their order", items=any_of(Answer, Failed))
]


class Answers(Result):
    """The answers to many steps."""

    results: Results


class Batch(Served):
    """The answers to a batch."""

    results: Results


NO_COLUMN = frozenset({"model_version", "device", "predictions", "latency", "modes", "agreement", "session"})
"""The fields of `Answer` that `StepColumns` has not, or has in another form."""

ALWAYS = frozenset({"position", "replayed", "created", "durable", "cache_tokens"})
"""The fields of `Answer` that may be absent, but whose columns are always present. The column of any other such field
is present only if a step has a value for it."""


COLUMNS = tuple(name for name in Answer.__struct_fields__ if name not in NO_COLUMN)
"""The fields of `Answer` that have a column in `StepColumns`."""

SELDOM = frozenset(Answer.__struct_fields__[-len(Answer.__struct_defaults__) :]) - ALWAYS


def _columns() -> list[Any]:
    """Returns the fields of `StepColumns` that list a field of `Answer`, with null for a failed step."""
    made: list[Any] = []
    for name, kind in get_type_hints(Answer, include_extras=True).items():
        if name in COLUMNS:
            meaning, values = says(kind.__metadata__[-1].description), tuple[kind | None, ...]  # type: ignore[valid-type]
            column: Any = Annotated[values, meaning]
            made.append((name, Annotated[values | None, meaning], None) if name in SELDOM else (name, column))
    return made


StepColumns = defstruct(
    "StepColumns",
    [
        ("session", Annotated[tuple[str, ...], says("the id of each step's session")]),
        *_columns(),
        ("token_id", Annotated[tuple[tuple[int, ...] | None, ...], says("each step's predictions, first the best")]),
        ("logprob", Annotated[tuple[tuple[float, ...] | None, ...], says("the predictions' log-probabilities")]),
        ("error", Annotated[tuple[dict[str, Any] | None, ...], says("a problem document; null: the step succeeded")]),
        ("latency", Annotated[Latency, says("the largest time of each phase of all steps")]),
    ],
    bases=(Result,),
    kw_only=True,
    namespace={
        "__doc__": "The answers to steps as one list for each field, in the order of the steps. For a failed step, "
        "every list has null, except `session` and `error`."
    },
)


Identity = tuple[str, str, str]
"""The model, version and device of an engine, in the order of the fields of `Served`."""


class ModelDocument(TypedDict):
    """The fields of `Served`, for documents that pydantic describes."""

    model: str
    model_version: str
    device: str


class SessionView(Served):
    """A session as its owner sees it."""

    session: SessionName
    mode: Annotated[Mode, says("the default mode of the session's steps")]
    position: Position
    state: Annotated[
        StateSource,
        says(
            "the source of the state for an answer in the session's own mode at this time: resident, rebuilt for a "
            "session whose state is not in memory, or window"
        ),
    ]
    error_bound: ErrorBound
    idle_s: Annotated[float, says("the time since the session's last step, in seconds")]
    durable: Durable = None
    unknown: UnknownNames = None


class NewSession(SessionView):
    """A session that the request has created."""


class SessionState(Served):
    """The hidden vector of a session, for a ranker or an index outside of the server."""

    session: SessionName
    position: Position
    state: Source
    hidden: Annotated[
        tuple[float, ...],
        says("the input of the output layer after `position` tokens: the exact float32 values of its units"),
    ]
    state_error_bound: StateErrorBound
    durable: Durable = None


class ScoreProgress(Result):
    """An event in the stream of a score."""

    done: Annotated[int, says("the number of tokens that have been run")]
    total: Annotated[int, says("the number of tokens of the request")]


ScoredIds = Annotated[tuple[int | None, ...], says("the scored token ids; null at the place of a skipped event")]
Logprobs = Annotated[
    tuple[float | None, ...],
    says("the natural logarithm of each token's probability, given the tokens before it; null without a prediction"),
]
ErrorBounds = Annotated[
    tuple[ErrorBound, ...] | None,
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


class ScoreSummary(Served):
    """How a text was scored. Each chunk that ran in parallel started at least `warm_up` tokens before its first scored
    token. If `max_residual` is 0, the result is bit for bit that of a sequential run."""

    perplexity: Annotated[
        float | None, says("the perplexity of the tokens that have a log-probability; null if there are none")
    ]
    chunks: Annotated[int, says("the number of chunks that ran in parallel")]
    warm_up: Annotated[int | None, says("the least number of tokens that a chunk ran before its first scored token")]
    rounds: Annotated[int, says("1 plus the number of parts of chunks that were run again")]
    max_residual: Annotated[
        float,
        says(
            "the largest difference between a unit of a chunk's start state and the same unit of the previous chunk's "
            "end state"
        ),
    ]
    state: Source
    error_bound: Annotated[ErrorBound, says("the largest error bound of all positions; null: not certified")]
    latency: Latency
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
    text: Annotated[
        str,
        says(
            "the additional text that is final after this token; empty while a character or a possible stop string is "
            "incomplete"
        ),
    ]
    logprob: Logprob
    bytes: TokenBytes = None
    predictions: Annotated[
        tuple[Prediction, ...] | None,
        says(
            "only with `top_logprobs`: the most probable tokens at this token's position, most probable first, and "
            "the token itself at the end if it is not one of them; before bias and penalties"
        ),
    ] = None


class Finish(Served):
    """The last event in the stream of a generation. This event has the whole answer, except the tokens'
    log-probabilities."""

    text: Annotated[str, says("the generated text, up to the first stop string")]
    tokens: Annotated[tuple[int, ...], says("the ids of the generated tokens")]
    finish_reason: Annotated[
        FinishReason, says("stop: a stop string, or the end of an event sequence; length: the limit `max_tokens`")
    ]
    mode: UsedMode
    window: UsedWindow
    state: Source
    error_bound: Annotated[
        ErrorBound,
        says(
            "the largest error bound of the distributions from which the tokens were sampled, each compared with the "
            "never-interrupted model's distribution after the same tokens; null: not certified"
        ),
    ]
    latency: Latency
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

    queue: Percentiles
    compute: Percentiles
    total: Percentiles


class ComparedMode(Result):
    """The results of one mode or window in a comparison. The recurrent result's latency is that of one step from a
    resident state, as for one new token of a session."""

    mode: UsedMode
    window: UsedWindow
    state: Source
    predictions: Annotated[tuple[Prediction, ...], says("the most probable tokens, most probable first")]
    latency: Phases
    error_bound: ErrorBound
    agreement: Annotated[
        Agreement | None, says("the agreement of the window with the recurrent answer; null for the recurrent result")
    ]


class Comparison(Served):
    """The comparison of recurrent mode with windows, for one model."""

    tokens: Annotated[int, says("the number of tokens in the input")]
    repeat: Annotated[int, says("the number of runs of each mode and window")]
    recurrent: ComparedMode
    windows: Annotated[tuple[ComparedMode, ...], says("the result of each window, in the request's order")]
    cache_tokens: CacheTokens = None
    unknown: UnknownNames = None


class Comparisons(Result):
    """The answer to a comparison request."""

    device: Annotated[str, says("the device that ran the models")]
    models: Annotated[tuple[Comparison, ...], says("a comparison for each requested model")]
