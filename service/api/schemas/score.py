"""The request body of scoring."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wane.service.api.schemas.common import (
    HISTORY,
    AtMost,
    Cache,
    Events,
    IncludeUnknown,
    Model,
    Natural,
    SequenceBody,
    Tokens,
    Tolerance,
    Truncated,
    WireScoreMethod,
)
from wane.service.types import ScoreMethod


class ScoreBody(SequenceBody):
    """Compute the log-probability of each token of a sequence."""

    examples = (
        {"input": f"{HISTORY} September"},
        {"tokens": [5, 6, 7], "method": "sequential"},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": f"{HISTORY} September", "method": "parallel", "tolerance": 0, "stream": True},
    )

    tokens: Annotated[Tokens | None, AtMost("max_scored_tokens", of_tokens=True)] = None
    events: Annotated[Events | None, AtMost("max_scored_tokens", of_tokens=True)] = None
    model: Model = None
    method: WireScoreMethod = ScoreMethod.SEQUENTIAL
    tolerance: Tolerance | None = Field(
        default=None, description="the largest accepted error of concurrent chunks, as total variation, 0 to 1"
    )
    truncated: Truncated = False
    top_k: Annotated[Natural, AtMost("top_k_limit")] | None = Field(
        default=None,
        description="the number of most probable tokens that the answer's `predictions` list at each token's position. "
        "The token at the position is always listed, too; 0: only this token. With this field, `method` is sequential",
    )
    cache: Cache = True
    include_unknown: IncludeUnknown = False
    stream: bool = Field(
        default=False, description="answer with server-sent events: `progress` and `tokens`, then `finish` or `error`"
    )
