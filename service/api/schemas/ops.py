"""Liveness, readiness, and the report of what was measured while serving."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.api.schemas.models import Costs
from wane.service.api.schemas.predict import ModelDocument
from wane.service.engine.agreement import Source
from wane.service.types import Mode


class LivenessDocument(TypedDict):
    """The process lives."""

    live: bool


class ModelStandingDocument(ModelDocument):
    """A model that is served, and why it is not certified where it is not."""

    certified: bool
    reason: str | None


class StoreDocument(TypedDict):
    """Where sessions are kept (memory or redis), whether it can be reached, and how many sessions have tokens that only
    this process has."""

    kind: str
    reachable: bool
    not_durable: int


class FailedModelDocument(TypedDict):
    """A model whose bundle could not be loaded, or a bundle that has no name but its folder's; and why."""

    model: str
    reason: str


class ReadinessDocument(TypedDict):
    """Whether every model is loaded, or failed to be. `models`: those that answer already; `loading`: those that
    requests wait for. The device is null until a model runs on one, and the store until it is open."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_unavailable"]
    device: str | None
    models: list[ModelStandingDocument]
    loading: list[str]
    failed: list[FailedModelDocument]
    store: StoreDocument | None


class BucketDocument(TypedDict):
    """How many values were at most `le_ms`; null: all of them."""

    le_ms: float | None
    count: int


class DurationsDocument(TypedDict):
    """One phase: percentiles of the latest values, and cumulative buckets of all, which add up over replicas."""

    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    count: int
    sum_ms: float
    buckets: list[BucketDocument]


class DurationsByPhaseDocument(TypedDict):
    """Where the time went."""

    queue: DurationsDocument
    compute: DurationsDocument
    total: DurationsDocument


class ModeReportDocument(TypedDict):
    """Predictions and steps that were answered by one mode."""

    requests: int
    latency: DurationsByPhaseDocument


class TotalVariationDocument(TypedDict):
    """Over all comparisons; null where there was none."""

    mean: float | None
    max: float | None


class ErrorBoundDocument(TypedDict):
    """Over the comparisons that had a bound; null where there was none."""

    bounded: int
    mean: float | None
    max: float | None


class AgreementReportDocument(TypedDict):
    """How far windows were from recurrent, over all comparisons; null where there was none. `bound_violations`: pairs
    further apart than was claimed of them."""

    compared: int
    top1_match_rate: float | None
    top1_proved_rate: float | None
    total_variation: TotalVariationDocument
    max_logit_difference: float | None
    error_bound: ErrorBoundDocument
    bound_violations: int


class AgreementBySourceDocument(AgreementReportDocument):
    """Over all comparisons, and by why they were made: `both` modes were asked for, or `shadow`, a sample of live
    answers."""

    sources: dict[Source, AgreementReportDocument]


class ShadowReportDocument(TypedDict):
    """What became of the live answers that were sampled; processor time in seconds. `dropped`: the runner was never
    idle for them."""

    compared: int
    dropped: int
    failed: int
    cpu_s: float


class SessionsReportDocument(TypedDict):
    """Sessions with and without a state in memory, and how many states were rebuilt."""

    resident: int
    parked: int
    rebuilt: int


class IntegrityDocument(TypedDict):
    """How often every state was checked, and how many faults were found: each costs a rebuilding, and is logged."""

    rounds: int
    faults: int


class ModelReportDocument(ModelDocument):
    """One model's figures since the start; `operations` counts answers by kind of request."""

    modes: dict[Mode, ModeReportDocument]
    operations: dict[str, int]
    agreement: AgreementBySourceDocument
    shadow: ShadowReportDocument
    sessions: SessionsReportDocument
    integrity: IntegrityDocument
    costs: Costs


class ReportDocument(TypedDict):
    """What was measured while serving."""

    device: str
    models: list[ModelReportDocument]
