"""The parts that several requests and results share.

Token ids are ints. A *position* is the number of tokens of a sequence, without its leading start token. Deadlines are
in seconds on the event loop's clock. Durations are in milliseconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class Mode(StrEnum):
    """The mode of a request."""

    AUTO = "auto"
    RECURRENT = "recurrent"
    WINDOW = "window"
    BOTH = "both"


class StateSource(StrEnum):
    """The source of the state from which an answer was computed. It is the answer's field `state`."""

    RESIDENT = "resident"
    REBUILT = "rebuilt"
    WINDOW = "window"
    FULL = "full"


Condition = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""The state of a model version, as in the Open Inference Protocol's model repository."""


def says(text: str, **keywords: object) -> Meta:
    """Describes a field for the OpenAPI description: its meaning, and further JSON Schema keywords. A field whose
    meaning needs more than a line has it in a text below the field instead."""
    return Meta(description=text, extra_json_schema=keywords or None)


class Result(Struct, omit_defaults=True):
    """The base class of results. Its fields are the members of a JSON object. A member is omitted if the field has its
    default value. Therefore only a field that may be absent has a default value, and a field that may be null has
    none."""


ErrorBound = Annotated[
    float | None,
    says(
        "upper bound of the total variation between the answer's distribution and the never-interrupted model's "
        "distribution, at temperature 1 and before top-k or top-p. The bound is proved, except for the rounding of "
        "float32 runs, which was measured. 0: the answer is exact, except for that rounding. null: the answer is not "
        "certified. 1: the bound guarantees nothing"
    ),
]
StateErrorBound = Annotated[
    float | None,
    says(
        "upper bound of the 2-norm distance between the output layer's input in this run and its input in the "
        "never-interrupted model; null: the answer is not certified"
    ),
]
CacheTokens = Annotated[
    int | None,
    says("the number of tokens in the model's cache; present only if the model has a cache and the request uses it"),
]
UnknownNames = Annotated[
    tuple[str, ...] | None,
    says(
        "the names of events that the vocabulary lacks; present only if the request has such a name in its events or "
        "candidates"
    ),
]
Durable = Annotated[
    bool | None,
    says(
        "true: the session store has acknowledged the session's latest tokens; present only if replicas share the store"
    ),
]
SessionName = Annotated[str, says("the session's id")]
Position = Annotated[int, says("the number of the session's tokens, without the start token <eos>")]
UsedMode = Annotated[Mode, says("the mode that computed the answer")]
UsedWindow = Annotated[int | None, says("the window size k, in tokens; null: the answer is not from a window")]
Source = Annotated[
    StateSource,
    says(
        "the source of the state. resident: the session's state was in memory. rebuilt: it was computed again from "
        "the session's tokens. window: a run of the last k tokens. full: a run of all tokens"
    ),
]
TokenId = Annotated[int, says("the token's id in the model's vocabulary")]
TokenBytes = Annotated[
    tuple[int, ...] | None, says("the token's bytes; present only if the token alone is not valid UTF-8")
]
Logprob = Annotated[float, says("the natural logarithm of the token's probability")]


class Served(Result):
    """The model version that computed an answer, and its device."""

    model: Annotated[str, says("the model's name")]
    model_version: Annotated[str, says("the version of the model's bundle")]
    device: Annotated[str, says("the device that ran the model, such as cpu")]


class ServedPrompt(Served, kw_only=True):
    """An answer from a run of the request's tokens."""

    cached_tokens: int = 0
    """the number of the first tokens that did not run, because an earlier request of the same API key left the state
    after them; absent: 0"""


REFERENCE = "#/components/schemas/{name}"
"""The reference to the schema of a class in the OpenAPI description."""


def any_of(*kinds: type) -> dict[str, Any]:
    """Returns the JSON schema of a value of one of several classes. msgspec has no unions of such classes."""
    return {"anyOf": [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]}


Identity = tuple[str, str, str]
"""The model, version and device of an engine, in the order of the fields of `Served`."""
