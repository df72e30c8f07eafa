"""The requests and answers of sessions and their steps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from wane.service.settings import Settings
from wane.service.types.body import (
    HISTORY,
    IDEMPOTENCY,
    Body,
    Cache,
    Events,
    EventsBody,
    IdempotencyKey,
    Model,
    Name,
    Natural,
    Prove,
    RankedBody,
    SessionId,
    Text,
    TokenArray,
    Tokens,
    TopK,
    UnknownEvents,
    absent,
    as_array,
    at_most,
    present,
)
from wane.service.types.common import Mode, says
from wane.service.types.cost import Cost, length_of, within
from wane.service.types.request import MAX_POSITION, History

BEHIND_A_TOKEN = {"required": ["position"], "properties": {"position": {"type": "integer", "minimum": 1}}}
"""The JSON schema rule of a body that continues a history. The body's `position` is at least 1."""


class SessionBody(Body, kw_only=True):
    """Start a session at position 0. With a history, start the session at `position`. The history is the last tokens
    before that position."""

    examples = ({"session": "demo"}, {"mode": "recurrent"}, {}, {"history": [5, 6, 7], "position": 20})
    not_both: ClassVar[tuple[str, ...]] = ("history", "input", "events")
    needs: ClassVar = {"unknown": ("events",)}
    rules: ClassVar = (
        *({"anyOf": [absent(name), BEHIND_A_TOKEN]} for name in not_both),
        {
            "anyOf": [
                {"properties": {"position": {"enum": [None, 0]}}},
                *(present(name) for name in not_both),
            ]
        },
    )

    model: Model = None
    session: Annotated[SessionId | None, says("the session's id; default: a new id")] = None
    mode: Annotated[Mode | None, says("the default mode of the session's steps")] = None
    history: Annotated[TokenArray | None, at_most("max_input_tokens")] = None
    """token ids: the last tokens before `position`. If there are `position` of them, they are the whole sequence, and
    the start token is fed before them. If there are fewer, they are the end of a longer sequence (see `truncated` in
    /v1/predict)"""
    input: Annotated[Text | None, says("the history as a text")] = None
    events: Annotated[Events | None, at_most("max_input_tokens")] = None
    """the history as events, for a model of events; a skipped event does not count in `position`"""
    unknown: UnknownEvents | None = None
    position: Annotated[Natural, at_most(MAX_POSITION)] | None = None
    """the session's number of tokens so far, without the start token <eos>; required with `history`, `input` or
    `events`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history is not None:
            self.history = as_array(self.history)
        name = next((name for name in self.not_both if getattr(self, name) is not None), None)
        if self.position is None and name is not None:
            raise ValueError(f"`{name}` holds the last tokens before a position: give `position`, too")

    def cost(self, settings: Settings) -> Cost:  # noqa: ARG002
        return Cost(1, len(self.history or self.events or ()))


class StepBody(RankedBody, kw_only=True):
    """Append tokens to a session, and predict the next token."""

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"input": HISTORY},
        {"tokens": [5, 6, 7], "top_k": 3},
        {"tokens": [5], "create": True},
    )

    expected_position: Natural | None = None
    """the session's expected position before the step. If the session has another position, the answer is 409. The
    header x-wane-position has the same effect"""
    top_k: TopK = 5
    mode: Annotated[Mode | None, says("default: the session's mode")] = None
    prove: Prove = False
    cache: Cache = True
    create: bool = False
    """create the session if it does not exist and `expected_position` is 0 or absent; the answer then has `created`"""
    model: Name | None = None
    """the model of a session that the step creates; default: the first model in /v1/models. An existing session must
    have this model"""


class SessionStepBody(StepBody, kw_only=True):
    """One step of a call with many steps."""

    session: Annotated[SessionId, says("the session's id")]
    idempotency_key: Annotated[IdempotencyKey | None, says(IDEMPOTENCY)] = None


class StepsFormat(StrEnum):
    """The format of the answers to many steps."""

    DOCUMENTS = "documents"
    COLUMNS = "columns"


class StepsBody(Body, kw_only=True):
    """Steps of many sessions in one call. Steps of the same session run in order. If a step fails, the later steps of
    its session fail, too."""

    examples = (
        {"steps": [{"session": "demo", "input": HISTORY}, {"session": "demo", "tokens": [5], "top_k": 1}]},
        {"steps": [{"session": "demo", "tokens": [5], "top_k": 1}], "format": "columns"},
    )

    steps: Annotated[tuple[SessionStepBody, ...], Meta(min_length=1), at_most("max_batch_inputs")]
    """the steps, in order"""
    format: StepsFormat = StepsFormat.DOCUMENTS
    """documents: an answer for each step, in the format of a single step's answer; columns: one list for each field,
    which takes about a quarter of the bytes. Columns omit `probability`, which is exp(logprob), and `token`, which the
    model's vocabulary has for each token_id"""

    def cost(self, settings: Settings) -> Cost:
        tokens = sum(length_of(step.sequence) for step in self.steps)
        listed = sum(within(step.top_k, settings.top_k_limit) for step in self.steps)
        return Cost(len(self.steps), tokens, listed, "steps")


class StreamBody(StepBody, kw_only=True):
    """One message of a session's WebSocket. A message is a step or a rewind."""

    examples = (
        {"input": HISTORY},
        {"tokens": [5], "expected_position": 3},
        {"rewind": 1},
    )
    one_of: ClassVar[tuple[str, ...]] = ("input", "tokens", "events", "rewind")
    alone = "rewind"

    rewind: Annotated[Natural | None, says("drop the tokens after this position")] = None
    idempotency_key: Annotated[IdempotencyKey | None, says(IDEMPOTENCY)] = None


class CopiedSession(Struct):
    """What one worker tells another one of a session that is forked: the id of the new session, and the model, the mode
    and the `History` of the old one."""

    session: str | None
    model: str
    mode: Mode
    tokens: tuple[int, ...]
    position: int
    snapshot: bytes

    @property
    def history(self) -> History:
        return History(self.tokens, self.position, self.snapshot)


class ForkBody(Body, kw_only=True):
    """Create a session from another session's tokens."""

    examples = ({"session": "what-if"}, {"position": 1}, {})

    session: Annotated[SessionId | None, says("the new session's id; default: a new id")] = None
    position: Natural | None = None
    """the number of tokens to take over; the server must still have the last of these tokens; default: all"""


class ContinuationsBody(Body, kw_only=True):
    """Score sequences that may follow a session's tokens, and predict the token after each. The session does not
    change."""

    examples = ({"continuations": [[5, 6], [7]]}, {"continuations": [HISTORY, "The film"], "top_k": 1})

    continuations: Annotated[tuple[Text | Tokens | EventsBody, ...], Meta(min_length=1), at_most("max_batch_inputs")]
    """each is a text, a list of token ids, or `{"events": [...]}`; together they have at most as many tokens as one
    input"""
    unknown: UnknownEvents | None = None
    top_k: TopK = 5
    cache: Cache = True

    def cost(self, settings: Settings, tokens: int | None = None) -> Cost:
        """`tokens` is the number of tokens of all continuations, or None before texts are tokenised."""
        count = len(self.continuations)
        tokens = sum(map(length_of, self.continuations)) if tokens is None else tokens
        return Cost(count, tokens, count * within(self.top_k, settings.top_k_limit) + 2 * tokens, "continuations")


class RewindBody(Body, kw_only=True):
    """Drop a session's latest tokens."""

    examples = ({"position": 1},)

    position: Natural
    """the number of tokens to keep; the server must still have the last of these tokens"""
