"""Requests for generation."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from wane.service.api.schemas.common import (
    HISTORY,
    AtMost,
    Cache,
    IncludeUnknown,
    Model,
    Natural,
    Positive,
    SequenceBody,
    SessionId,
    Stop,
    Truncated,
    Window,
    WireMode,
    absent,
    anchored,
    modes,
    says,
)
from wane.service.errors import InvalidRequest, truncate_repr
from wane.service.types import (
    GENERATED_MODES,
    GENERATED_WINDOW_MODES,
    MAX_BIAS,
    MAX_PENALTY,
    MAX_STOPS,
    Mode,
)

ID_AS_TEXT = "0|[1-9][0-9]{0,9}"
"""The pattern of a token id as text."""

Penalty = Annotated[float, says(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)]
LogitBias = Annotated[
    dict[str, float],
    says(
        propertyNames={"pattern": anchored(ID_AS_TEXT)},
        additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    ),
]


def bias_of(given: dict[str, float] | None) -> dict[int, float] | None:
    """Returns the value of the field `logit_bias` with its keys as integers. Raises InvalidRequest for a key that is
    not a token id."""
    if given is None:
        return None
    for name in given:
        if re.fullmatch(ID_AS_TEXT, name) is None:
            raise InvalidRequest(
                f"logit_bias has the name {truncate_repr(name)}, which is not a token id", "logit_bias"
            )
    return {int(name): value for name, value in given.items()}


class GenerateBody(SequenceBody):
    """Generate tokens that continue a sequence."""

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

    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events", "session")
    only_with: ClassVar = {"window": GENERATED_WINDOW_MODES}
    rules: ClassVar = (
        {"anyOf": [absent("session"), {"properties": {"truncated": {"const": False}}}]},
        {"anyOf": [absent("position"), {"required": ["session"]}]},
    )

    session: SessionId | None = Field(default=None, description="continue this session, without changing it")
    position: Natural | None = Field(
        default=None,
        description="only with `session`: the session's expected position; if the session has another position, the "
        "answer is 409",
    )
    model: Model = None
    max_tokens: Annotated[Positive, AtMost("max_generated_tokens")] = Field(
        default=16, description="the largest number of tokens to generate"
    )
    temperature: Annotated[float, says(minimum=0)] = Field(
        default=1.0, description="0: always select the most probable token"
    )
    top_k: Positive | None = Field(default=None, description="sample from the k most probable tokens only")
    top_p: Annotated[float, says(exclusiveMinimum=0, maximum=1)] | None = Field(
        default=None,
        description="sample from the smallest set of most probable tokens whose probabilities add up to this value",
    )
    seed: Natural | None = Field(default=None, description="requests with the same seed generate the same text")
    stop: Annotated[Stop | Annotated[list[Stop], Field(fail_fast=True)], AtMost(MAX_STOPS)] = Field(
        default=[], description="generation stops at the first of these strings; the answer's text does not include it"
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="subtracted from the log-probability of a token that was already generated"
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="subtracted from a token's log-probability for each time that it was generated"
    )
    logit_bias: LogitBias | None = Field(
        default=None,
        description="for each token id (as text), a number from -100 to 100 that is added to the token's "
        "log-probability. If a token has 100, only tokens with 100 are generated. A token with -100 is never generated",
    )
    top_logprobs: Annotated[Natural, AtMost("top_k_limit")] | None = Field(
        default=None,
        description="the number of most probable tokens that the answer's `predictions` list for each generated token. "
        "The generated token is always listed, too; 0: only the generated token",
    )
    mode: Annotated[WireMode, modes(GENERATED_MODES)] = Mode.AUTO
    window: Window | None = None
    truncated: Truncated = False
    cache: Cache = True
    include_unknown: IncludeUnknown = False
    stream: bool = Field(
        default=False, description="answer with server-sent events: `token` for each token, then `finish` or `error`"
    )
