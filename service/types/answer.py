"""The answers of predictions and steps, and what an owner sees of a session.

A result is a msgspec `Struct`, and each of its fields is declared only here: JSON and the OpenAPI description are
generated from the class (see `Result`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np
from msgspec import defstruct
from numpy.typing import NDArray

from wane.service.types.common import (
    CacheTokens,
    Durable,
    ErrorBound,
    Logprob,
    Mode,
    Position,
    Result,
    Served,
    ServedPrompt,
    SessionName,
    Source,
    StateErrorBound,
    StateSource,
    TokenBytes,
    TokenId,
    UnknownNames,
    UsedMode,
    UsedWindow,
    any_of,
    says,
)
from wane.service.types.request import Latency


class Prediction(Result, gc=False):  # is in no reference cycle, and answers have many
    """A candidate for the next token."""

    token_id: TokenId
    token: Annotated[str, says("the token's text, or the event's name")]
    probability: Annotated[float, says("the token's probability, 0 to 1")]
    logprob: Logprob
    bytes: TokenBytes = None


Places = Annotated[
    Sequence[tuple[Prediction, ...] | None] | None,
    says(
        "only if the request asks for them: for each token, the most probable tokens at its position, most probable "
        "first, and the token itself at the end if it is not one of them; null for a token that has no prediction"
    ),
]


class Agreement(Result):
    """The agreement of the window's answer with the recurrent answer."""

    top1_match: Annotated[bool, says("true: the two answers have the same most probable token")]
    top1_proved: bool
    """true: the window's run alone, without the recurrent answer, proves that the two tokens are equal"""
    total_variation: Annotated[float, says("the measured total variation between the two distributions, 0 to 1")]
    kl: Annotated[float, says("the measured divergence sum p log(p / q), in nats; p is the recurrent distribution")]
    max_logit_difference: Annotated[float, says("the largest difference between the two logits of a token")]
    state_distance: Annotated[float, says("the 2-norm distance between the two inputs of the output layer")]
    state_error_bound: StateErrorBound
    error_bound: ErrorBound


class ModeAnswer(Result):
    """The answer of one of the two modes, as a part of an answer in mode `both`."""

    predictions: Annotated[tuple[Prediction, ...], says("the most probable tokens, most probable first")]
    latency: Annotated[Latency, says("how long the request took in the engine")]


class Answer(ServedPrompt, dict=True):
    """A prediction of the next token, and how it was computed."""

    mode: UsedMode
    window: UsedWindow
    predictions: tuple[Prediction, ...]
    """the most probable tokens, most probable first; empty before the first token of a model that reads no start token
    """
    latency: Annotated[Latency, says("how long the request took in the engine")]
    state: Source
    error_bound: ErrorBound
    state_error_bound: StateErrorBound
    top1_proved: Annotated[
        bool,
        says(
            "true: it is proved that recurrent mode over all tokens has the same most probable token. The proof "
            "follows from the margin between the first two predictions or, with `prove`, from a search"
        ),
    ]
    modes: Annotated[dict[str, ModeAnswer] | None, says("only in mode both: the answer of each mode")] = None
    agreement: Annotated[Agreement | None, says("only in mode both: the agreement of the two modes")] = None
    session: Annotated[SessionName | None, says("only for a session: the session's id")] = None
    position: Annotated[Position | None, says("only for a session: the number of its tokens, without <eos>")] = None
    replayed: Annotated[
        bool | None,
        says("only for a step. true: the step is a retry, and its tokens were not appended again"),
    ] = None
    created: Annotated[
        bool | None,
        says(
            "true if the step created the session, or is a retry of the step that created it; otherwise absent. If it "
            "is true, but the client expected the session to exist, the session's earlier tokens have expired"
        ),
    ] = None
    durable: Durable = None
    cache_tokens: CacheTokens = None
    unknown: UnknownNames = None
    seen_tokens: Annotated[
        int | None,
        says(
            "the number of the sequence's last tokens that the server knows, and that are therefore not listed; "
            "present only with `exclude_seen`"
        ),
    ] = None

    logits: ClassVar[NDArray[np.float32] | None] = None
    """float32 (V), if the request asked for them. The logits of a mixture with the cache are its log-probabilities."""

    token_logprobs: ClassVar[tuple[float | None, ...] | None] = None
    """The log-probability of each token of a step, in recurrent mode, if the request asked for them. With a zero start,
    the value of the sequence's first token is None."""

    def with_details(self, logits: NDArray[np.float32] | None, token_logprobs: tuple[float | None, ...] | None) -> Self:
        """Sets `logits` and `token_logprobs`. They are not in JSON: they are attributes of the instance, not fields."""
        vars(self).update(logits=logits, token_logprobs=token_logprobs)
        return self


class Continuation(Answer, kw_only=True):
    """A continuation's tokens and their log-probabilities, and the prediction of the token after them. `position` is
    the position after the continuation."""

    tokens: Annotated[tuple[int, ...], says("the ids of the continuation's tokens")]
    logprobs: tuple[float, ...]
    """the natural logarithm of each token's probability, given the session's tokens and the tokens before it"""
    error_bounds: tuple[ErrorBound, ...]
    """the error bound of the distribution that predicted each token"""


class Continuations(Served):
    """The answers to the continuations of a session, which has not changed."""

    session: SessionName
    position: Position
    results: Annotated[tuple[Continuation, ...], says("an answer for each continuation, in their order")]


class Failed(Result):
    """A failed item of a batch."""

    error: Annotated[dict[str, Any], says("a problem document, as in the answer of a failed request")]


Results = Annotated[
    tuple[Any, ...], says("an answer or an error for each item, in their order", items=any_of(Answer, Failed))
]


class Answers(Result):
    """The answers to many steps."""

    results: Results


class Batch(Served):
    """The answers to a batch."""

    results: Results


NO_COLUMN = frozenset(
    {"model_version", "device", "predictions", "latency", "modes", "agreement", "session", "cached_tokens"}
)
"""The fields of `Answer` that `StepColumns` has not, or has in another form."""

ALWAYS = frozenset({"position", "replayed", "created", "durable", "cache_tokens"})
"""The fields of `Answer` that may be absent, but whose columns are always present. The column of any other such field
is present only if a step has a value for it."""


COLUMNS = tuple(name for name in Answer.__struct_fields__ if name not in NO_COLUMN)
"""The fields of `Answer` that have a column in `StepColumns`."""

SELDOM = frozenset(Answer.__struct_fields__[-len(Answer.__struct_defaults__) :]) - ALWAYS


def _columns() -> list[Any]:
    """Returns the fields of `StepColumns` that list a field of `Answer`, with null for a failed step."""
    made: list[Any] = []
    for name, kind in get_type_hints(Answer, include_extras=True).items():
        if name in COLUMNS:
            meaning, values = says(kind.__metadata__[-1].description), tuple[kind | None, ...]  # type: ignore[valid-type]
            column: Any = Annotated[values, meaning]
            made.append((name, Annotated[values | None, meaning], None) if name in SELDOM else (name, column))
    return made


StepColumns = defstruct(
    "StepColumns",
    [
        ("session", Annotated[tuple[str, ...], says("the id of each step's session")]),
        *_columns(),
        ("token_id", Annotated[tuple[tuple[int, ...] | None, ...], says("each step's predictions, first the best")]),
        ("logprob", Annotated[tuple[tuple[float, ...] | None, ...], says("the predictions' log-probabilities")]),
        ("error", Annotated[tuple[dict[str, Any] | None, ...], says("a problem document; null: the step succeeded")]),
        ("latency", Annotated[Latency, says("the largest time of each phase of all steps")]),
    ],
    bases=(Result,),
    kw_only=True,
    namespace={
        "__doc__": "The answers to steps as one list for each field, in the order of the steps. For a failed step, "
        "every list has null, except `session` and `error`."
    },
)


class SessionView(Served):
    """A session as its owner sees it."""

    session: SessionName
    mode: Annotated[Mode, says("the default mode of the session's steps")]
    position: Position
    state: StateSource
    """the source of the state for an answer in the session's own mode at this time: resident, rebuilt for a session
    whose state is not in memory, or window"""
    error_bound: ErrorBound
    idle_s: Annotated[float, says("the time since the session's last step, in seconds")]
    durable: Durable = None
    unknown: UnknownNames = None


class NewSession(SessionView):
    """A session that the request has created."""


class SessionState(Served):
    """The hidden vector of a session, for a ranker or an index outside of the server."""

    session: SessionName
    position: Position
    state: Source
    hidden: tuple[float, ...]
    """the input of the output layer after `position` tokens: the exact float32 values of its units"""
    state_error_bound: StateErrorBound
    durable: Durable = None
