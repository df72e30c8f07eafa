"""Requests for generation."""

from __future__ import annotations

from typing import Annotated, ClassVar

from wane.service.settings import Settings
from wane.service.types.body import (
    HISTORY,
    Cache,
    IncludeUnknown,
    Model,
    Natural,
    Positive,
    SequenceBody,
    SessionId,
    Truncated,
    Window,
    absent,
    anchored,
    at_most,
    keywords,
)
from wane.service.types.common import Mode, says
from wane.service.types.cost import Cost, length_of, within

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_PENALTY = 2
MAX_BIAS = 100

GENERATED_MODES = (Mode.AUTO, Mode.RECURRENT, Mode.WINDOW)
GENERATED_WINDOW_MODES = (Mode.WINDOW,)

ID_AS_TEXT = "0|[1-9][0-9]{0,9}"
"""The pattern of a token id as text."""

Stop = Annotated[str, keywords(minLength=1, maxLength=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, keywords(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)]
LogitBias = Annotated[
    dict[str, float],
    says(
        "for each token id (as text), a number from -100 to 100 that is added to the token's log-probability. If a "
        "token has 100, only tokens with 100 are generated. A token with -100 is never generated",
        propertyNames={"pattern": anchored(ID_AS_TEXT)},
        additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    ),
]


class GenerateBody(SequenceBody, kw_only=True):
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

    session: Annotated[SessionId | None, says("continue this session, without changing it")] = None
    position: Natural | None = None
    """only with `session`: the session's expected position; if the session has another position, the answer is 409"""
    model: Model = None
    max_tokens: Annotated[Positive, at_most("max_generated_tokens")] = 16
    """the largest number of tokens to generate"""
    temperature: Annotated[float, keywords(minimum=0), says("0: always select the most probable token")] = 1.0
    top_k: Annotated[Positive | None, says("sample from the k most probable tokens only")] = None
    top_p: Annotated[float, keywords(exclusiveMinimum=0, maximum=1)] | None = None
    """sample from the smallest set of most probable tokens whose probabilities add up to this value"""
    seed: Annotated[Natural | None, says("requests with the same seed generate the same text")] = None
    stop: Annotated[Stop | tuple[Stop, ...], at_most(MAX_STOPS)] = ()
    """generation stops at the first of these strings; the answer's text does not include it"""
    presence_penalty: Penalty = 0.0
    """subtracted from the log-probability of a token that was already generated"""
    frequency_penalty: Penalty = 0.0
    """subtracted from a token's log-probability for each time that it was generated"""
    logit_bias: LogitBias | None = None
    top_logprobs: Annotated[Natural, at_most("top_k_limit")] | None = None
    """the number of most probable tokens that the answer's `predictions` list for each generated token. The generated
    token is always listed, too; 0: only the generated token"""
    mode: Annotated[Mode, keywords(enum=[*GENERATED_MODES])] = Mode.AUTO
    """auto: the session's own mode or, without a session, recurrent"""
    window: Window | None = None
    truncated: Truncated = False
    cache: Cache = True
    include_unknown: IncludeUnknown = False
    stream: bool = False
    """answer with server-sent events: `token` for each token, then `finish` or `error`"""

    def cost(self, settings: Settings) -> Cost:
        made = within(self.max_tokens, settings.max_generated_tokens)
        listed = 0 if self.stream else made * within(self.top_logprobs, settings.top_k_limit)
        return Cost(1, length_of(self.sequence), listed, listed_fields="max_tokens or top_logprobs")
