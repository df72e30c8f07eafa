"""What the engine generates, token by token, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from service.engine.answers import Latency
from service.engine.mode import Mode, Origin


class FinishReason(StrEnum):
    """Why a generation ended: a stop string (or the end of an event sequence), or its token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of a generation. `text` is what it makes certain: empty while a character or a possible stop
    string is still open. The texts of all tokens, joined, are the text of the `Finish`."""

    token_id: int
    token: str
    text: str
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The last thing a generation gives: why it ended, and all of it.

    `error_bound` is the largest of its distributions', each compared with the never-interrupted model's after the same
    tokens.
    """

    reason: FinishReason
    text: str
    tokens: tuple[int, ...]
    mode: Mode
    state: Origin
    error_bound: float | None
    window: int | None
    latency: Latency
