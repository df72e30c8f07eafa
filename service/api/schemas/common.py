"""The base class of request bodies, and the types of their fields. A body is a strict pydantic model that rejects
unknown fields.

A strict model converts nothing: "5" and 5.0 are not integers, and true is not a number. The models reject NaN and
Infinity, which JSON does not have, but which some encoders write. The models do not check ranges, because
`wane.service.types` and the engine check them for every route. The OpenAPI description still shows the ranges.

Validation of a list stops at its first invalid item, because a list may have a million invalid items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from wane.models.manifest import Unknown
from wane.service.settings import Settings
from wane.service.types import (
    MAX_KEY_CHARACTERS,
    MAX_STOP_CHARACTERS,
    SESSION_ID,
    Mode,
    ScoreMethod,
)

HISTORY = "The game was released on"

IDEMPOTENCY = (
    "a key for this step. A retry with the key of the session's last step, the same tokens and the same position (if "
    "it gives one) gets the same answer and appends nothing. A retry with other tokens or another position gets 409 "
    "idempotency_key_reused"
)
AT_MOST = "x-at-most"
"""The JSON Schema keyword that holds the limit of an `AtMost`."""


def anchored(pattern: str) -> str:
    """Returns a JSON Schema pattern that matches only whole texts. Without anchors, a JSON Schema pattern matches any
    part of a text."""
    return f"^(?:{pattern})$"


def says(**keywords: object) -> Any:
    """Returns a field with JSON Schema keywords for a rule that pydantic does not check."""
    return Field(json_schema_extra=keywords)  # type: ignore[arg-type]


def modes(of: Iterable[Mode]) -> WithJsonSchema:
    """Returns the JSON schema of a field whose value is one of the given modes."""
    return WithJsonSchema({"type": "string", "enum": [mode.value for mode in of]})


@dataclass(frozen=True, slots=True)
class AtMost:
    """The largest allowed length of a list, or the largest allowed integer. The limit is a number or the name of a
    setting. If `of_tokens` is true, the list holds the token ids of an input."""

    limit: int | str
    of_tokens: bool = False

    def value(self, settings: Settings) -> int | None:
        """Returns the limit, or None if the setting has no limit."""
        most: int | None = getattr(settings, self.limit) if isinstance(self.limit, str) else self.limit
        return most

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the limit to the field's schema. `service/api/openapi.py` later replaces a setting's name with the
        setting's value."""
        return {**handler(schema), AT_MOST: self.limit}


Name = Annotated[str, Field(max_length=64)]
# without this range, an error message could quote a very long number
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Natural = Annotated[Integer, says(minimum=0)]
Positive = Annotated[Integer, says(minimum=1)]
Model = Annotated[
    Name | None, Field(description="a model's name from /v1/models; default: the first model in that list")
]
Text = Annotated[str, Field(description="a text; the model's vocabulary tokenises it"), says(minLength=1)]
Tokens = Annotated[
    list[int],
    Field(fail_fast=True, description="token ids"),
    says(minItems=1, items={"type": "integer", "minimum": 0}),
]
Event = Annotated[str | Integer, Field(union_mode="left_to_right")]
EventList = Annotated[list[Event], Field(fail_fast=True, description="names of events")]
Events = Annotated[
    list[Event],
    Field(
        fail_fast=True,
        description='names of events, for a model of events, such as ["coats/08", "coats/09"]; an integer stands for '
        "the name that consists of its decimal digits",
    ),
    says(minItems=1),
]
UnknownEvents = Annotated[
    Unknown,
    Field(
        description="how to treat an event that the vocabulary lacks. refuse: the answer is 422. skip: the event is "
        "left out, and the answer lists it in `unknown`. token: the event is read as <unk>, and the answer lists it in "
        "`unknown`. default: the value of `unknown` in the model's document in /v1/models"
    ),
]
TopK = Annotated[
    Positive,
    AtMost("top_k_limit"),
    Field(description="the number of predictions in the answer; the most probable prediction is the first"),
]
Tolerance = Annotated[
    float, Field(description="the largest accepted error bound, as total variation, 0 to 1"), says(minimum=0, maximum=1)
]
AUTO = (
    "auto without a `tolerance`: runs the given `window`. If no `window` is given, runs a window of the model's own k "
    "if the certificate's error bound for k is at most 1e-3, and otherwise all tokens. auto with a `tolerance`: runs a "
    "window whose error bound is within the tolerance, or all tokens if there is no such window"
)
Truncated = Annotated[
    bool,
    Field(
        description="true: the tokens are the end of a longer sequence, such as a client's last k tokens. The start "
        "token <eos> is not fed, and error_bound is the bound for this number of tokens. false: the sequence starts "
        "with these tokens, and the start token <eos> is fed before them"
    ),
]
Prove = Annotated[
    bool,
    Field(
        description="true: if the window leaves out tokens, search for a proof that recurrent mode has the same most "
        "probable token, and for a smaller error_bound. The search takes about twice as long as the run of a window, "
        "and each model runs one search at a time. The search is only for models that compute the error bound from a "
        "window's tokens. false: top1_proved follows from the margin between the first two predictions, and "
        "error_bound comes from the certificate or the window's run"
    ),
]
Cache = Annotated[
    bool,
    Field(description="false: omit the model's cache language model, and return the network's distribution"),
]
Window = Annotated[
    Positive,
    AtMost("max_window"),
    Field(description="k, the number of tokens that window mode runs; default: the model's own k"),
]
SessionId = Annotated[str, says(pattern=anchored(SESSION_ID.pattern))]
IdempotencyKey = Annotated[str, says(minLength=1, maxLength=MAX_KEY_CHARACTERS)]
Stop = Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
WireMode = Annotated[Mode, Field(strict=False), modes(Mode)]
WireScoreMethod = Annotated[
    ScoreMethod,
    Field(
        strict=False,
        description="sequential: run the tokens in order; parallel: run concurrent chunks, if this is expected to "
        "be faster",
    ),
    WithJsonSchema({"type": "string", "enum": [method.value for method in ScoreMethod]}),
]


def absent(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "null"}}}


def present(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class Body(BaseModel):
    """A request body. The OpenAPI page shows the `examples`. A test posts each example.

    A body must have exactly one of the fields in `one_of`. A null field counts as absent. A body may have at most one
    of the fields in `not_both`. The fields in `only_with` are allowed only in some modes. `needs` maps a field to other
    fields: a body may have the field only with at least one of them. `rules` are further rules, as JSON schemas.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    examples: ClassVar[tuple[dict[str, object], ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    not_both: ClassVar[tuple[str, ...]] = ()
    only_with: ClassVar[Mapping[str, tuple[Mode, ...]]] = {}
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    rules: ClassVar[tuple[dict[str, Any], ...]] = ()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in self.one_of if getattr(self, name) is not None]
        if self.one_of and len(given) != 1:
            names = ", ".join(f"`{name}`" for name in self.one_of)
            found = " and ".join(f"`{name}`" for name in given) or "none of them"
            raise ValueError(f"give exactly one of {names}; found {found}")
        both = [f"`{name}`" for name in self.not_both if getattr(self, name) is not None]
        if len(both) > 1:
            raise ValueError(f"give {' or '.join(both)}, not both")
        for name, others in self.needs.items():
            if getattr(self, name) is not None and all(getattr(self, other) is None for other in others):
                raise ValueError(f"`{name}` is given without {' or '.join(f'`{other}`' for other in others)}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the rules about several fields to the schema."""
        found: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        if cls.one_of:
            found["oneOf"] = [present(name) for name in cls.one_of]
        rules: list[dict[str, Any]] = list(cls.rules)
        rules += [{"anyOf": [absent(one), absent(other)]} for one, other in combinations(cls.not_both, 2)]
        for name, others in cls.needs.items():
            rules.append({"anyOf": [absent(name), *(present(other) for other in others)]})
        for name, of in cls.only_with.items():
            asked: dict[str, Any] = {"properties": {"mode": {"enum": [mode.value for mode in of]}}}
            if cls.model_fields["mode"].default not in of:
                asked["required"] = ["mode"]
            rules.append({"anyOf": [absent(name), asked]})
        if rules:
            found["allOf"] = rules
        return found


class EventInput(NamedTuple):
    """The events of a request, and the request's field `unknown`."""

    events: Sequence[str | int]
    unknown: Unknown | None


GivenSequence = str | list[int] | EventInput


class SequenceBody(Body):
    """A body with one sequence, as a text, as token ids or as events."""

    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events")
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"unknown": ("events",)}

    input: Text | None = None
    tokens: Annotated[Tokens | None, AtMost("max_input_tokens", of_tokens=True)] = None
    events: Annotated[Events | None, AtMost("max_input_tokens", of_tokens=True)] = None
    unknown: UnknownEvents | None = None

    @property
    def sequence(self) -> GivenSequence:
        """Returns the given text, token ids or events; an empty list if the body has none of them."""
        if self.events is not None:
            return EventInput(self.events, self.unknown)
        return self.input if self.input is not None else self.tokens or []


IncludeUnknown = Annotated[
    bool,
    Field(
        description="true: <unk>, which stands for every word that the vocabulary lacks, may be listed and drawn. "
        "Probabilities do not change"
    ),
]


class RankedBody(SequenceBody):
    """A body whose answer lists tokens. `exclude`, `exclude_seen`, `candidates`, `include_end` and `include_unknown`
    filter the list. All but `include_unknown` are only for models of events."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"unknown": ("events", "candidates", "exclude")}

    exclude: Annotated[EventList | None, AtMost("max_filter_events")] = Field(
        default=None, description="events that the answer does not list. Probabilities do not change"
    )
    exclude_seen: bool = Field(
        default=False,
        description="true: the answer does not list the sequence's last events, as many as the server still has. "
        "`seen_tokens` is their number",
    )
    candidates: Annotated[EventList | None, AtMost("max_filter_events")] = Field(
        default=None, description="the only events that the answer may list. Probabilities do not change"
    )
    include_end: bool = Field(
        default=False, description="true: the answer of a model of events may list <eos>, the end of the session"
    )
    include_unknown: IncludeUnknown = False
