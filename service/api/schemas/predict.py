"""The requests and answers of predictions and steps."""

from __future__ import annotations

from typing import Annotated, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.api.schemas.common import (
    AUTO,
    HISTORY,
    AtMost,
    Body,
    Cache,
    Events,
    Model,
    Prove,
    RankedBody,
    SessionId,
    Text,
    Tokens,
    Tolerance,
    TopK,
    Truncated,
    Window,
    WireMode,
    absent,
)
from wane.service.types import (
    CACHE_TOKENS,
    CREATED,
    DURABLE,
    SEEN_TOKENS,
    TOLERANCE_MODES,
    UNKNOWN,
    WINDOW_MODES,
    Agreement,
    ErrorBound,
    LatencyDocument,
    Mode,
    ModeAnswer,
    ModelDocument,
    PredictionDocument,
    StateErrorBound,
    StateSource,
)


class EventsBody(Body):
    """An input of a batch that is a sequence of events."""

    events: Events


class PredictBody(RankedBody):
    """Predict the next token after one sequence, after each sequence of a batch, or after a session's tokens."""

    examples = (
        {"input": HISTORY, "mode": "both"},
        {"tokens": [5, 6, 7], "mode": "recurrent", "top_k": 3},
        {"input": HISTORY, "mode": "window", "window": 8},
        {"input": HISTORY, "tolerance": 0.001},
        {"inputs": [HISTORY, [5, 6, 7]]},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": HISTORY, "mode": "window", "window": 2, "prove": True},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events", "inputs", "session")
    only_with: ClassVar = {"window": WINDOW_MODES, "tolerance": TOLERANCE_MODES}
    needs: ClassVar = {"unknown": ("events", "inputs", "candidates", "exclude")}
    rules: ClassVar = ({"anyOf": [absent("session"), {"properties": {"truncated": {"const": False}}}]},)

    model: Model = None
    inputs: Annotated[list[Text | Tokens | EventsBody] | None, AtMost("max_batch_inputs")] = Field(
        default=None,
        min_length=1,
        fail_fast=True,
        description='a batch of inputs; each is a text, a list of token ids, or `{"events": [...]}`, and gets its own '
        "answer",
    )
    session: SessionId | None = Field(
        default=None, description="the id of a session; predict its next token without appending to it"
    )
    mode: WireMode = Field(default=Mode.AUTO, description=AUTO)
    window: Window | None = None
    tolerance: Tolerance | None = None
    top_k: TopK = 5
    truncated: Truncated = False
    prove: Prove = False
    cache: Cache = True


class AnswerDocument(ModelDocument):
    """A prediction of the next token. If `top1_proved` is true, it is proved that recurrent mode over all tokens has
    the same most probable token. The proof follows from the margin between the first two predictions or, with `prove`,
    from a search."""

    mode: Mode
    window: int | None
    predictions: list[PredictionDocument]
    latency: LatencyDocument
    state: StateSource
    error_bound: ErrorBound
    state_error_bound: StateErrorBound
    top1_proved: bool
    modes: NotRequired[dict[str, ModeAnswer]]
    agreement: NotRequired[Agreement]
    session: NotRequired[str]
    position: NotRequired[int]
    replayed: NotRequired[bool]
    created: NotRequired[Annotated[bool, Field(description=CREATED)]]
    durable: NotRequired[Annotated[bool, Field(description=DURABLE)]]
    cache_tokens: NotRequired[Annotated[int, Field(description=CACHE_TOKENS)]]
    unknown: NotRequired[Annotated[list[str], Field(description=UNKNOWN)]]
    seen_tokens: NotRequired[Annotated[int, Field(description=SEEN_TOKENS)]]


class FailureDocument(TypedDict):
    """A failed item of a batch. `error` is a problem document."""

    error: dict[str, object]


class BatchDocument(ModelDocument):
    """The answer to a batch. It has an answer or an error for each input, in the order of the inputs."""

    results: list[AnswerDocument | FailureDocument]


class StepsDocument(TypedDict):
    """The answer to many steps. It has an answer or an error for each step, in the order of the steps."""

    results: list[AnswerDocument | FailureDocument]


class StepColumnsDocument(TypedDict):
    """The answers to steps as one list for each field, in the order of the steps. For a failed step, every list has
    null, except `session` and `error`. `error` has a problem document for a failed step, and null for a successful
    step.

    `token_id` and `logprob` list each step's predictions, most probable first. `latency` has the largest `queue_ms`,
    `compute_ms` and `total_ms` of all steps. `unknown` and `seen_tokens` are present only if a step has them.
    """

    session: list[str]
    model: list[str | None]
    mode: list[Mode | None]
    window: list[int | None]
    state: list[StateSource | None]
    position: list[int | None]
    replayed: list[bool | None]
    created: list[bool | None]
    durable: list[bool | None]
    token_id: list[list[int] | None]
    logprob: list[list[float] | None]
    error_bound: list[float | None]
    state_error_bound: list[float | None]
    top1_proved: list[bool | None]
    cache_tokens: list[int | None]
    unknown: NotRequired[list[list[str] | None]]
    seen_tokens: NotRequired[list[int | None]]
    error: list[dict[str, object] | None]
    latency: LatencyDocument
