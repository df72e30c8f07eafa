"""The request body of scoring."""

from __future__ import annotations

from typing import Annotated

from wane.service.api.schemas.common import (
    HISTORY,
    Cache,
    Events,
    IncludeUnknown,
    Method,
    Model,
    Natural,
    SequenceBody,
    Tokens,
    Tolerance,
    Truncated,
    at_most,
)
from wane.service.types.common import says
from wane.service.types.request import ScoreMethod


class ScoreBody(SequenceBody, kw_only=True):
    """Compute the log-probability of each token of a sequence."""

    examples = (
        {"input": f"{HISTORY} September"},
        {"tokens": [5, 6, 7], "method": "sequential"},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": f"{HISTORY} September", "method": "parallel", "tolerance": 0, "stream": True},
    )

    tokens: Annotated[Tokens | None, at_most("max_scored_tokens", of_tokens=True)] = None
    events: Annotated[Events | None, at_most("max_scored_tokens", of_tokens=True)] = None
    model: Model = None
    method: Method = ScoreMethod.SEQUENTIAL
    tolerance: Annotated[
        Tolerance | None, says("the largest accepted error of concurrent chunks, as total variation, 0 to 1")
    ] = None
    truncated: Truncated = False
    top_k: Annotated[
        Annotated[Natural, at_most("top_k_limit")] | None,
        says(
            "the number of most probable tokens that the answer's `predictions` list at each token's position. The "
            "token at the position is always listed, too; 0: only this token. With this field, `method` is sequential"
        ),
    ] = None
    cache: Cache = True
    include_unknown: IncludeUnknown = False
    stream: Annotated[
        bool, says("answer with server-sent events: `progress` and `tokens`, then `finish` or `error`")
    ] = False
