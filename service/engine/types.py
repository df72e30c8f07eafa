"""The nouns that routes and engine share: frozen, slotted, and checked where they are made.

Token ids are plain ints; a *position* counts the tokens of a sequence, its leading `<eos>` not counted.
Durations are milliseconds, deadlines are seconds on the event loop's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How a request may ask to be answered."""

    AUTO = "auto"
    RECURRENT = "recurrent"
    WINDOW = "window"
    BOTH = "both"


class Origin(StrEnum):
    """Where the state behind an answer came from (the answer's `state`)."""

    RESIDENT = "resident"
    REBUILT = "rebuilt"
    WINDOW = "window"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """Predict what follows `tokens`, from nothing before them (or from `session`, appending nothing)."""

    tokens: tuple[int, ...] = ()
    mode: Mode = Mode.AUTO
    window: int | None = None
    tolerance: float | None = None
    top_k: int = 5
    session: str | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Append `tokens` to a session and predict what follows."""

    session: str
    tokens: tuple[int, ...]
    mode: Mode | None = None
    expected_position: int | None = None
    idempotency_key: str | None = None
    top_k: int = 5
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One possible next token; `token_bytes` only where the token's text is not whole UTF-8."""

    token_id: int
    token: str
    probability: float
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """Where a request's time went: waiting for the runner, running, and all of it."""

    queue_ms: float
    compute_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the window's answer is from the recurrent one; names and units as in the HTTP contract."""

    top1_match: bool
    top1_proved: bool
    total_variation: float
    kl: float
    max_logit_difference: float
    state_distance: float
    state_error_bound: float | None
    error_bound: float | None


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """One mode's part in an answer to `both`."""

    predictions: tuple[Prediction, ...]
    latency: Latency


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says comes next, and how it came to say so."""

    mode: Mode
    predictions: tuple[Prediction, ...]
    latency: Latency
    state: Origin
    error_bound: float | None
    window: int | None = None
    modes: dict[Mode, ModeAnswer] | None = None
    agreement: Agreement | None = None
    session: str | None = None
    position: int | None = None
    replayed: bool | None = None
