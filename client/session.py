"""A session: what the client remembers of it, and how a lost session is made again."""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from importlib.util import find_spec
from itertools import count
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack
from unicodedata import is_normalized
from urllib.parse import quote
from uuid import uuid4

from .answers import Answer, Continuation, Continuations, Generated, Model, SessionView
from .errors import InvalidRequest, NotFound, PositionConflict, SessionExists, TooLarge, UnknownSession, WaneError
from .options import (
    ContinuationOptions,
    GenerateOptions,
    Input,
    PredictOptions,
    SessionOptions,
    StepOptions,
    Timed,
    checked,
    sequence,
)
from .servers import Servers, Socket

T = TypeVar("T")
P = ParamSpec("P")

LEAVING_S = 2.0  # the deadline for ending a session after an exception
REMEMBERED = 512
SESSION_ID = re.compile(r"(?!\.{1,2}$)[^/\\\ufffd]{1,128}")


def alone(
    call: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, T]]:
    """Makes a call raise RuntimeError while another call of the same session runs."""

    @wraps(call)
    async def run(self: AsyncSession, /, *arguments: P.args, **options: P.kwargs) -> T:
        if self._busy:
            raise RuntimeError(f"another call of session {self.name} has not ended: a session is for one thread")
        self._busy = True
        try:
            return await call(self, *arguments, **options)
        finally:
            self._busy = False

    return run


class AsyncSession:
    """Like `Session`, for one task at a time.

    `_known` are the last of its tokens: token ids, or names of events. `_pending` are the steps at this position that
    have no answer yet, and their keys: the same step again has the same key. `_owned`: the client made the id, so
    nobody else uses the session.
    """

    def __init__(self, servers: Servers, kinds: dict[str, str], name: str | None, options: SessionOptions) -> None:
        """`kinds`: the kinds of the models' vocabularies, as far as they are known. Raises ValueError."""
        if name is not None and not (SESSION_ID.fullmatch(name) and name.isprintable() and is_normalized("NFC", name)):
            raise ValueError(
                f"{name!r:.60} is not a session's id: 1 to 128 printable characters in the form NFC, without / and \\, "
                "not . or .."
            )
        self.name, self.position, self.rebuilds = name or uuid4().hex, 0, 0
        given = checked(SessionOptions, options)
        self._model, self._mode, self._unknown = (given.get(part) for part in ("model", "mode", "unknown"))
        self._remember: float = given.get("remember", REMEMBERED)
        self._servers, self._kinds, self._owned = servers, kinds, name is None
        self._path = f"/v1/sessions/{quote(self.name, safe=':')}"
        self._known: list[Any] = []
        self._pending: list[tuple[dict[str, Any], str]] = []
        self._socket: Socket | None = None
        self._opened = self._closed = self._typed = self._busy = False

    @alone
    async def append(self, input: Input, **options: Unpack[StepOptions]) -> Answer:  # noqa: A002
        """Appends a text, token ids, or names of events, and predicts the next one. A single name of an event may be
        given as such: `append("coats/08")`.

        A retry never appends twice. Text in pieces is tokenised in pieces: `append("walk")`, `append("ing")` is not
        `append("walking")` to the model. `type(text)` is for text that grows.
        """
        body, deadline = self._servers.started(StepOptions, options)
        given = sequence(input)
        await self._open(deadline)
        if "input" in given:
            if await self._reads_events(deadline):
                given = {"events": [given["input"]]}
            elif self._remember or self._typed:
                given = {"tokens": await self._tokens(given["input"], deadline)}
        return await self._step(given, body, deadline)

    @alone
    async def type(self, text: str, **options: Unpack[StepOptions]) -> Answer:
        """Makes `text` the session's whole text, and predicts what follows: tokenises the whole text, rewinds the
        session to the last token that is still the same, and appends the rest. So the answer is that of the whole
        text, however it was typed."""
        body, deadline = self._servers.started(StepOptions, options)
        await self._open(deadline)
        if await self._reads_events(deadline) or self.position != len(self._known):
            raise ValueError("type() needs a session of text, all of whose tokens this client remembers")
        self._typed = True  # from now on every token is remembered
        wanted = await self._tokens(text, deadline) if text else []
        pairs = zip(self._known, wanted, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._known), len(wanted)))
        ends = {self.position + len(given["tokens"]) for given, _ in self._pending if "tokens" in given}
        try:
            if shared < self.position:
                await self._rewind(shared, deadline)
            if shared < len(wanted):
                return await self._step({"tokens": wanted[shared:]}, body, deadline)
        except InvalidRequest as error:
            if error.field != "position":
                raise
            await self._replace(wanted, deadline)
        except PositionConflict as error:
            if error.position > self.position and not self._owned and error.position not in ends:
                raise  # another client uses the session
            await self._replace(wanted, deadline)
        return await self._predict(body, deadline)

    @alone
    async def predict(self, **options: Unpack[PredictOptions]) -> Answer:
        """Predicts the next token, and appends nothing."""
        body, deadline = self._servers.started(PredictOptions, options)
        await self._open(deadline)
        return await self._predict(body, deadline)

    @alone
    async def generate(self, **options: Unpack[GenerateOptions]) -> Generated:
        """Continues the session's tokens, and appends nothing."""
        body, deadline = self._servers.started(GenerateOptions, options)
        await self._open(deadline)
        body |= {"session": self.name, "position": self.position}
        return await self._restored(lambda: self._post(Generated, "/v1/generate", body, deadline), deadline)

    @alone
    async def rewind(self, position: int, **options: Unpack[Timed]) -> None:
        """Drops the tokens after `position`."""
        _, deadline = self._servers.started(Timed, options)
        await self._open(deadline)
        await self._rewind(self._within(position), deadline)

    @alone
    async def fork(
        self, name: str | None = None, position: int | None = None, **options: Unpack[Timed]
    ) -> AsyncSession:
        """Starts another session with this session's tokens up to `position`, by default all. `name`: its id. Later
        steps of one of the two do not change the other."""
        _, deadline = self._servers.started(Timed, options)
        await self._open(deadline)
        position = self._within(self.position if position is None else position)
        own: SessionOptions = {"model": self._model, "mode": self._mode, "unknown": self._unknown}
        forked = AsyncSession(self._servers, self._kinds, name, own)
        forked._remember, forked._typed, forked._opened = self._remember, self._typed, True
        await self._at("fork", {"session": forked.name, "position": position}, position, deadline)
        forked._known, forked.position = self._known_until(position), position
        return forked

    @alone
    async def continuations(
        self, continuations: Sequence[Input], **options: Unpack[ContinuationOptions]
    ) -> tuple[Continuation, ...]:
        """Scores each continuation of the session's tokens, and predicts what follows it. Appends nothing."""
        body, deadline = self._servers.started(ContinuationOptions, options)
        given = [sequence(one) for one in continuations]
        await self._open(deadline)
        if any("input" in one for one in given) and await self._reads_events(deadline):
            given = [{"events": [one["input"]]} if "input" in one else one for one in given]
        body["continuations"] = [one if "events" in one else next(iter(one.values())) for one in given]
        if self._unknown and any("events" in one for one in given):
            body["unknown"] = self._unknown
        path = f"{self._path}/continuations"

        async def attempt() -> tuple[Continuation, ...]:
            answer = await self._post(Continuations, path, body, deadline)
            if answer.position != self.position:
                raise self._conflict(path, answer.position)
            return answer.results

        return await self._restored(attempt, deadline)

    @alone
    async def close(self, **options: Unpack[Timed]) -> None:
        """Ends the session on the server."""
        _, deadline = self._servers.started(Timed, options)
        if self._opened and not self._closed:
            await self._delete(deadline)
        self._closed = True

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Self]:
        """Within the block, steps go over one WebSocket. Needs the extra `stream`."""
        if find_spec("websockets") is None:
            raise ModuleNotFoundError("a stream needs the package websockets: pip install 'wane-client[stream]'")
        socket = self._socket = Socket(f"{self._path}/stream")
        try:
            yield self
        finally:
            self._socket = None
            await socket.close()

    async def __aenter__(self) -> Self:
        await self._open(self._servers.started(Timed, {})[1])
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if self._owned and kind is None:
            await self.close()
        elif self._owned:  # what was raised is raised further
            with suppress(WaneError):
                await self.close(deadline_s=LEAVING_S)

    async def _open(self, deadline: float) -> None:
        """Creates the session, or takes it as it is on the server if it exists."""
        if self._closed:
            raise ValueError(f"session {self.name} is closed")
        if self._opened:
            return
        try:
            view = await self._create({}, deadline)
        except SessionExists:
            view = await self._view(deadline)
            if self._model not in (None, view.model) or self._mode not in (None, view.mode):
                raise
        self._model, self._mode, self.position, self._opened = view.model, view.mode, view.position, True

    async def _step(self, given: dict[str, Any], body: dict[str, Any], deadline: float) -> Answer:
        """Sends a step with its position and its key until it is answered, and remembers its tokens."""
        events = "events" in given
        if self._known and self._remember and isinstance(self._known[-1], str) != events:
            raise ValueError("a session's steps are either all events or all tokens")
        start = self.position
        key = next((key for step, key in self._pending if step == given), "") or uuid4().hex
        if (given, key) not in self._pending:
            self._pending.append((given, key))
        body = {**body, **given, "expected_position": start}
        if events and self._unknown:
            body["unknown"] = self._unknown

        def attempt() -> Awaitable[Answer]:
            if self._socket is not None:
                keyed = {**body, "idempotency_key": key}
                return self._post(Answer, self._socket.path, keyed, deadline, socket=self._socket)
            return self._post(Answer, f"{self._path}/tokens", body, deadline, headers={"idempotency-key": key})

        answer = await self._restored(attempt, deadline)
        added = next((list(items) for name, items in given.items() if name != "input"), [])
        if events and answer.position != start + len(added):  # the server has skipped unknown events
            added = [name for name in added if name not in answer.unknown]
        if answer.position is None or ("input" not in given and answer.position != start + len(added)):
            why = f"the position after the step is {answer.position}, not {start + len(added)}"
            raise self._servers.not_wane(f"POST {self._path}/tokens", why)
        self.position, self._pending = answer.position, []
        self._known += added
        if not self._typed:
            del self._known[: max(0, len(self._known) - int(self._remember))]
        return answer

    async def _predict(self, body: dict[str, Any], deadline: float) -> Answer:
        async def attempt() -> Answer:
            answer = await self._post(Answer, "/v1/predict", {**body, "session": self.name}, deadline)
            if answer.position != self.position:
                raise self._conflict("/v1/predict", answer.position)
            return answer

        return await self._restored(attempt, deadline)

    def _within(self, position: int) -> int:
        """Returns a position up to this one. Raises ValueError for another value."""
        if builtins.type(position) is not int or not 0 <= position <= self.position:
            raise ValueError(f"position must be a whole number from 0 to {self.position}, not {position!r:.60}")
        return position

    def _known_until(self, position: int) -> list[Any]:
        """Returns what is known of the tokens up to a position."""
        return self._known[: max(0, len(self._known) - (self.position - position))]

    async def _rewind(self, position: int, deadline: float) -> None:
        await self._at("rewind", {"position": position}, position, deadline)
        self._known, self.position, self._pending = self._known_until(position), position, []

    async def _at(self, call: str, body: dict[str, Any], position: int, deadline: float) -> None:
        """Makes a call for the tokens up to a position, which the server must have."""
        path = f"{self._path}/{call}"

        async def attempt() -> None:
            try:
                await self._post(SessionView, path, body, deadline)
            except InvalidRequest:  # also where a server has an earlier position than `position`
                view = await self._view(deadline)
                if position <= view.position <= self.position:
                    raise
                raise self._conflict(path, view.position) from None

        await self._restored(attempt, deadline)

    def _conflict(self, path: str, position: int | None) -> PositionConflict:
        why = f"the session is at {position}, not at {self.position}"
        return PositionConflict(f"POST {path}: {why}", status=409, document={"position": position, "detail": why})

    async def _restored(self, attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
        """Repeats an attempt, and restores the session before each repetition, until the server is where this client
        is."""
        for turn in count():
            try:
                return await attempt()
            except (UnknownSession, PositionConflict) as error:
                if turn:
                    wait_s = self._servers.pause_s(turn)
                    if wait_s >= deadline - self._servers.clock():
                        raise
                    await self._servers.sleep(wait_s)
                await self._restore(error, deadline)
        raise AssertionError("the loop has no end: this is a bug")

    async def _restore(self, error: WaneError, deadline: float) -> None:
        """Brings a server that has lost the session, or its last tokens, to the client's position, from the tokens
        that the client remembers. Raises `error` if that is impossible. If the session changes meanwhile, it returns:
        the next attempt compares the positions again."""
        if isinstance(error, PositionConflict):
            lost = self.position - error.position
            if type(error) is not PositionConflict or not 0 < lost <= len(self._known):
                raise error
            with suppress(UnknownSession, PositionConflict):
                await self._append_again(self._known[-lost:], error.position, deadline)
                self.rebuilds += 1
        elif self.position and not self._known:
            raise error
        else:
            with suppress(SessionExists):  # a reply was lost, or another client has made it
                await self._make_again(deadline)
                self.rebuilds += 1

    async def _append_again(self, items: list[Any], position: int, deadline: float) -> None:
        """Appends items that the session lost at a position, in halves if the server refuses so many."""
        try:
            body = {**self._named(items, "tokens"), "expected_position": position}
            await self._post(Answer, f"{self._path}/tokens", body, deadline)
        except TooLarge:
            if len(items) < 2:
                raise
            half = len(items) // 2
            await self._append_again(items[:half], position, deadline)
            await self._append_again(items[half:], position + half, deadline)

    async def _replace(self, tokens: list[int], deadline: float) -> None:
        """Makes the session again from other tokens."""
        await self._delete(deadline)
        self._known, self.position, self._pending = tokens, len(tokens), []
        await self._make_again(deadline)

    async def _make_again(self, deadline: float) -> SessionView:
        """Creates the session from the tokens that are known, or from fewer of them if the server refuses so many."""
        items = self._known
        while True:
            history = {**self._named(items, "history"), "position": self.position} if items else {}
            try:
                return await self._create(history, deadline)
            except TooLarge:
                if len(items) < 2:
                    raise
                items = items[-(len(items) // 2) :]

    def _named(self, items: list[Any], name: str) -> dict[str, Any]:
        if not isinstance(items[0], str):
            return {name: items}
        return {"events": items} | ({"unknown": self._unknown} if self._unknown else {})

    async def _create(self, history: dict[str, Any], deadline: float) -> SessionView:
        body = {"session": self.name, "model": self._model, "mode": self._mode, **history}
        body = {name: value for name, value in body.items() if value is not None}
        return await self._post(SessionView, "/v1/sessions", body, deadline)

    async def _view(self, deadline: float) -> SessionView:
        return await self._servers.ask(SessionView, f"GET {self._path}", None, deadline)

    async def _delete(self, deadline: float) -> None:
        with suppress(NotFound):
            await self._servers.reply(f"DELETE {self._path}", None, deadline)

    async def _post(self, kind: builtins.type[T], path: str, body: object, deadline: float, **how: Any) -> T:
        return await self._servers.ask(kind, f"POST {path}", body, deadline, **how)

    async def _reads_events(self, deadline: float) -> bool:
        assert self._model is not None, "an open session has a model: this is a bug"
        if self._model not in self._kinds:
            models = await self._servers.ask(tuple[Model, ...], "GET /v1/models", None, deadline, member="data")
            self._kinds.update({one.id: one.vocabulary.kind for one in models})
        return self._kinds.get(self._model) == "events"

    async def _tokens(self, text: str, deadline: float) -> list[int]:
        body = {"prompt": text, "model": self._model}
        return list(await self._post(tuple[int, ...], "/tokenize", body, deadline, member="tokens"))
