"""A session."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, NotRequired, Self

from pydantic import Field, WithJsonSchema, model_validator

from wane.service.api.schemas.common import (
    HISTORY,
    IDEMPOTENCY,
    AtMost,
    Body,
    IdempotencyKey,
    Model,
    Natural,
    Prove,
    SequenceBody,
    SessionId,
    Text,
    Tokens,
    TopK,
    WireMode,
    absent,
    exactly_one,
)
from wane.service.api.schemas.predict import Durable, ErrorBound, ModelDocument
from wane.service.types import (
    MAX_POSITION,
    Mode,
    StateSource,
)

BEHIND_A_TOKEN = {"required": ["position"], "properties": {"position": {"type": "integer", "minimum": 1}}}
"""What a body with a history has."""


class SessionBody(Body):
    """Start a session: at position 0, or at `position` behind its last tokens."""

    examples = ({"session": "demo"}, {"mode": "recurrent"}, {}, {"history": [5, 6, 7], "position": 20})
    not_both: ClassVar[tuple[str, ...]] = ("history", "input")
    rules: ClassVar = (
        *({"anyOf": [absent(name), BEHIND_A_TOKEN]} for name in not_both),
        {
            "anyOf": [
                {"properties": {"position": {"enum": [None, 0]}}},
                *({"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in not_both),
            ]
        },
    )

    model: Model = None
    session: SessionId | None = Field(default=None, description="an id of your own; default: a new one")
    mode: WireMode | None = Field(default=None, description="how its steps are answered unless they say")
    history: Annotated[Tokens | None, AtMost("max_input_tokens", of_tokens=True)] = Field(
        default=None,
        description="token ids: the last tokens before `position`. If these are all `position` tokens, they are the "
        "whole sequence, and the start token is fed before them; if fewer, they end a longer one, as with `truncated`",
    )
    input: Text | None = Field(default=None, description="the history as text")
    position: Annotated[Natural, AtMost(MAX_POSITION)] | None = Field(
        default=None,
        description="how many tokens the session has had, the start token <eos> not counted; with `history` or `input`",
    )

    @model_validator(mode="after")
    def _history_and_position(self) -> Self:
        if all(getattr(self, name) is not None for name in self.not_both):
            raise ValueError("give `history` or `input`, not both")
        if self.position is None and (self.history is not None or self.input is not None):
            name = "input" if self.history is None else "history"
            raise ValueError(f"`{name}` holds the last tokens before a position: give `position`, too")
        return self


class StepBody(SequenceBody):
    """Append to a session, and predict what follows."""

    examples: ClassVar[tuple[dict[str, object], ...]] = ({"input": HISTORY}, {"tokens": [5, 6, 7], "top_k": 3})

    expected_position: Natural | None = Field(
        default=None, description="where the step must start, or 409; also as the header x-wane-position"
    )
    top_k: TopK = 5
    mode: WireMode | None = Field(default=None, description="default: the session's own")
    prove: Prove = False


class SessionStepBody(StepBody):
    """One of many steps."""

    session: SessionId = Field(description="the session's id")
    idempotency_key: IdempotencyKey | None = Field(default=None, description=IDEMPOTENCY)


class StepsFormat(StrEnum):
    """How the answers to many steps are written."""

    DOCUMENTS = "documents"
    COLUMNS = "columns"


class StepsBody(Body):
    """Steps of many sessions in one call. Those of one session are taken in order; behind one that fails, its session's
    others are not."""

    examples = ({"steps": [{"session": "demo", "input": HISTORY}, {"session": "demo", "tokens": [5], "top_k": 1}]},)

    steps: Annotated[
        list[Annotated[SessionStepBody, WithJsonSchema(SessionStepBody.model_json_schema())]],
        Field(min_length=1, fail_fast=True),
        AtMost("max_batch_inputs"),
    ]
    format: StepsFormat = Field(
        default=StepsFormat.DOCUMENTS,
        strict=False,
        description="documents: an answer for each step, as of a single one; columns: one list for each field, a third "
        "as long in all",
    )


class StreamBody(StepBody):
    """One message of a stream: a step, or a rewind."""

    examples = (
        {"input": HISTORY},
        {"tokens": [5], "expected_position": 3},
        {"rewind": 1},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "rewind")

    rewind: Natural | None = Field(default=None, description="forget the tokens behind this position")
    idempotency_key: IdempotencyKey | None = Field(default=None, description=IDEMPOTENCY)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        exactly_one(self, *self.one_of)
        beside = self.model_fields_set - {"rewind"}
        if self.rewind is not None and beside:
            raise ValueError(f"`rewind` stands alone; found `{min(beside)}` beside it")
        return self


class RewindBody(Body):
    """Forget a session's latest tokens."""

    examples = ({"position": 1},)

    position: Natural = Field(description="how many tokens to keep; those after it must still be in the tail")


class SessionDocument(ModelDocument):
    """A session as its owner may see it. `position` counts its tokens, the start token <eos> not among them."""

    session: str
    mode: Mode
    position: int
    state: StateSource
    error_bound: ErrorBound
    idle_s: float
    durable: NotRequired[Durable]
