"""What the engine is asked: frozen, slotted, and checked where it is made.

Token ids are plain ints; a *position* counts the tokens of a sequence, its leading `<eos>` not counted. Deadlines are
seconds on the event loop's clock. What can be judged without a model is judged here, by `InvalidRequest`; limits that
hang on a model or on the settings (vocabulary, largest window, longest input) are judged by the engine.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from service.engine.mode import Mode
from service.errors import InvalidRequest

SESSION_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:-]{1,128}")  # clients and proxies take `.` and `..` out of a path

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_COMPARED_MODELS = 8
MAX_COMPARED_WINDOWS = 32
MAX_REPEAT = 1000
MAX_KEY_CHARACTERS = 255
MAX_POSITION = 10**14  # stores count exactly up to 2^53, about 9 * 10^15, in all of their scripts

WINDOW_MODES = (Mode.AUTO, Mode.WINDOW, Mode.BOTH)
"""Of predictions, those that a window may be given for."""

TOLERANCE_MODES = (Mode.AUTO,)
GENERATED_MODES = (Mode.AUTO, Mode.RECURRENT, Mode.WINDOW)
GENERATED_WINDOW_MODES = (Mode.WINDOW,)


class ScoreMethod(StrEnum):
    """How a text may be scored."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Predict what follows `tokens`, from nothing before them (or from `session`, appending nothing).

    `window` is the k of modes auto, window and both (default: the model's own), `tolerance` the largest error bound
    that auto may answer with. From a session, auto is the session's own mode, and an answer whose bound does not
    meet the tolerance is refused. What a mode has no use for is refused too. `truncated`: the tokens end a longer
    sequence, and no start token is fed.
    """

    tokens: tuple[int, ...] = ()
    mode: Mode = Mode.AUTO
    window: int | None = None
    tolerance: float | None = None
    top_k: int = 5
    session: str | None = None
    deadline: float | None = None
    truncated: bool = False

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
    """The last tokens of a sequence, which a new session goes on from at `position`.

    All `position` tokens are the whole sequence, before which the start token is fed; fewer are the end of it.
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


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Append `tokens` to a session and predict what follows. Without a mode, the session's own."""

    session: str
    tokens: tuple[int, ...]
    mode: Mode | None = None
    expected_position: int | None = None
    idempotency_key: str | None = None
    top_k: int = 5
    deadline: float | None = None

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
    """The log-probability of each of `tokens`, given those before it.

    `tolerance` is the largest error that chunks side by side may add; in order there is none. `truncated`: the tokens
    end a longer sequence, and no start token is fed, so nothing predicts the first of them.
    """

    tokens: tuple[int, ...]
    method: ScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: float | None = None
    deadline: float | None = None
    truncated: bool = False

    def __post_init__(self) -> None:
        _some_tokens(self.tokens)
        if self.tolerance is not None:
            _within("tolerance", self.tolerance, 0, 1)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue `tokens` by up to `max_tokens` more.

    `temperature` 0 is greedy; `top_k` and `top_p` of None keep every token; the same `seed` gives the same
    text, which ends before the first of the `stop` strings. Mode auto is recurrent; `window` is for mode window.
    `truncated`: the tokens end a longer sequence, and no start token is fed.
    """

    tokens: tuple[int, ...]
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

    def __post_init__(self) -> None:
        _some_tokens(self.tokens)
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
    """Measure recurrent against windows of several k, `repeat` times each, on what follows `tokens`."""

    tokens: tuple[int, ...]
    windows: tuple[int, ...] = (8, 16, 32, 64)
    repeat: int = 20
    deadline: float | None = None

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
    """Refuses NaN too, which is within nothing."""
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}, but must be a number from {low:g} to {high:g}", field)


def _some_tokens(tokens: tuple[int, ...]) -> None:
    if not tokens:
        raise InvalidRequest("the input is empty: give at least one token", "tokens")


def _window(window: int | None, mode: Mode, *takes: Mode) -> None:
    """Raises InvalidRequest for no k, and for one that the mode has no use for."""
    if window is None:
        return
    _at_least("window", window, 1)
    if mode not in takes:
        raise InvalidRequest(f"window is given, but mode is {mode}; it is for {', '.join(takes)}", "window")
