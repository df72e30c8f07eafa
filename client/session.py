"""A session, as plans (see `retry.py`): what the client remembers of it, and how a lost session is made again."""

from __future__ import annotations

import builtins
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack
from unicodedata import is_normalized
from urllib.parse import quote
from uuid import uuid4

from .answers import Answer, Generated, SessionView
from .calls import Calls
from .errors import InvalidRequest, NotFound, PositionConflict, SessionExists, TooLarge, UnknownSession, WaneError
from .options import (
    GenerateOptions,
    Input,
    PredictOptions,
    SessionOptions,
    StepOptions,
    Timed,
    Unknown,
    checked,
    sequence,
)
from .retry import Plan, Sleep, Socket

T = TypeVar("T")
P = ParamSpec("P")

LEAVING_S = 2.0  # the deadline for ending a session after an exception
SESSION_ID = re.compile(r"(?!\.{1,2}$)[^/\\\ufffd]{1,128}")


def alone(plan: Callable[Concatenate[Steps, P], Plan[T]]) -> Callable[Concatenate[Steps, P], Plan[T]]:
    """Makes a plan raise RuntimeError while another plan of the same session runs."""

    @wraps(plan)
    def run(self: Steps, /, *arguments: P.args, **options: P.kwargs) -> Plan[T]:
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(f"another call of session {self.name} has not ended: a session is for one thread")
        try:
            return (yield from plan(self, *arguments, **options))
        finally:
            self.lock.release()

    return run


@dataclass
class Steps:
    """The calls of `Session` and of `AsyncSession`. A session is for one thread or task at a time.

    `position` is the number of tokens after the last answer. `known` are the last of them: token ids, or names of
    events. `pending` are the steps at this position that have no answer yet, and their keys: the same step again has
    the same key.
    """

    calls: Calls
    name: str
    model: str | None = None
    mode: str | None = None
    remember: int = 512
    unknown: Unknown | None = None
    owned: bool = False  # the client made the id, so nobody else uses the session
    position: int = 0
    rebuilds: int = 0
    known: list[Any] = field(default_factory=list)
    socket: Socket | None = None
    opened: bool = False
    closed: bool = False
    typed: bool = False
    pending: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, calls: Calls, name: str | None, options: SessionOptions) -> Steps:
        """Checks the arguments of a session. Raises ValueError."""
        if name is not None and not (SESSION_ID.fullmatch(name) and name.isprintable() and is_normalized("NFC", name)):
            raise ValueError(
                f"{name!r:.60} is not a session's id: 1 to 128 printable characters in the form NFC, without / and \\, "
                "not . or .."
            )
        return cls(calls, name or uuid4().hex, owned=name is None, **checked(SessionOptions, options))

    @property
    def path(self) -> str:
        return f"/v1/sessions/{quote(self.name, safe=':')}"

    def open(self, deadline: float | None = None) -> Plan[None]:
        """Creates the session, or takes it as it is on the server if it exists."""
        if self.closed:
            raise ValueError(f"session {self.name} is closed")
        if self.opened:
            return
        deadline = self.calls.started(Timed, {})[1] if deadline is None else deadline
        try:
            view = yield from self._create({}, deadline)
        except SessionExists:
            view = yield from self.calls.servers.ask(SessionView, "GET", self.path, None, deadline)
            if self.model not in (None, view.model) or self.mode not in (None, view.mode):
                raise
        self.model, self.mode, self.position, self.opened = view.model, view.mode, view.position, True

    @alone
    def append(self, input: Input, **options: Unpack[StepOptions]) -> Plan[Answer]:  # noqa: A002
        """Appends a text, token ids, or names of events, and predicts the next one. A single name of an event may be
        given as such: `append("coats/08")`.

        A retry never appends twice. Text in pieces is tokenised in pieces: `append("walk")`, `append("ing")` is not
        `append("walking")` to the model. `type(text)` is for text that grows.
        """
        body, deadline = self.calls.started(StepOptions, options)
        given = sequence(input)
        yield from self.open(deadline)
        return (yield from self._step((yield from self._tokens(given, deadline)), body, deadline))

    @alone
    def type(self, text: str, **options: Unpack[StepOptions]) -> Plan[Answer]:
        """Makes `text` the session's whole text, and predicts what follows: tokenises the whole text, rewinds the
        session to the last token that is still the same, and appends the rest. So the answer is that of the whole
        text, however it was typed."""
        body, deadline = self.calls.started(StepOptions, options)
        yield from self.open(deadline)
        if (yield from self._reads_events(deadline)) or self.position != len(self.known):
            raise ValueError("type() needs a session of text, all of whose tokens this client remembers")
        self.typed = True  # from now on every token is remembered
        wanted = (yield from self._tokenised(text, deadline)) if text else []
        pairs = zip(self.known, wanted, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.known), len(wanted)))
        ends = {self.position + len(given["tokens"]) for given, _ in self.pending if "tokens" in given}
        try:
            if shared < self.position:
                yield from self._rewind(shared, deadline)
            if shared < len(wanted):
                return (yield from self._step({"tokens": wanted[shared:]}, body, deadline))
        except InvalidRequest as error:
            if error.field != "position":
                raise
            yield from self._replace(wanted, deadline)
        except PositionConflict as error:
            if error.position > self.position and not self.owned and error.position not in ends:
                raise  # another client uses the session
            yield from self._replace(wanted, deadline)
        return (yield from self._predict(body, deadline))

    @alone
    def predict(self, **options: Unpack[PredictOptions]) -> Plan[Answer]:
        """Predicts the next token, and appends nothing."""
        body, deadline = self.calls.started(PredictOptions, options)
        yield from self.open(deadline)
        return (yield from self._predict(body, deadline))

    @alone
    def generate(self, **options: Unpack[GenerateOptions]) -> Plan[Generated]:
        """Continues the session's tokens, and appends nothing."""
        body, deadline = self.calls.started(GenerateOptions, options)
        yield from self.open(deadline)
        body |= {"session": self.name, "position": self.position}
        return (yield from self._restored(lambda: self.calls.post(Generated, "/v1/generate", body, deadline), deadline))

    @alone
    def rewind(self, position: int) -> Plan[None]:
        """Drops the tokens after `position`."""
        _, deadline = self.calls.started(Timed, {})
        yield from self.open(deadline)
        if type(position) is not int or not 0 <= position <= self.position:
            raise ValueError(f"position must be a whole number from 0 to {self.position}, not {position!r:.60}")
        yield from self._rewind(position, deadline)

    @alone
    def close(self, **options: Unpack[Timed]) -> Plan[None]:
        """Ends the session on the server."""
        _, deadline = self.calls.started(Timed, options)
        if self.opened and not self.closed:
            yield from self._delete(deadline)
        self.closed = True

    def streamed(self) -> Socket:
        """Makes the steps go over a WebSocket, until `socket` is None again."""
        if find_spec("websockets") is None:
            raise ModuleNotFoundError("a stream needs the package websockets: pip install 'wane-client[stream]'")
        self.socket = Socket(f"{self.path}/stream")
        return self.socket

    def _step(self, given: dict[str, Any], body: dict[str, Any], deadline: float) -> Plan[Answer]:
        """Sends a step with its position and its key until it is answered, and remembers its tokens."""
        events = "events" in given
        if self.known and self.remember and isinstance(self.known[-1], str) != events:
            raise ValueError("a session's steps are either all events or all tokens")
        start = self.position
        key = next((key for step, key in self.pending if step == given), "") or uuid4().hex
        if (given, key) not in self.pending:
            self.pending.append((given, key))
        body = {**body, **given, "expected_position": start}
        if events and self.unknown:
            body["unknown"] = self.unknown

        def attempt() -> Plan[Answer]:
            if self.socket is None:
                headers = {"idempotency-key": key}
                return self._ask(Answer, f"{self.path}/tokens", body, deadline, headers)
            return self._ask(Answer, self.socket.path, {**body, "idempotency_key": key}, deadline)

        answer = yield from self._restored(attempt, deadline)
        added = next((list(items) for name, items in given.items() if name != "input"), [])
        if events and answer.position != start + len(added):  # the server has skipped unknown events
            added = [name for name in added if name not in answer.unknown]
        if answer.position is None or ("input" not in given and answer.position != start + len(added)):
            why = f"the position after the step is {answer.position}, not {start + len(added)}"
            raise self.calls.servers.not_wane("POST", f"{self.path}/tokens", why)
        self.position, self.pending = answer.position, []
        self.known += added
        if not self.typed:
            del self.known[: max(0, len(self.known) - self.remember)]
        return answer

    def _ask(
        self, kind: builtins.type[T], path: str, body: object, deadline: float, headers: dict[str, str] | None = None
    ) -> Plan[T]:
        socket = self.socket if self.socket and path == self.socket.path else None
        return (yield from self.calls.servers.ask(kind, "POST", path, body, deadline, headers, socket))

    def _predict(self, body: dict[str, Any], deadline: float) -> Plan[Answer]:
        def attempt() -> Plan[Answer]:
            answer = yield from self._ask(Answer, "/v1/predict", {**body, "session": self.name}, deadline)
            if answer.position != self.position:
                raise self._conflict("/v1/predict", answer.position)
            return answer

        return (yield from self._restored(attempt, deadline))

    def _rewind(self, position: int, deadline: float) -> Plan[None]:
        def attempt() -> Plan[None]:
            try:
                yield from self._ask(SessionView, f"{self.path}/rewind", {"position": position}, deadline)
            except InvalidRequest:  # also where a server has an earlier position than `position`
                view = yield from self.calls.servers.ask(SessionView, "GET", self.path, None, deadline)
                if position <= view.position <= self.position:
                    raise
                raise self._conflict(f"{self.path}/rewind", view.position) from None

        yield from self._restored(attempt, deadline)
        del self.known[max(0, len(self.known) - (self.position - position)) :]
        self.position, self.pending = position, []

    def _conflict(self, path: str, position: int | None) -> PositionConflict:
        why = f"the session is at {position}, not at {self.position}"
        return PositionConflict(f"POST {path}: {why}", status=409, document={"position": position, "detail": why})

    def _restored(self, attempt: Callable[[], Plan[T]], deadline: float) -> Plan[T]:
        """Repeats an attempt, and restores the session before each repetition, until the server is where this client
        is."""
        servers = self.calls.servers
        for turn in count():
            try:
                return (yield from attempt())
            except (UnknownSession, PositionConflict) as error:
                if turn:
                    wait_s = servers.pause_s(turn)
                    if wait_s >= deadline - servers.clock():
                        raise
                    yield Sleep(wait_s)
                yield from self._restore(error, deadline)
        raise AssertionError("the loop has no end: this is a bug")

    def _restore(self, error: WaneError, deadline: float) -> Plan[None]:
        """Brings a server that has lost the session, or its last tokens, to the client's position, from the tokens
        that the client remembers. Raises `error` if that is impossible. If the session changes meanwhile, it returns:
        the next attempt compares the positions again."""
        if isinstance(error, PositionConflict):
            lost = self.position - error.position
            if type(error) is not PositionConflict or not 0 < lost <= len(self.known):
                raise error
            body = {**self._named(self.known[-lost:], "tokens"), "expected_position": error.position}
            with suppress(UnknownSession, PositionConflict):
                yield from self._ask(Answer, f"{self.path}/tokens", body, deadline)
                self.rebuilds += 1
        else:
            if self.position and not self.known:
                raise error
            with suppress(SessionExists):  # a reply was lost, or another client has made it
                yield from self._make_again(deadline)
                self.rebuilds += 1

    def _replace(self, tokens: list[int], deadline: float) -> Plan[None]:
        """Makes the session again from other tokens."""
        yield from self._delete(deadline)
        self.known, self.position, self.pending = tokens, len(tokens), []
        yield from self._make_again(deadline)

    def _make_again(self, deadline: float) -> Plan[SessionView]:
        """Creates the session from the tokens that are known, or from fewer of them if the server refuses so many."""
        items = self.known
        while True:
            history = {**self._named(items, "history"), "position": self.position} if items else {}
            try:
                return (yield from self._create(history, deadline))
            except TooLarge:
                if len(items) < 2:
                    raise
                items = items[-(len(items) // 2) :]

    def _named(self, items: list[Any], name: str) -> dict[str, Any]:
        if not isinstance(items[0], str):
            return {name: items}
        return {"events": items} | ({"unknown": self.unknown} if self.unknown else {})

    def _create(self, history: dict[str, Any], deadline: float) -> Plan[SessionView]:
        body = {"session": self.name, "model": self.model, "mode": self.mode, **history}
        body = {name: value for name, value in body.items() if value is not None}
        return (yield from self.calls.post(SessionView, "/v1/sessions", body, deadline))

    def _delete(self, deadline: float) -> Plan[None]:
        with suppress(NotFound):
            yield from self.calls.servers.reply("DELETE", self.path, None, deadline)

    def _tokens(self, given: dict[str, Any], deadline: float) -> Plan[dict[str, Any]]:
        """Turns a text into token ids if they are to be remembered, and into an event for a model of events."""
        if "input" not in given:
            return given
        if (yield from self._reads_events(deadline)):
            return {"events": [given["input"]]}
        if not self.remember and not self.typed:
            return given
        return {"tokens": (yield from self._tokenised(given["input"], deadline))}

    def _reads_events(self, deadline: float) -> Plan[bool]:
        assert self.model is not None, "an open session has a model: this is a bug"
        if self.model not in self.calls.kinds:
            yield from self.calls.models(deadline_s=max(1e-3, deadline - self.calls.servers.clock()))
        return self.calls.kinds.get(self.model) == "events"

    def _tokenised(self, text: str, deadline: float) -> Plan[list[int]]:
        body = {"prompt": text, "model": self.model}
        kind = tuple[int, ...]
        return list((yield from self.calls.servers.ask(kind, "POST", "/tokenize", body, deadline, member="tokens")))


class Facts:
    """What a session's client knows without asking."""

    _plans: Steps

    @property
    def name(self) -> str:
        """The session's id."""
        return self._plans.name

    @property
    def position(self) -> int:
        """The number of tokens after the last answer; 0 before the first call."""
        return self._plans.position

    @property
    def rebuilds(self) -> int:
        """How often a server was given tokens again that it had lost."""
        return self._plans.rebuilds
