"""The requests of the engine, the names of sessions in them, and how long a request took.

The constructor of a request validates its fields and raises `InvalidRequest`. The engine checks the limits that depend
on a model or on the settings (vocabulary, largest window, longest input).

Inside the service, a session's name consists of its owner's name, a slash, and the session's id. Two owners may
therefore use the same id for different sessions, and an owner cannot access another owner's session. Without API keys,
a session's name is its id. An id has no slash, so such a name never equals the name of another owner's session.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self
from unicodedata import is_normalized

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from wane.service.errors import InvalidRequest, truncate_repr
from wane.service.types.body import MAX_KEY_CHARACTERS, SESSION_ID, Body
from wane.service.types.common import Mode, Result, says
from wane.service.types.generate import (
    GENERATED_MODES,
    ID_AS_TEXT,
    MAX_BIAS,
    MAX_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    GenerateBody,
)
from wane.service.types.predict import (
    MAX_COMPARED_WINDOWS,
    MAX_REPEAT,
    CompareBody,
    PredictBody,
    ScoreBody,
)

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
    if not is_session_id(session):
        raise InvalidRequest(f"session is {truncate_repr(session)}, but must be {SESSION_RULE}", "session")
    return owner + SLASH + session if owner else session


def id_of(session: str) -> str:
    """Returns a session's id, given the session's name."""
    return session.rpartition(SLASH)[2]


def owner_of(session: str) -> str:
    """Returns the name of a session's owner, given the session's name."""
    return session.rpartition(SLASH)[0]


MAX_POSITION = 10**14  # integers in the stores' scripts are exact up to 2^53, about 9 * 10^15
ASCII_ID = re.compile(r"(?!\.{1,2}$)[ -.0-\[\]-~]{1,128}").fullmatch
TEXT_ID = re.compile(SESSION_ID).fullmatch


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


class PredictRequest(PredictBody):
    """Predict the token after `tokens`, or the next token of `session` without appending to it.

    `session` is the session's name. With a session, mode auto means the session's own mode, and an answer whose bound
    exceeds the tolerance is an error. A request with a field that its mode does not use is invalid. If `logits`, the
    answer has `logits`. `filter` selects the tokens that the answer lists. `unknown_names` are the names of the
    request's events that the vocabulary lacks. If all events were skipped, `tokens` is empty, and the answer is the
    prediction after an empty sequence. `owner` is the name of the owner whose kept states of prefixes
    (`Forward.prompt`) the request may use and leaves. If it is None, the request uses and leaves none.
    """

    tokens: Sequence[int] = ()
    deadline: float | None = None
    logits: bool = False
    filter: Filter = NO_FILTER
    unknown_names: tuple[str, ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        _check_source(self, "a prediction from a session cannot append tokens to it: give session or tokens, not both")
        _at_least(self, window=1, top_k=1)
        _within(self, tolerance=(0, 1))
        _check_mode(self, self.mode)


@dataclass(frozen=True, slots=True)
class History:
    """The last tokens of a sequence that a new session continues at `position`.

    If there are `position` tokens, they are the whole sequence, and the start token is fed before them. If there are
    fewer tokens, they are the end of the sequence.

    If they are the tokens of another worker's session, `snapshot` is its state, encoded by `codec.write_snapshot`, or
    empty if it has none.
    """

    tokens: Sequence[int]
    position: int
    snapshot: bytes | None = None

    def __post_init__(self) -> None:
        _within(self, position=(0, MAX_POSITION))
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


class StepRequest(Struct):
    """Append `tokens` to a session and predict the next token. `mode` defaults to the session's mode. `PredictRequest`
    describes `prove`, `cache`, `logits`, `filter` and `unknown_names`. A step whose events were all skipped has no
    tokens and appends nothing. If `token_logprobs`, the answer has the log-probability of each token. If the session
    does not exist, the step creates it for `creator`, in mode auto. If `creator` is None, such a step fails."""

    session: str
    tokens: Sequence[int]
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
    unknown_names: tuple[str, ...] = ()
    creator: Owner | None = None

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown_names)
        _at_least(self, expected_position=0, top_k=1)
        if self.idempotency_key is not None and not 1 <= len(self.idempotency_key) <= MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"idempotency_key has {len(self.idempotency_key)} characters, but must have 1 to {MAX_KEY_CHARACTERS}",
                "idempotency_key",
            )

    @property
    def is_plain(self) -> bool:
        """Whether the step asks nothing but the next token."""
        return (
            self.filter is NO_FILTER
            and self.mode is None
            and self.idempotency_key is None
            and self.cache
            and not (self.prove or self.logits or self.token_logprobs or self.unknown_names)
        )


class ContinuationsRequest(Struct):
    """Score each of `continuations` as the next tokens of `session`, and predict the token after it, in mode recurrent.
    The session does not change. `unknown_names` are the names of each continuation's events that the vocabulary lacks.
    `PredictRequest` describes the other fields."""

    session: str
    continuations: tuple[Sequence[int], ...]
    unknown_names: tuple[tuple[str, ...], ...]
    top_k: int = 5
    deadline: float | None = None
    cache: bool = True
    logits: bool = False
    filter: Filter = NO_FILTER

    def __post_init__(self) -> None:
        for tokens, unknown in zip(self.continuations, self.unknown_names, strict=True):
            _some_tokens(tokens, unknown)
        _at_least(self, top_k=1)


class ScoreRequest(ScoreBody):
    """Compute the log-probability of each token, given the tokens before it. The method sequential adds no error. If
    `truncated`, the first token has no prediction. `skipped` are the indexes of the skipped events in the request's
    list of events, ascending. The score has null at these indexes. A score leaves the state after all tokens but the
    last to predictions of its `owner`. `PredictRequest` describes `unknown_names`.
    """

    tokens: Sequence[int] = ()
    deadline: float | None = None
    unknown_names: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown_names)
        _within(self, tolerance=(0, 1))
        _at_least(self, top_k=0)


class Bias:
    """The biases of tokens, which all samples of a request share. ids: int64 (n), distinct. values: float64 (n)."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        """`biases` maps token ids to biases. Raises InvalidRequest for a bias that is out of range."""
        self.ids = np.fromiter(biases, np.int64, len(biases))
        self.values = np.fromiter(biases.values(), np.float64, len(biases))
        self.added: NDArray[np.float64] | None = None
        """What `Sampler` adds to the log-probability of each token of the vocabulary: float64 (V). None before the
        first sample."""
        for place in np.flatnonzero(~(abs(self.values) <= MAX_BIAS))[:1]:
            raise InvalidRequest(
                f"logit_bias of token {self.ids[place]} is {self.values[place]:g}, but must be a number from "
                f"-{MAX_BIAS} to {MAX_BIAS}",
                "logit_bias",
            )


def bias_of(biases: dict[str, float] | None) -> Bias | None:
    """Returns the value of the field `logit_bias`. Raises InvalidRequest for a key that is not a token id, and for a
    bias that is out of range."""
    if biases is None:
        return None
    is_id = re.compile(ID_AS_TEXT).fullmatch
    for name in biases:
        if is_id(name) is None:
            raise InvalidRequest(
                f"logit_bias has the name {truncate_repr(name)}, which is not a token id", "logit_bias"
            )
    return Bias({int(name): value for name, value in biases.items()})


class GenerateRequest(GenerateBody):
    """Generate up to `max_tokens` tokens that continue `tokens`, or the tokens of `session`, which is the session's
    name. The session does not change.

    If the client wants several samples, each is a request of its own, and `sample` is its index. Samples with the same
    seed and different indices use different random numbers. `engine/logits.py` describes the penalties and `bias`.
    `PredictRequest` describes `unknown_names` and `owner`.
    """

    tokens: Sequence[int] = ()
    stop: tuple[str, ...] = ()
    bias: Bias | None = None
    sample: int = 0
    deadline: float | None = None
    unknown_names: tuple[str, ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        _check_source(self, "a generation from a session cannot append input to it: give session or tokens, not both")
        if self.position is not None and self.session is None:
            raise InvalidRequest("position is given without a session", "position")
        penalties = -MAX_PENALTY, MAX_PENALTY
        _within(self, presence_penalty=penalties, frequency_penalty=penalties)
        _at_least(self, position=0, top_logprobs=0, max_tokens=1, top_k=1, seed=0, window=1)
        if not 0 <= self.temperature < math.inf:
            raise InvalidRequest(
                f"temperature is {self.temperature}, but must be a finite number, 0 or more", "temperature"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}, but must be over 0 and at most 1", "top_p")
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
        _check_mode(self, self.mode)


class CompareRequest(CompareBody):
    """Measure recurrent mode and windows of several sizes. Recurrent mode and each window predict the token after
    `tokens`, `repeat` times. `PredictRequest` describes `unknown_names`."""

    tokens: Sequence[int] = ()
    deadline: float | None = None
    unknown_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _some_tokens(self.tokens, self.unknown_names)
        if not 1 <= len(self.windows) <= MAX_COMPARED_WINDOWS:
            raise InvalidRequest(
                f"windows holds {len(self.windows)} values, but must hold 1 to {MAX_COMPARED_WINDOWS}",
                "windows",
            )
        for index, window in enumerate(self.windows):
            if window < 1:
                raise InvalidRequest(f"windows[{index}] is {window}, but must be at least 1", f"windows[{index}]")
        _within(self, repeat=(1, MAX_REPEAT))


SESSION_RULE = '1 to 128 printable characters in the form NFC, without / and \\, and not "." or ".."'


def is_session_id(text: str) -> bool:
    """Returns whether a text is a session's id. Two texts that look alike because they are different forms of the same
    characters are never both ids. An id has no character that `str.isprintable` refuses: controls, formats (such as
    those that change the direction of writing), unassigned and private characters, and separators but the ASCII space.
    Letters, marks and symbols without a visible shape, such as U+3164, U+FE0F and U+2800, are accepted."""
    return ASCII_ID(text) is not None or (
        TEXT_ID(text) is not None and text.isprintable() and is_normalized("NFC", text)
    )


def _at_least(request: object, **least: int) -> None:
    """Raises InvalidRequest if one of the fields in `least` is less than its number there. None is valid."""
    for field, bound in least.items():
        value = getattr(request, field)
        if value is not None and value < bound:
            raise InvalidRequest(f"{field} is {value}, but must be at least {bound}", field)


def _within(request: object, **ranges: tuple[float, float]) -> None:
    """Raises InvalidRequest unless the fields in `ranges` are within their ranges. None is valid, and NaN is not."""
    for field, (low, high) in ranges.items():
        value = getattr(request, field)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{field} is {value}, but must be a number from {low:g} to {high:g}", field)


def _check_source(request: PredictRequest | GenerateRequest, both: str) -> None:
    """Raises InvalidRequest unless the request has either tokens or a session. `both` is the message if it has both."""
    if request.session is None:
        _some_tokens(request.tokens, request.unknown_names)
    elif request.tokens:
        raise InvalidRequest(both, "session")
    elif request.truncated:
        raise InvalidRequest("truncated cannot be combined with session", "truncated")


def _check_mode(body: Body, mode: Mode) -> None:
    """Raises InvalidRequest for a field that the mode does not use (see `Body.only_with`)."""
    for name, takes in body.only_with.items():
        if getattr(body, name) is not None and mode not in takes:
            raise InvalidRequest(
                f"{name} is given, but mode is {mode}: use {name} only in mode {' or '.join(takes)}", name
            )


def _some_tokens(tokens: Sequence[int], unknown: tuple[str, ...]) -> None:
    if not tokens and not unknown:
        raise InvalidRequest("the input is empty: give at least one token", "tokens")


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
