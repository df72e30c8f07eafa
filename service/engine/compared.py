"""What a comparison of recurrent with windows of several k is made of. Durations are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.answers import Agreement, Prediction
from service.engine.mode import Mode, Origin


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one duration over many runs."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ComparedMode:
    """One line of a comparison. Recurrent is one step from a resident state: what a session pays for a token.

    `agreement` is with that recurrent answer, and null for it.
    """

    mode: Mode
    window: int | None
    state: Origin
    predictions: tuple[Prediction, ...]
    queue: Percentiles
    compute: Percentiles
    total: Percentiles
    error_bound: float | None
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model's lines: recurrent, then every window in the order asked for."""

    repeat: int
    recurrent: ComparedMode
    windows: tuple[ComparedMode, ...]
