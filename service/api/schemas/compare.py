"""Recurrent beside windows of several k."""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.api.schemas.predict import AgreementDocument, ErrorBound, ModelDocument, PredictionDocument
from wane.service.types import Mode, StateSource


class PercentilesDocument(TypedDict):
    """Of one phase, over the repeated runs."""

    p50_ms: float
    p99_ms: float


class PhasesDocument(TypedDict):
    """Where the time went, over the repeated runs."""

    queue: PercentilesDocument
    compute: PercentilesDocument
    total: PercentilesDocument


class ComparedDocument(TypedDict):
    """One line of a comparison; `agreement` is with recurrent, and null for it."""

    mode: Mode
    window: int | None
    state: StateSource
    predictions: list[PredictionDocument]
    latency: PhasesDocument
    error_bound: ErrorBound
    agreement: AgreementDocument | None


class ComparedModelDocument(ModelDocument):
    """One model's comparison; `tokens` is the length of the input."""

    tokens: int
    repeat: int
    recurrent: ComparedDocument
    windows: list[ComparedDocument]


class ComparisonDocument(TypedDict):
    """One comparison for each model asked for."""

    device: str
    models: list[ComparedModelDocument]
