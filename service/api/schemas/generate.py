"""Requests for generation."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from wane.service.api.schemas.common import (
    HISTORY,
    AtMost,
    Cache,
    Model,
    Natural,
    Positive,
    SequenceBody,
    Stop,
    Truncated,
    Window,
    WireMode,
    modes,
    says,
)
from wane.service.types import GENERATED_MODES, GENERATED_WINDOW_MODES, MAX_STOPS, Mode


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

    only_with: ClassVar = {"window": GENERATED_WINDOW_MODES}

    model: Model = None
    max_tokens: Annotated[Positive, AtMost("max_generated_tokens")] = Field(
        default=16, description="the largest number of tokens to generate"
    )
    temperature: Annotated[float, says(minimum=0)] = Field(
        default=1.0, description="0: select always the most probable token"
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
    mode: Annotated[WireMode, modes(GENERATED_MODES)] = Mode.AUTO
    window: Window | None = None
    truncated: Truncated = False
    cache: Cache = True
    stream: bool = Field(
        default=False, description="answer with server-sent events: `token` for each token, then `finish` or `error`"
    )
