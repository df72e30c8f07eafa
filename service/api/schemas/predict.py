"""The requests and answers of predictions and steps."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from wane.service.api.schemas.common import (
    AUTO,
    HISTORY,
    Cache,
    EventsBody,
    Model,
    Prove,
    RankedBody,
    SessionId,
    Text,
    Tokens,
    Tolerance,
    TopK,
    Truncated,
    Window,
    absent,
    at_most,
)
from wane.service.types.common import Mode, says
from wane.service.types.request import TOLERANCE_MODES, WINDOW_MODES


class PredictBody(RankedBody, kw_only=True):
    """Predict the next token after one sequence, after each sequence of a batch, or after a session's tokens."""

    examples = (
        {"input": HISTORY, "mode": "both"},
        {"tokens": [5, 6, 7], "mode": "recurrent", "top_k": 3},
        {"input": HISTORY, "mode": "window", "window": 8},
        {"input": HISTORY, "tolerance": 0.001},
        {"inputs": [HISTORY, [5, 6, 7]]},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": HISTORY, "mode": "window", "window": 2, "prove": True},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events", "inputs", "session")
    only_with: ClassVar = {"window": WINDOW_MODES, "tolerance": TOLERANCE_MODES}
    needs: ClassVar = {"unknown": ("events", "inputs", "candidates", "exclude")}
    rules: ClassVar = ({"anyOf": [absent("session"), {"properties": {"truncated": {"const": False}}}]},)

    model: Model = None
    inputs: Annotated[
        Annotated[tuple[Text | Tokens | EventsBody, ...], Meta(min_length=1)] | None,
        at_most("max_batch_inputs"),
        says('a batch of inputs; each is a text, a list of token ids, or `{"events": [...]}`, and gets its own answer'),
    ] = None
    session: Annotated[
        SessionId | None, says("the id of a session; predict its next token without appending to it")
    ] = None
    mode: Annotated[Mode, says(AUTO)] = Mode.AUTO
    window: Window | None = None
    tolerance: Tolerance | None = None
    top_k: TopK = 5
    truncated: Truncated = False
    prove: Prove = False
    cache: Cache = True
