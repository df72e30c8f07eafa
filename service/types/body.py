"""The base class of request bodies, and the types of their fields. A body is a msgspec `Struct` that rejects unknown
fields.

Decoding converts nothing: "5" and 5.0 are not integers, and true is not a number. If a member occurs several times in
an object, the last one counts. Decoding does not check ranges, because `wane.service.types.request` and the engine
check them for every route. The OpenAPI description still shows the ranges.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from wane.models.manifest import Unknown
from wane.service.settings import Settings
from wane.service.types.common import Mode, says
from wane.service.types.cost import Cost, length_of

HISTORY = "The game was released on"

IDEMPOTENCY = (
    "a key for this step. A retry with the key of the session's last step, the same tokens and the same position (if "
    "it gives one) gets the same answer and appends nothing. A retry with other tokens or another position gets 409 "
    "idempotency_key_reused"
)
# An id must not be `.` or `..`, because clients and proxies remove them from a path. JSON Schema cannot say more.
SESSION_ID = r"(?!\.{1,2}$)[^/\\\u0000-\u001f\u007f-\u009f\ufffd]{1,128}"

MAX_KEY_CHARACTERS = 255

AT_MOST = "x-at-most"
"""The JSON Schema keyword that holds the limit of a list or an integer: a number, or the name of a setting. The OpenAPI
description has the limit itself."""

AT_LEAST = "x-at-least"
"""The JSON Schema keyword that holds the least value of an integer. The decoder does not check it, because one invalid
step or input must not fail the others of a call. The OpenAPI description has the keyword `minimum` instead."""

LARGEST_INTEGER = 2**63 - 1


def anchored(pattern: str) -> str:
    """Returns a JSON Schema pattern that matches only whole texts. Without anchors, a JSON Schema pattern matches any
    part of a text."""
    return f"^(?:{pattern})$"


def keywords(**rules: object) -> Meta:
    """Describes a rule that the decoder does not check, as JSON Schema keywords."""
    return Meta(extra_json_schema=rules)


def at_most(limit: int | str) -> Meta:
    """Describes the largest length of a list, or the largest integer: a number, or the name of a setting. The engine
    and `Cost.check` check it."""
    return keywords(**{AT_MOST: limit})


Name = Annotated[str, Meta(max_length=64)]
# Without these ranges, an error message could quote a very long number.
Integer = Annotated[int, Meta(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)]
Natural = Annotated[Integer, keywords(**{AT_LEAST: 0})]
Positive = Annotated[Integer, keywords(**{AT_LEAST: 1})]
Model = Annotated[Name | None, says("a model's name from /v1/models; default: the first model in that list")]
Text = Annotated[str, says("a text; the model's vocabulary tokenises it", minLength=1)]
TokenId = Annotated[int, keywords(minimum=0)]
TOKENS = says("token ids", minItems=1)
Tokens = Annotated[tuple[TokenId, ...], TOKENS]
TokenArray = Annotated[Sequence[TokenId], TOKENS]
"""Token ids that a body converts to an array when it is decoded (see `as_array`)."""
EventNumber = Annotated[int, keywords(minimum=-(2**63), maximum=2**64 - 1)]  # `EventNames` checks the range
Event = str | EventNumber
EventList = Annotated[tuple[Event, ...], says("names of events")]
Events = Annotated[
    tuple[Event, ...],
    says(
        'names of events, for a model of events, such as ["coats/08", "coats/09"]; an integer stands for the name that '
        "consists of its decimal digits",
        minItems=1,
    ),
]
UnknownEvents = Annotated[
    Unknown,
    says(
        "how to treat an event that the vocabulary lacks. refuse: the answer is 422. skip: the event is left out, and "
        "the answer lists it in `unknown`. token: the event is read as <unk>, and the answer lists it in `unknown`. "
        "default: the value of `unknown` in the model's document in /v1/models"
    ),
]
TopK = Annotated[
    Positive,
    at_most("top_k_limit"),
    says("the number of predictions in the answer; the most probable prediction is the first"),
]
Tolerance = Annotated[float, says("the largest accepted error bound, as total variation, 0 to 1", minimum=0, maximum=1)]
AUTO = (
    "auto without a `tolerance`: runs the given `window`. If no `window` is given, runs a window of the model's own k "
    "if the certificate's error bound for k is at most 1e-3, and otherwise all tokens. auto with a `tolerance`: runs a "
    "window whose error bound is within the tolerance, or all tokens if there is no such window"
)
Truncated = Annotated[
    bool,
    says(
        "true: the tokens are the end of a longer sequence, such as a client's last k tokens. The start token <eos> is "
        "not fed, and error_bound is the bound for this number of tokens. false: the sequence starts with these "
        "tokens, and the start token <eos> is fed before them"
    ),
]
Prove = Annotated[
    bool,
    says(
        "true: if the window leaves out tokens, search for a proof that recurrent mode has the same most probable "
        "token, and for a smaller error_bound. The search takes about twice as long as the run of a window, and each "
        "model runs one search at a time. The search is only for models that compute the error bound from a window's "
        "tokens. false: top1_proved follows from the margin between the first two predictions, and error_bound comes "
        "from the certificate or the window's run"
    ),
]
Cache = Annotated[bool, says("false: omit the model's cache language model, and return the network's distribution")]
Window = Annotated[
    Positive,
    at_most("max_window"),
    says("k, the number of tokens that window mode runs; default: the model's own k"),
]
SessionId = Annotated[str, keywords(pattern=anchored(SESSION_ID))]
IdempotencyKey = Annotated[str, keywords(minLength=1, maxLength=MAX_KEY_CHARACTERS)]
IncludeUnknown = Annotated[
    bool,
    says(
        "true: <unk>, which stands for every word that the vocabulary lacks, may be listed and drawn. Probabilities do "
        "not change"
    ),
]


def absent(name: str) -> dict[str, Any]:
    return {"properties": {name: {"type": "null"}}}


def present(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request body. The OpenAPI page shows the `examples`. A test posts each example.

    A body must have exactly one of the fields in `one_of`. A null field counts as absent. A body may have at most one
    of the fields in `not_both`. The fields in `only_with` are allowed only in some modes. `needs` maps a field to other
    fields: a body may have the field only with at least one of them. If a body has the field `alone`, it may have no
    other field. `rules` are further rules, as JSON schemas. `overrides` maps a field to its JSON schema, if the schema
    of the field's type is too wide.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = ()
    one_of: ClassVar[tuple[str, ...]] = ()
    not_both: ClassVar[tuple[str, ...]] = ()
    only_with: ClassVar[Mapping[str, tuple[Mode, ...]]] = {}
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    alone: ClassVar[str | None] = None
    rules: ClassVar[tuple[dict[str, Any], ...]] = ()
    overrides: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def __post_init__(self) -> None:
        """Raises ValueError if a rule about several fields is broken."""
        if self.one_of:
            sources = [name for name in self.one_of if getattr(self, name) is not None]
            if len(sources) != 1:
                names = ", ".join(f"`{name}`" for name in self.one_of)
                present_names = " and ".join(f"`{name}`" for name in sources) or "none of them"
                raise ValueError(f"give exactly one of {names}; found {present_names}")
        both = [f"`{name}`" for name in self.not_both if getattr(self, name) is not None]
        if len(both) > 1:
            raise ValueError(f"give {' or '.join(both)}, not both")
        for name, others in self.needs.items():
            if getattr(self, name) is not None and all(getattr(self, other) is None for other in others):
                raise ValueError(f"`{name}` is given without {' or '.join(f'`{other}`' for other in others)}")

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        """Returns what the request costs: one row, unless a body says otherwise. A text counts as no tokens."""
        return Cost()

    @classmethod
    def several(cls) -> dict[str, Any]:
        """Returns the JSON Schema keywords of the rules about several fields."""
        rules: list[dict[str, Any]] = list(cls.rules)
        rules += [{"anyOf": [absent(name), absent(other)]} for name, other in combinations(cls.not_both, 2)]
        rules += [
            {"anyOf": [absent(name), *(present(other) for other in others)]} for name, others in cls.needs.items()
        ]
        for name, allowed in cls.only_with.items():
            asked: dict[str, Any] = {"properties": {"mode": {"enum": [mode.value for mode in allowed]}}}
            if getattr(cls, "default_mode", Mode.AUTO) not in allowed:
                asked["required"] = ["mode"]
            rules.append({"anyOf": [absent(name), asked]})
        keywords_of_rules: dict[str, Any] = {"allOf": rules} if rules else {}
        return keywords_of_rules | ({"oneOf": [present(name) for name in cls.one_of]} if cls.one_of else {})


class EventInput(Struct):
    """The events of a request, and the request's field `unknown`."""

    events: Sequence[str | int]
    unknown: Unknown | None


InputSequence = str | Sequence[int] | EventInput

R = TypeVar("R", bound="SequenceBody")


def as_array(tokens: Sequence[int]) -> Sequence[int]:
    """Returns token ids as an array of 64-bit integers: numpy reads it without converting each id, and the garbage
    collector does not visit the ids. Returns `tokens` if an id has more bits: no vocabulary has it."""
    try:
        return array("q", tokens)
    except OverflowError:
        return tokens


class SequenceBody(Body, kw_only=True):
    """A body with one sequence, as a text, as token ids or as events."""

    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events")
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"unknown": ("events",)}

    input: Text | None = None
    tokens: Annotated[TokenArray | None, at_most("max_input_tokens")] = None
    events: Annotated[Events | None, at_most("max_input_tokens")] = None
    unknown: UnknownEvents | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            self.tokens = as_array(self.tokens)

    @property
    def sequence(self) -> InputSequence:
        """Returns the text, token ids or events; no token ids if the body has none of them."""
        if self.events is not None:
            return EventInput(self.events, self.unknown)
        return self.input if self.input is not None else self.tokens or ()

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        return Cost(1, length_of(self.sequence))

    def request(
        self, kind: type[R], tokens: Sequence[int], unknown: tuple[str, ...], deadline: float | None, **added: object
    ) -> R:
        """Returns the engine's request of the class `kind`, which inherits this body's fields. `tokens` replace the
        text or the events, and `unknown` are the names of the events that the vocabulary lacks."""
        read = {"input": None, "events": None, "tokens": tokens, "unknown_names": unknown, "deadline": deadline}
        return kind(**asdict(self) | read | added)


class EventsBody(Body, kw_only=True):
    """An input of a batch that is a sequence of events."""

    events: Events


class RankedBody(SequenceBody, kw_only=True):
    """A body whose answer lists tokens. `exclude`, `exclude_seen`, `candidates`, `include_end` and `include_unknown`
    filter the list. All but `include_unknown` are only for models of events."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"unknown": ("events", "candidates", "exclude")}

    exclude: Annotated[EventList | None, at_most("max_filter_events")] = None
    """events that the answer does not list. Probabilities do not change"""
    exclude_seen: bool = False
    """true: the answer does not list the sequence's last events, as many as the server still has. `seen_tokens` is
    their number"""
    candidates: Annotated[EventList | None, at_most("max_filter_events")] = None
    """the only events that the answer may list. Probabilities do not change"""
    include_end: bool = False
    """true: the answer of a model of events may list <eos>, the end of the session"""
    include_unknown: IncludeUnknown = False
