"""The requests and answers of sessions and their steps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, WithJsonSchema, model_validator

from wane.service.api.schemas.common import (
    HISTORY,
    IDEMPOTENCY,
    AtMost,
    Body,
    Cache,
    Events,
    IdempotencyKey,
    Model,
    Name,
    Natural,
    Prove,
    RankedBody,
    SessionId,
    Text,
    Tokens,
    TopK,
    UnknownEvents,
    WireMode,
    absent,
    present,
)
from wane.service.types import MAX_POSITION

BEHIND_A_TOKEN = {"required": ["position"], "properties": {"position": {"type": "integer", "minimum": 1}}}
"""The JSON schema rule of a body that continues a history. The body's `position` is at least 1."""


class SessionBody(Body):
    """Start a session at position 0. With a history, start the session at `position`. The history is the last tokens
    before that position."""

    examples = ({"session": "demo"}, {"mode": "recurrent"}, {}, {"history": [5, 6, 7], "position": 20})
    not_both: ClassVar[tuple[str, ...]] = ("history", "input", "events")
    needs: ClassVar = {"unknown": ("events",)}
    rules: ClassVar = (
        *({"anyOf": [absent(name), BEHIND_A_TOKEN]} for name in not_both),
        {
            "anyOf": [
                {"properties": {"position": {"enum": [None, 0]}}},
                *(present(name) for name in not_both),
            ]
        },
    )

    model: Model = None
    session: SessionId | None = Field(default=None, description="the session's id; default: a new id")
    mode: WireMode | None = Field(default=None, description="the default mode of the session's steps")
    history: Annotated[Tokens | None, AtMost("max_input_tokens", of_tokens=True)] = Field(
        default=None,
        description="token ids: the last tokens before `position`. If there are `position` of them, they are the whole "
        "sequence, and the start token is fed before them. If there are fewer, they are the end of a longer sequence "
        "(see `truncated` in /v1/predict)",
    )
    input: Text | None = Field(default=None, description="the history as a text")
    events: Annotated[Events | None, AtMost("max_input_tokens", of_tokens=True)] = Field(
        default=None,
        description="the history as events, for a model of events; a skipped event does not count in `position`",
    )
    unknown: UnknownEvents | None = None
    position: Annotated[Natural, AtMost(MAX_POSITION)] | None = Field(
        default=None,
        description="the session's number of tokens so far, without the start token <eos>; required with `history`, "
        "`input` or `events`",
    )

    @model_validator(mode="after")
    def _history_and_position(self) -> Self:
        name = next((name for name in self.not_both if getattr(self, name) is not None), None)
        if self.position is None and name is not None:
            raise ValueError(f"`{name}` holds the last tokens before a position: give `position`, too")
        return self


class StepBody(RankedBody):
    """Append tokens to a session, and predict the next token."""

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"input": HISTORY},
        {"tokens": [5, 6, 7], "top_k": 3},
        {"tokens": [5], "create": True},
    )

    expected_position: Natural | None = Field(
        default=None,
        description="the session's expected position before the step. If the session has another position, the answer "
        "is 409. The header x-wane-position has the same effect",
    )
    top_k: TopK = 5
    mode: WireMode | None = Field(default=None, description="default: the session's mode")
    prove: Prove = False
    cache: Cache = True
    create: bool = Field(
        default=False,
        description="create the session if it does not exist and `expected_position` is 0 or absent; the answer then "
        "has `created`",
    )
    model: Name | None = Field(
        default=None,
        description="the model of a session that the step creates; default: the first model in /v1/models. An existing "
        "session must have this model",
    )


class SessionStepBody(StepBody):
    """One step of a call with many steps."""

    session: SessionId = Field(description="the session's id")
    idempotency_key: IdempotencyKey | None = Field(default=None, description=IDEMPOTENCY)


class StepsFormat(StrEnum):
    """The format of the answers to many steps."""

    DOCUMENTS = "documents"
    COLUMNS = "columns"


WireStepsFormat = Annotated[
    StepsFormat,
    Field(
        strict=False,
        description="documents: an answer for each step, in the format of a single step's answer; columns: one list "
        "for each field, which takes about a quarter of the bytes. Columns omit `probability`, which is exp(logprob), "
        "and `token`, which the model's vocabulary has for each token_id",
    ),
    WithJsonSchema({"type": "string", "enum": [form.value for form in StepsFormat]}),
]


class StepsBody(Body):
    """Steps of many sessions in one call. Steps of the same session run in order. If a step fails, the later steps of
    its session fail, too."""

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
    """One message of a session's WebSocket. A message is a step or a rewind."""

    examples = (
        {"input": HISTORY},
        {"tokens": [5], "expected_position": 3},
        {"rewind": 1},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events", "rewind")

    rewind: Natural | None = Field(default=None, description="drop the tokens after this position")
    idempotency_key: IdempotencyKey | None = Field(default=None, description=IDEMPOTENCY)

    @model_validator(mode="after")
    def _rewind_alone(self) -> Self:
        others = self.model_fields_set - {"rewind"}
        if self.rewind is not None and others:
            raise ValueError(f"`rewind` excludes other fields; found `{min(others)}`")
        return self


class RewindBody(Body):
    """Drop a session's latest tokens."""

    examples = ({"position": 1},)

    position: Natural = Field(
        description="the number of tokens to keep; the server must still have the last of these tokens"
    )
