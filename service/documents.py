"""What clients read: the shapes of the native protocol's answers.

They are TypedDicts: the OpenAPI page shows them, and the type checker holds the encoders of `service.routes.answers`
to them.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from models.manifest import Certificate, Contraction, Quality, Role, Rounding
from service.engine.agreement import Source
from service.engine.costs import Cost
from service.engine.types import Mode, Origin

ErrorBound = Annotated[
    float | None,
    Field(
        description="total variation from the never-interrupted model, at most, at temperature 1 and before top-k or "
        "top-p; proved but for the rounding of float32 runs, which was measured; 0: exact, but for that; "
        "1: nothing is known; null: nothing is certified"
    ),
]
StateErrorBound = Annotated[
    float | None,
    Field(
        description="2-norm distance from the never-interrupted model at the output layer's input, at most; "
        "null: nothing is certified"
    ),
]


Durable = Annotated[
    bool,
    Field(
        description="of a session in a store that replicas share: whether the store has acknowledged it as it is here; "
        "if not, its latest tokens may be lost"
    ),
]


class PredictionDocument(TypedDict):
    """One possible next token; `bytes` only where `token` is not whole text."""

    token_id: int
    token: str
    probability: float
    logprob: float
    bytes: NotRequired[list[int]]


class LatencyDocument(TypedDict):
    """Where the time went once the tokens were there: tokenising text comes before."""

    queue_ms: float
    compute_ms: float
    total_ms: float


class AgreementDocument(TypedDict):
    """How far the window's answer is from the recurrent one. `top1_proved`: the window alone, by the margin its first
    token leads by, proves that it is the recurrent one's too; `top1_match`: it was seen to be."""

    top1_match: bool
    top1_proved: bool
    total_variation: float
    kl: float
    max_logit_difference: float
    state_distance: float
    state_error_bound: StateErrorBound
    error_bound: ErrorBound


class ModeDocument(TypedDict):
    """One mode's part in an answer to `both`."""

    predictions: list[PredictionDocument]
    latency: LatencyDocument


class ModelDocument(TypedDict):
    """Who answered, and where it ran."""

    model: str
    model_version: str
    device: str


class AnswerDocument(ModelDocument):
    """What comes next. `top1_proved`: the first prediction is proved to be the never-interrupted model's."""

    mode: Mode
    window: int | None
    predictions: list[PredictionDocument]
    latency: LatencyDocument
    state: Origin
    error_bound: ErrorBound
    state_error_bound: StateErrorBound
    top1_proved: bool
    modes: NotRequired[dict[str, ModeDocument]]
    agreement: NotRequired[AgreementDocument]
    session: NotRequired[str]
    position: NotRequired[int]
    replayed: NotRequired[bool]
    durable: NotRequired[Durable]


class FailureDocument(TypedDict):
    """One item of a batch that was not answered, as a problem document."""

    error: dict[str, object]


class BatchDocument(ModelDocument):
    """An answer or an error for each input, in order."""

    results: list[AnswerDocument | FailureDocument]


class StepsDocument(TypedDict):
    """An answer or an error for each step, in order."""

    results: list[AnswerDocument | FailureDocument]


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
    state: Origin
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


class ScoreProgressDocument(TypedDict):
    """In a stream: so many of all tokens were run."""

    done: int
    total: int


class ScoredTokensDocument(TypedDict):
    """In a stream: the tokens from `position` on, and the log-probability of each."""

    position: int
    tokens: list[int]
    logprobs: list[float]


class ScoreSummaryDocument(ModelDocument):
    """How a text was scored.

    `chunks` ran side by side, each `warm_up` tokens or more before its first; `rounds` is 1, and 1 for every part of
    them that was run again. `max_residual`: how far a unit of the state was, at most, from where the chunk before had
    ended; 0: as in order, bit for bit. `error_bound`: the worst over all positions.
    """

    perplexity: float
    chunks: int
    warm_up: int | None
    rounds: int
    max_residual: float
    state: Origin
    error_bound: ErrorBound
    latency: LatencyDocument


class ScoreDocument(ScoreSummaryDocument):
    """The tokens that were scored, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


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
    state: Origin
    error_bound: ErrorBound
    latency: LatencyDocument


class GenerationDocument(FinishDocument):
    """What was generated."""

    logprobs: list[float]


class SessionDocument(ModelDocument):
    """A session as its owner may see it."""

    session: str
    mode: Mode
    position: int
    state: Origin
    error_bound: ErrorBound
    idle_s: float
    durable: NotRequired[Durable]


class ModelFactsDocument(TypedDict):
    """OpenAI's fields, and the manifest's beside them. `k_epsilon`: for a bound on the total variation, the smallest k
    whose bound, and that of every larger k, is within it; null where no window's is."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    model_version: str
    device: str
    description: str
    family: str
    parameters: dict[str, object]
    k: int
    max_window: int
    k_epsilon: dict[str, int | None]
    vocabulary: dict[str, object]
    quality: Quality | None
    attribution: str | None


Costs = Annotated[
    dict[Role, list[Cost]],
    Field(
        description="by graph, shortest first: compute time an item, measured at warm-up and averaged over what was "
        "served since, the latest counting most; auto chooses by it"
    ),
]


class ModelCardDocument(ModelFactsDocument):
    """One model, with the whole of its certificate, and what its runs cost here."""

    certificate: Certificate
    costs: Costs


class CertificateSummaryDocument(TypedDict):
    """The certificate without its curve; `reason` says why a model is not certified."""

    contractive: bool
    certified: bool
    reason: str | None
    layers: tuple[Contraction, ...]
    head_diameter: float
    rounding: Rounding | None


class ModelSummaryDocument(ModelFactsDocument):
    """One model of the list."""

    certificate: CertificateSummaryDocument


class ModelListDocument(TypedDict):
    """Every model that is served, the default first."""

    object: Literal["list"]
    data: list[ModelSummaryDocument]


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


class ReadinessDocument(TypedDict):
    """Whether requests are taken; the device is null until models run on one, and models are listed once ready. The
    store is null until models are loaded."""

    ready: bool
    status: Literal["loading", "ready", "draining", "store_away"]
    device: str | None
    models: list[ModelStandingDocument]
    store: StoreDocument | None


class ProblemDocument(TypedDict):
    """RFC 9457, with a stable `code`, whether trying again may help, and the request's id; some codes add fields."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    request_id: str


Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


class LoadedDocument(TypedDict):
    """A model that is served now."""

    name: str
    version: str
    state: Condition


class UnloadedDocument(TypedDict):
    """A model that is not served any more."""

    name: str
    state: Condition


class RepositoryEntryDocument(TypedDict):
    """One version of a model; `version` is empty where its manifest cannot be read, `reason` where it is simply ready.
    A model has several entries while one version takes another's place."""

    name: str
    version: str
    state: Condition
    reason: str


class ProtocolFailureDocument(TypedDict):
    """A failure, as the Open Inference Protocol has it; `code` as in a problem document."""

    error: str
    code: str
    retryable: bool
    request_id: str
