"""Request bodies of the native protocol: strict models that refuse unknown fields.

A strict model converts nothing: "5" and 5.0 are not integers, and true is not a number. NaN and Infinity, which JSON
does not have but some encoders write, are refused by name. The models do not check ranges: `wane.service.types` and the
engine do that, for every protocol. The OpenAPI description takes the ranges from their constants.

Validation of a list stops at its first wrong item, because a body may have a million of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from wane.service.settings import Settings
from wane.service.types import (
    MAX_KEY_CHARACTERS,
    MAX_STOP_CHARACTERS,
    SESSION_ID,
    Mode,
    ScoreMethod,
)

HISTORY = "The history of the"

IDEMPOTENCY = (
    "names this step. A retry with the last step's key, the same tokens and the same position (if it has one) gets the "
    "same answer and appends nothing; with other tokens or another position it is 409 idempotency_key_reused"
)
AT_MOST = "x-at-most"
"""The schema keyword with the limit of an `AtMost`."""


def anchored(pattern: str) -> str:
    """Returns a regular expression of a whole text, for a schema, whose patterns match any part of a text."""
    return f"^(?:{pattern})$"


def says(**keywords: object) -> Any:
    """Returns a field with JSON Schema keywords for a rule that is checked elsewhere."""
    return Field(json_schema_extra=keywords)  # type: ignore[arg-type]


def modes(of: Iterable[Mode]) -> WithJsonSchema:
    """Returns the schema of a field that takes one of these modes."""
    return WithJsonSchema({"type": "string", "enum": [mode.value for mode in of]})


@dataclass(frozen=True, slots=True)
class AtMost:
    """The longest allowed list, or the largest allowed integer: a number, or the name of a setting. `of_tokens`: the
    list is an input's token ids."""

    limit: int | str
    of_tokens: bool = False

    def value(self, settings: Settings) -> int | None:
        """Returns the limit; None if there is none."""
        most: int | None = getattr(settings, self.limit) if isinstance(self.limit, str) else self.limit
        return most

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the limit for `service/api/openapi.py`, which replaces a setting's name with its value."""
        return {**handler(schema), AT_MOST: self.limit}


Name = Annotated[str, Field(max_length=64)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # keeps error messages short: they quote the number
Natural = Annotated[Integer, says(minimum=0)]
Positive = Annotated[Integer, says(minimum=1)]
Model = Annotated[Name | None, Field(description="a name from /v1/models; default: the first of these")]
Text = Annotated[str, Field(description="text, which the model's vocabulary tokenises"), says(minLength=1)]
Tokens = Annotated[
    list[int],
    Field(fail_fast=True, description="token ids"),
    says(minItems=1, items={"type": "integer", "minimum": 0}),
]
TopK = Annotated[
    Positive, AtMost("top_k_limit"), Field(description="the number of predictions in the answer, most probable first")
]
Tolerance = Annotated[
    float, Field(description="the largest accepted error bound: total variation, 0 to 1"), says(minimum=0, maximum=1)
]
AUTO = (
    "auto: without a `tolerance`, from the given `window`, else from the model's own k if its certificate's curve is at"
    " most 1e-3 there, else from all tokens; with one, from a window whose bound is within it, else from all tokens"
)
Truncated = Annotated[
    bool,
    Field(
        description="true: the tokens are the end of a longer sequence, such as a client's last k. No start token is "
        "fed, and error_bound is that of their number. false: the sequence starts with these tokens, and the start "
        "token <eos> is fed before them"
    ),
]
Prove = Annotated[
    bool,
    Field(
        description="true: where tokens were left out, search for a proof of the first token and for a smaller "
        "error_bound. This takes several times as long as a window's run, and a model runs one search at a time. It "
        "requires a model whose windows compute a bound for their own tokens. false: top1_proved is the margin's "
        "result, and error_bound that of the certificate or the run"
    ),
]
Cache = Annotated[
    bool,
    Field(description="false: the network's distribution alone, if the model has a cache language model"),
]
Window = Annotated[
    Positive,
    AtMost("max_window"),
    Field(description="k, the number of tokens that window mode runs; default: the model's own"),
]
SessionId = Annotated[str, says(pattern=anchored(SESSION_ID.pattern))]
IdempotencyKey = Annotated[str, says(minLength=1, maxLength=MAX_KEY_CHARACTERS)]
Stop = Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
WireMode = Annotated[Mode, Field(strict=False), modes(Mode)]
WireScoreMethod = Annotated[
    ScoreMethod,
    Field(
        strict=False,
        description="sequential: in order; parallel: in concurrent chunks, if that is expected to be faster",
    ),
    WithJsonSchema({"type": "string", "enum": [method.value for method in ScoreMethod]}),
]


def absent(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "null"}}}


class Body(BaseModel):
    """A request body. `examples` are shown on the OpenAPI page, and a test posts each.

    one_of: exactly one of these fields must be given; null counts as absent. not_both: at most one of these two may be
    given. only_with: fields that are allowed only with some modes. rules: other rules, as JSON schemas.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    examples: ClassVar[tuple[dict[str, object], ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    not_both: ClassVar[tuple[str, ...]] = ()
    only_with: ClassVar[Mapping[str, tuple[Mode, ...]]] = {}
    rules: ClassVar[tuple[dict[str, Any], ...]] = ()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in self.one_of if getattr(self, name) is not None]
        if self.one_of and len(given) != 1:
            names = ", ".join(f"`{name}`" for name in self.one_of)
            found = " and ".join(f"`{name}`" for name in given) or "none of them"
            raise ValueError(f"give exactly one of {names}; found {found}")
        if self.not_both and all(getattr(self, name) is not None for name in self.not_both):
            raise ValueError(f"give {' or '.join(f'`{name}`' for name in self.not_both)}, not both")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the schema with the rules between fields."""
        found: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        if cls.one_of:
            found["oneOf"] = [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in cls.one_of
            ]
        rules: list[dict[str, Any]] = list(cls.rules)
        if cls.not_both:
            rules.append({"anyOf": [absent(name) for name in cls.not_both]})
        for name, of in cls.only_with.items():
            asked: dict[str, Any] = {"properties": {"mode": {"enum": [mode.value for mode in of]}}}
            if cls.model_fields["mode"].default not in of:
                asked["required"] = ["mode"]
            rules.append({"anyOf": [absent(name), asked]})
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
        """The given field of the two; an empty list if neither was given."""
        return self.input if self.input is not None else self.tokens or []
