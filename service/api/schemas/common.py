"""What clients send: the native protocol's requests, as strict models that refuse unknown fields.

Strict means that nothing is converted: "5" and 5.0 are no integers, true is no number, and NaN and Infinity,
which are not JSON but which some encoders write all the same, are refused by name. Whether a value is in range is
not judged here: `wane.service.types` and the engine do that, for every protocol alike. The OpenAPI description
says it all the same, by their constants.

Every list fails at its first wrong item: one failure is told, and a body may hold a million wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from wane.service.settings import Settings
from wane.service.types import (
    GENERATED_MODES,
    GENERATED_WINDOW_MODES,
    MAX_COMPARED_MODELS,
    MAX_COMPARED_WINDOWS,
    MAX_KEY_CHARACTERS,
    MAX_POSITION,
    MAX_REPEAT,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SESSION_ID,
    TOLERANCE_MODES,
    WINDOW_MODES,
    Mode,
    ScoreMethod,
)

HISTORY = "The history of the"

IDEMPOTENCY = (
    "names this step: sent again with the last step's key, the same tokens and the same position (if it has one), the "
    "step is answered again and appends nothing; with other tokens or another position it is 409 idempotency_key_reused"
)
AT_MOST = "x-at-most"
"""Where a schema has the limit of an `AtMost`."""


def anchored(pattern: str) -> str:
    """A regular expression of the whole of a text, for a schema, where one is searched for."""
    return f"^(?:{pattern})$"


def says(**keywords: object) -> Any:
    """Keywords of JSON Schema for what is checked elsewhere."""
    return Field(json_schema_extra=keywords)  # type: ignore[arg-type]


def modes(of: Iterable[Mode]) -> WithJsonSchema:
    """The schema of one of some modes."""
    return WithJsonSchema({"type": "string", "enum": [mode.value for mode in of]})


@dataclass(frozen=True, slots=True)
class AtMost:
    """How many values a list may hold, or how large an integer may be: a number, or what the setting of a name says.
    `of_tokens`: the list is an input's token ids."""

    limit: int | str
    of_tokens: bool = False

    def value(self, settings: Settings) -> int | None:
        """The number; None where there is no limit."""
        most: int | None = getattr(settings, self.limit) if isinstance(self.limit, str) else self.limit
        return most

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """For `service/api/openapi.py`, which knows the settings."""
        return {**handler(schema), AT_MOST: self.limit}


Name = Annotated[str, Field(max_length=64)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # of a number without end, the message would have none either
Natural = Annotated[Integer, says(minimum=0)]
Positive = Annotated[Integer, says(minimum=1)]
Model = Annotated[Name | None, Field(description="a name from /v1/models; default: the first there")]
Text = Annotated[str, Field(description="text, tokenised as the model's vocabulary does it"), says(minLength=1)]
Tokens = Annotated[
    list[int],
    Field(fail_fast=True, description="token ids"),
    says(minItems=1, items={"type": "integer", "minimum": 0}),
]
TopK = Annotated[
    Positive, AtMost("top_k_limit"), Field(description="how many predictions to answer, most probable first")
]
Tolerance = Annotated[
    float, Field(description="the largest error bound wanted: total variation, 0 to 1"), says(minimum=0, maximum=1)
]
AUTO = (
    "auto: without a `tolerance`, from the `window` that is given, else from the model's own k if its certificate's "
    "curve is at most 1e-3 there, else from all tokens; with one, from a window that is within it, else from all tokens"
)
Truncated = Annotated[
    bool,
    Field(
        description="true: the tokens end a longer sequence, like the last k that a client keeps. No start token is "
        "fed, and error_bound is the one for their number. false: the sequence starts with these tokens, and the start "
        "token <eos> is fed before them"
    ),
]
Window = Annotated[
    Positive,
    AtMost("max_window"),
    Field(description="k, the tokens that window mode runs; default: the model's own"),
]
SessionId = Annotated[str, says(pattern=anchored(SESSION_ID.pattern))]
IdempotencyKey = Annotated[str, says(minLength=1, maxLength=MAX_KEY_CHARACTERS)]
Stop = Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
WireMode = Annotated[Mode, Field(strict=False), modes(Mode)]
WireScoreMethod = Annotated[
    ScoreMethod,
    Field(strict=False, description="in order; or parallel: in chunks side by side, if that is expected to be quicker"),
    WithJsonSchema({"type": "string", "enum": [method.value for method in ScoreMethod]}),
]


def exactly_one(body: BaseModel, *fields: str) -> None:
    """Raises ValueError unless one of `fields`, and only one, was given."""
    given = [name for name in fields if getattr(body, name) is not None]
    if len(given) != 1:
        names = ", ".join(f"`{name}`" for name in fields)
        found = " and ".join(f"`{name}`" for name in given) or "none of them"
        raise ValueError(f"give exactly one of {names}; found {found}")


def _absent(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "null"}}}


class Body(BaseModel):
    """A request body. `examples` are the OpenAPI page's, and a test posts every one of them.

    one_of: fields of which exactly one is to be given; null is as good as absent. not_both: two of which one may be.
    only_with: fields that may be given only with some modes. rules: other rules, as JSON schemas.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    examples: ClassVar[tuple[dict[str, object], ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    not_both: ClassVar[tuple[str, ...]] = ()
    only_with: ClassVar[Mapping[str, tuple[Mode, ...]]] = {}
    rules: ClassVar[tuple[dict[str, Any], ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With what the fields have to do with each other."""
        found: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        if cls.one_of:
            found["oneOf"] = [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in cls.one_of
            ]
        rules: list[dict[str, Any]] = list(cls.rules)
        if cls.not_both:
            rules.append({"anyOf": [_absent(name) for name in cls.not_both]})
        for name, of in cls.only_with.items():
            asked: dict[str, Any] = {"properties": {"mode": {"enum": [mode.value for mode in of]}}}
            if cls.model_fields["mode"].default not in of:
                asked["required"] = ["mode"]
            rules.append({"anyOf": [_absent(name), asked]})
        if rules:
            found["allOf"] = rules
        return found


class SequenceBody(Body):
    """A body with one sequence in it, as text or as token ids."""

    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens")

    input: Text | None = None
    tokens: Annotated[Tokens | None, AtMost("max_input_tokens", of_tokens=True)] = None

    @property
    def sequence(self) -> str | list[int]:
        """Whichever of the two was given; no ids where neither was."""
        return self.input if self.input is not None else self.tokens or []

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        exactly_one(self, *self.one_of)
        return self


class PredictBody(SequenceBody):
    """What comes next: after one sequence, after each of many, or after a session's tokens."""

    examples = (
        {"input": HISTORY, "mode": "both"},
        {"tokens": [5, 6, 7], "mode": "recurrent", "top_k": 3},
        {"input": HISTORY, "mode": "window", "window": 8},
        {"input": HISTORY, "tolerance": 0.001},
        {"inputs": [HISTORY, [5, 6, 7]]},
        {"tokens": [5, 6, 7], "truncated": True},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "inputs", "session")
    only_with: ClassVar = {"window": WINDOW_MODES, "tolerance": TOLERANCE_MODES}
    rules: ClassVar = ({"anyOf": [_absent("session"), {"properties": {"truncated": {"const": False}}}]},)

    model: Model = None
    inputs: Annotated[list[Text | Tokens] | None, AtMost("max_batch_inputs")] = Field(
        default=None,
        min_length=1,
        fail_fast=True,
        description="a batch: each text or token ids, each answered on its own",
    )
    session: SessionId | None = Field(default=None, description="predict from this session, appending nothing")
    mode: WireMode = Field(default=Mode.AUTO, description=AUTO)
    window: Window | None = None
    tolerance: Tolerance | None = None
    top_k: TopK = 5
    truncated: Truncated = False


class CompareBody(SequenceBody):
    """Recurrent against windows of several sizes: how far apart, and how long each takes."""

    examples = ({"input": HISTORY, "windows": [1, 2, 4, 8], "repeat": 3},)
    not_both: ClassVar[tuple[str, ...]] = ("model", "models")

    model: Model = None
    models: Annotated[list[Name] | None, AtMost(MAX_COMPARED_MODELS)] = Field(
        default=None, min_length=1, fail_fast=True, description="instead of `model`"
    )
    windows: Annotated[list[Window], AtMost(MAX_COMPARED_WINDOWS)] = Field(
        default=[8, 16, 32, 64], fail_fast=True, description="every k to compare", json_schema_extra={"minItems": 1}
    )
    repeat: Annotated[Positive, AtMost(MAX_REPEAT)] = Field(
        default=20, description="runs of each, for the latency's percentiles"
    )

    @model_validator(mode="after")
    def _model_or_models(self) -> Self:
        if all(getattr(self, name) is not None for name in self.not_both):
            raise ValueError(f"give {' or '.join(f'`{name}`' for name in self.not_both)}, not both")
        return self


class ScoreBody(SequenceBody):
    """One log-probability for each token of a sequence."""

    examples = (
        {"input": f"{HISTORY} town"},
        {"tokens": [5, 6, 7], "method": "sequential"},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": f"{HISTORY} town", "method": "parallel", "tolerance": 0, "stream": True},
    )

    tokens: Annotated[Tokens | None, AtMost("max_scored_tokens", of_tokens=True)] = None
    model: Model = None
    method: WireScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: Tolerance | None = Field(
        default=None, description="the largest error, as total variation, that chunks side by side may add, 0 to 1"
    )
    truncated: Truncated = False
    stream: bool = Field(
        default=False, description="answer by server-sent events: `progress`, `tokens`, then `finish` or `error`"
    )


class GenerateBody(SequenceBody):
    """Go on from a sequence, token by token."""

    examples = (
        {"input": HISTORY, "max_tokens": 8, "temperature": 0},
        {
            "input": HISTORY,
            "max_tokens": 8,
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.9,
            "seed": 7,
            "stop": ["."],
        },
        {"input": HISTORY, "max_tokens": 4, "mode": "window", "stream": True},
    )

    only_with: ClassVar = {"window": GENERATED_WINDOW_MODES}

    model: Model = None
    max_tokens: Annotated[Positive, AtMost("max_generated_tokens")] = Field(
        default=16, description="most tokens to generate"
    )
    temperature: Annotated[float, says(minimum=0)] = Field(default=1.0, description="0 takes the most probable token")
    top_k: Positive | None = Field(default=None, description="sample among the k most probable only")
    top_p: Annotated[float, says(exclusiveMinimum=0, maximum=1)] | None = Field(
        default=None, description="sample among the most probable that make up this share"
    )
    seed: Natural | None = Field(default=None, description="the same seed gives the same text")
    stop: Annotated[Stop | Annotated[list[Stop], Field(fail_fast=True)], AtMost(MAX_STOPS)] = Field(
        default=[], description="the text ends before the first of these"
    )
    mode: Annotated[WireMode, modes(GENERATED_MODES)] = Mode.AUTO
    window: Window | None = None
    truncated: Truncated = False
    stream: bool = Field(default=False, description="answer by server-sent events: `token`, then `finish` or `error`")


BEHIND_A_TOKEN = {"required": ["position"], "properties": {"position": {"type": "integer", "minimum": 1}}}
"""What a body with a history has."""


class SessionBody(Body):
    """Start a session: at position 0, or at `position` behind its last tokens."""

    examples = ({"session": "demo"}, {"mode": "recurrent"}, {}, {"history": [5, 6, 7], "position": 20})
    not_both: ClassVar[tuple[str, ...]] = ("history", "input")
    rules: ClassVar = (
        *({"anyOf": [_absent(name), BEHIND_A_TOKEN]} for name in not_both),
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


class SessionStepBody(StepBody):
    """One of many steps."""

    session: SessionId = Field(description="the session's id")
    idempotency_key: IdempotencyKey | None = Field(default=None, description=IDEMPOTENCY)


class StepsBody(Body):
    """Steps of many sessions in one call. Those of one session are taken in order; behind one that fails, its session's
    others are not."""

    examples = ({"steps": [{"session": "demo", "input": HISTORY}, {"session": "demo", "tokens": [5], "top_k": 1}]},)

    steps: Annotated[
        list[Annotated[SessionStepBody, WithJsonSchema(SessionStepBody.model_json_schema())]],
        Field(min_length=1, fail_fast=True),
        AtMost("max_batch_inputs"),
    ]


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


class IndexBody(Body):
    """Which models to list. All of it may be left out, as of the other bodies of the model repository."""

    examples = ({}, {"ready": True})

    ready: bool = Field(default=False, description="only those that take requests")


class LoadParameters(Body):
    """A load takes none: what a model is, its bundle says."""


class LoadBody(Body):
    """Which model is in the path."""

    examples = ({},)

    parameters: Annotated[LoadParameters, WithJsonSchema(LoadParameters.model_json_schema())] = Field(
        default=LoadParameters()
    )


class UnloadParameters(Body):
    """What the protocol's own clients send."""

    unload_dependents: bool = Field(default=False, description="changes nothing: no model depends on another")


class UnloadBody(Body):
    """Which model is in the path."""

    examples = ({"parameters": {"unload_dependents": False}},)

    parameters: Annotated[UnloadParameters, WithJsonSchema(UnloadParameters.model_json_schema())] = Field(
        default=UnloadParameters()
    )
