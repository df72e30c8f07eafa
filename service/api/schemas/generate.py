"""What was generated, whole or as a stream."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.api.schemas.predict import ErrorBound, LatencyDocument, ModelDocument
from wane.service.types import Mode, StateSource


class GeneratedTokenDocument(TypedDict):
    """A generated token; in a stream, `text` is what it made certain."""

    token_id: int
    token: str
    text: str
    logprob: float
    bytes: NotRequired[list[int]]


class FinishDocument(ModelDocument):
    """How a stream ends: as the whole answer, without the tokens' log-probabilities."""

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length"]
    mode: Mode
    window: int | None
    state: StateSource
    error_bound: ErrorBound
    latency: LatencyDocument


class GenerationDocument(FinishDocument):
    """What was generated."""

    logprobs: list[float]
