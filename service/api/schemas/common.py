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
    MAX_KEY_CHARACTERS,
    MAX_STOP_CHARACTERS,
    SESSION_ID,
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
Prove = Annotated[
    bool,
    Field(
        description="true: where the margin does not prove the first token, search for a proof. It takes several times "
        "as long as a window's run, and a model searches for one at a time. Models can do that whose windows compute a "
        "bound for their own tokens. false: top1_proved is what the margin proves"
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


def absent(name: str) -> dict[str, Any]:
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
        """With what the fields have to do with each other."""
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
        """Whichever of the two was given; no ids where neither was."""
        return self.input if self.input is not None else self.tokens or []
