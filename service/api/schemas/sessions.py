"""Sessions and their steps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

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
)
from wane.service.types import MAX_POSITION

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


WireStepsFormat = Annotated[
    StepsFormat,
    Field(
        strict=False,
        description="documents: an answer for each step, as of a single one; columns: one list for each field, about a "
        "quarter as long in all. Columns have no probability and no token: a probability is exp(logprob), and the "
        "model's vocabulary has the token of a token_id",
    ),
    WithJsonSchema({"type": "string", "enum": [form.value for form in StepsFormat]}),
]


class StepsBody(Body):
    """Steps of many sessions in one call. Those of one session are taken in order; behind one that fails, its session's
    others are not."""

    examples = (
        {"steps": [{"session": "demo", "input": HISTORY}, {"session": "demo", "tokens": [5], "top_k": 1}]},
        {"steps": [{"session": "demo", "tokens": [5], "top_k": 1}], "format": "columns"},
    )

    steps: Annotated[
        list[Annotated[SessionStepBody, WithJsonSchema(SessionStepBody.model_json_schema())]],
        Field(min_length=1, fail_fast=True),
        AtMost("max_batch_inputs"),
    ]
    format: WireStepsFormat = StepsFormat.DOCUMENTS


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
    def _rewind_alone(self) -> Self:
        beside = self.model_fields_set - {"rewind"}
        if self.rewind is not None and beside:
            raise ValueError(f"`rewind` stands alone; found `{min(beside)}` beside it")
        return self


class RewindBody(Body):
    """Forget a session's latest tokens."""

    examples = ({"position": 1},)

    position: Natural = Field(description="how many tokens to keep; those after it must still be in the tail")
