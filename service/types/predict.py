"""The request bodies of predictions, comparisons and scores."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from wane.service.settings import Settings
from wane.service.types.body import (
    AUTO,
    HISTORY,
    Cache,
    Events,
    EventsBody,
    IncludeUnknown,
    Model,
    Name,
    Natural,
    Positive,
    Prove,
    RankedBody,
    SequenceBody,
    SessionId,
    Text,
    TokenArray,
    Tokens,
    Tolerance,
    TopK,
    Truncated,
    Window,
    absent,
    at_most,
    keywords,
)
from wane.service.types.common import Mode, says
from wane.service.types.cost import Cost, length_of, within

MAX_COMPARED_MODELS = 8
MAX_COMPARED_WINDOWS = 32
MAX_REPEAT = 1000

WINDOW_MODES = (Mode.AUTO, Mode.WINDOW, Mode.BOTH)
"""The modes in which a prediction request may set `window`."""

TOLERANCE_MODES = (Mode.AUTO,)


class ScoreMethod(StrEnum):
    """The methods of scoring a text."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


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
        Annotated[tuple[Text | Tokens | EventsBody, ...], Meta(min_length=1)] | None, at_most("max_batch_inputs")
    ] = None
    """a batch of inputs; each is a text, a list of token ids, or `{"events": [...]}`, and gets its own answer"""
    session: SessionId | None = None
    """the id of a session; predict its next token without appending to it"""
    mode: Annotated[Mode, says(AUTO)] = Mode.AUTO
    window: Window | None = None
    tolerance: Tolerance | None = None
    top_k: TopK = 5
    truncated: Truncated = False
    prove: Prove = False
    cache: Cache = True

    def cost(self, settings: Settings) -> Cost:
        inputs = (self.sequence,) if self.inputs is None else self.inputs
        return Cost(len(inputs), sum(map(length_of, inputs)), len(inputs) * within(self.top_k, settings.top_k_limit))


class CompareBody(SequenceBody, kw_only=True):
    """Compare recurrent mode with windows of several sizes. The answer has the distance of each window from recurrent
    mode, and the latency of recurrent mode and of each window."""

    examples = ({"input": HISTORY, "windows": [1, 2, 4, 8], "repeat": 3},)
    not_both: ClassVar[tuple[str, ...]] = ("model", "models")

    model: Model = None
    models: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_COMPARED_MODELS)] | None = None
    """the names of several models, instead of `model`"""
    windows: Annotated[tuple[Window, ...], at_most(MAX_COMPARED_WINDOWS), keywords(minItems=1)] = (8, 16, 32, 64)
    """the window sizes to compare, in tokens"""
    repeat: Annotated[Positive, at_most(MAX_REPEAT)] = 20
    """the number of runs of recurrent mode and of each window, for the percentiles of latency"""
    cache: Cache = True

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        models = 1 if self.models is None else len(self.models)
        return Cost(1, length_of(self.sequence), compared=models * (1 + len(self.windows)) - 1)


class ScoreBody(SequenceBody, kw_only=True):
    """Compute the log-probability of each token of a sequence."""

    examples = (
        {"input": f"{HISTORY} September"},
        {"tokens": [5, 6, 7], "method": "sequential"},
        {"tokens": [5, 6, 7], "truncated": True},
        {"input": f"{HISTORY} September", "method": "parallel", "tolerance": 0, "stream": True},
    )

    tokens: Annotated[TokenArray | None, at_most("max_scored_tokens")] = None
    events: Annotated[Events | None, at_most("max_scored_tokens")] = None
    model: Model = None
    method: ScoreMethod = ScoreMethod.SEQUENTIAL
    """sequential: run the tokens in order; parallel: run concurrent chunks, if this is expected to be faster"""
    tolerance: Tolerance | None = None
    """the largest accepted error of concurrent chunks, as total variation, 0 to 1"""
    truncated: Truncated = False
    top_k: Annotated[Natural, at_most("top_k_limit")] | None = None
    """the number of most probable tokens that the answer's `predictions` list at each token's position. The token at
    the position is always listed, too; 0: only this token. With this field, `method` is sequential"""
    cache: Cache = True
    include_unknown: IncludeUnknown = False
    stream: bool = False
    """answer with server-sent events: `progress` and `tokens`, then `finish` or `error`"""

    def cost(self, settings: Settings, tokens: int | None = None) -> Cost:
        """`tokens` is the number of tokens, or None before a text is tokenised."""
        count = length_of(self.sequence) if tokens is None else tokens
        return Cost(1, count, count * within(self.top_k, settings.top_k_limit))
