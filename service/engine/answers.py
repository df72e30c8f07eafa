"""What the engine says of predictions, steps and sessions: all immutable. Durations are milliseconds; a *position*
counts the tokens of a sequence, its leading `<eos>` not counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from service.engine.mode import Mode, Origin


class Prediction(NamedTuple):
    """One possible next token; `token_bytes` only where the token's text is not whole UTF-8."""

    token_id: int
    token: str
    probability: float
    logprob: float
    token_bytes: bytes | None = None


class Latency(NamedTuple):
    """Where a request's time went in the engine: waiting for the runner, running, and all of it.

    It begins with the tokens in hand: reading a request, and tokenising its text, come before. `batch_items`: how many
    shared the largest batch that it was in.
    """

    queue_ms: float
    compute_ms: float
    total_ms: float
    batch_items: int = 0


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


class Answer(NamedTuple):
    """What the model says comes next, and how it came to say so.

    `mode` is the one that was used, `window` the k of a windowed answer. `top1_proved`: the first prediction is proved
    to be the never-interrupted model's. `position` and `replayed` are given for sessions only (`replayed` for steps
    only), and `durable` where replicas share the store: whether it has the session's tokens.
    """

    mode: Mode
    predictions: tuple[Prediction, ...]
    latency: Latency
    state: Origin
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


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as its owner may see it.

    `state` is where the state of an answer in the session's own mode would come from now: `resident`, `rebuilt` for
    a parked session, or `window`; `error_bound` bounds that answer. `created`: the request that this answers made it.
    """

    session: str
    model: str
    model_version: str
    mode: Mode
    position: int
    state: Origin
    error_bound: float | None
    idle_s: float
    durable: bool | None = None
    created: bool = False
