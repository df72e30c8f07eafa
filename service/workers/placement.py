"""Finds the worker that answers a request. A session belongs to the worker that the hash of its id selects, so every
worker finds the same one.

A request for a session, or a WebSocket, is passed to the session's worker as a whole. A call with steps of many
sessions is cut, and the answers are joined. A request for the whole server, such as its metrics, is answered by all
workers (`totals.py`). The worker that accepted any other request answers it.
"""

from __future__ import annotations

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from secrets import token_urlsafe
from typing import cast
from urllib.parse import quote
from zlib import crc32

import msgspec
from msgspec import Raw, Struct
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from wane.service.api import encode
from wane.service.api.body import LARGE_BYTES, Decoder, excess, read, reader, uncompressed
from wane.service.api.exchange import (
    HISTORY,
    NEW_ID,
    PART,
    TIMEOUT_HEADER_BYTES,
    HttpExchange,
    RequestContext,
    RequestPolicy,
    admit,
)
from wane.service.api.middleware import ENCODING_BYTES
from wane.service.api.schemas.sessions import StepsBody
from wane.service.app import Application
from wane.service.auth.guard import FREE
from wane.service.errors import Unavailable, WaneError
from wane.service.net.connection import CONNECTION, Connection
from wane.service.net.limits import SMALL_BYTES
from wane.service.sessions.sessions import ID_BYTES
from wane.service.settings import IN_MEMORY
from wane.service.workers import totals
from wane.service.workers.links import EndedEarly, Peers, connection_of
from wane.service.workers.steps import ANSWER, Exchanged, pass_step
from wane.service.workers.totals import Answered

OF_SESSION = re.compile(r"/v1/sessions/([^/]+)(?:/[a-z]+)?").fullmatch
OF_SEQUENCE = re.compile(r"/v2/models/([^/]+)(?:/versions/[^/]+)?/infer").fullmatch
CREATE, MANY = "/v1/sessions", "/v1/sessions/tokens"
WITH_SESSION = frozenset({CREATE, "/v1/predict", "/v1/generate", "/v1/completions"})
"""The paths whose bodies may name a session."""
HEADER_LENGTH = b"inference-header-content-length"
RESTART = 1012  # the code that closes a WebSocket whose worker has ended
OF_FAILURE = frozenset({b"content-type", b"content-length", b"retry-after", b"www-authenticate"})
OF_BODY = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})
NO_MARKS: Mapping[str, object] = {}
OF_PART: Mapping[str, object] = {PART: True, FREE: True}
"""The marks of a scope whose request another worker counts, logs and charges."""


def worker_of(session: str, workers: int) -> int:
    """Returns the number of the worker that has the session with this id."""
    return crc32(session.encode()) % workers


class _Parameters(Struct):
    sequence_id: str | int | None = None
    fork_of: str | int | None = None
    expected_position: int | None = None


class _Named(Struct):
    """The parts of a body that name a session."""

    session: str | None = None
    parameters: _Parameters | None = None


class _Steps(Struct):
    steps: list[Raw]
    format: Raw | msgspec.UnsetType = msgspec.UNSET


def _named(body: bytes) -> _Named:
    """Decodes a body. If a member is given several times, its last value counts, as in the API. Raises ValueError."""
    try:
        named: _Named = reader(_Named).decode(body)
        return named
    except msgspec.ValidationError:
        return msgspec.convert(from_json(body), _Named)


class Placement:
    """The ASGI application of a worker. Passes requests of other workers' sessions on."""

    def __init__(self, app: Application, peers: Peers, me: int, workers: int) -> None:
        self._app = app
        self._peers = peers
        self._exchanged = Exchanged(app, policy=app.state.policy)
        self._me = me
        self._workers = workers
        self._policy = policy = cast(RequestPolicy, app.state.policy)
        # the longest body of a step that is passed on without its request; a trace needs the whole request
        self._most_bytes = -1 if policy.tracing is not None else min(SMALL_BYTES, policy.max_body_bytes)
        self._divides_sessions = app.settings.store == IN_MEMORY

    def worker_of(self, session: str) -> int:
        """Returns the number of the worker that has the session with this id."""
        return worker_of(session, self._workers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            listening = await self._peers.listen()
            async with listening:
                await self._app(scope, receive, send)
            await self._peers.close()
            return
        if scope["type"] == "http" and connection_of(scope).content is None and self._refuses(scope):
            await self._app(scope, receive, send)  # answers with the error, without reading the body
            return
        path: str = scope["path"]
        posts = scope["type"] == "http" and scope["method"] == "POST"
        match = OF_SESSION(path)
        if match is not None and not (posts and (path == MANY or path.endswith("/fork"))):
            worker = self.worker_of(match[1])
            if worker == self._me:
                await self._app(scope, receive, send)
            elif posts and self._is_short_step(scope):
                scope[ANSWER] = partial(pass_step, scope, worker, self._peers)
                await self._exchanged(scope, receive, send)
            else:
                await self._pass_on(worker, scope, receive, send)
        elif posts and (match is not None or path in WITH_SESSION or OF_SEQUENCE(path) is not None):
            await self._with_body(scope, receive, send, self._by_body)
        elif scope["type"] == "http" and (join := totals.join_of(scope["method"], path)) is not None:
            await self._with_body(scope, receive, send, partial(self._of_all, join))
        else:
            await self._app(scope, receive, send)

    def _is_short_step(self, scope: Scope) -> bool:
        """Returns whether a request for a session is a step with a short body. If so, the scope gets its route."""
        content = connection_of(scope).content
        if content is None or len(content) > self._most_bytes or not scope["path"].endswith("/tokens"):
            return False
        return self._app.hot.matches(scope) and all(name != ENCODING_BYTES for name, _ in scope["headers"])

    def _refuses(self, scope: Scope) -> bool:
        """Returns whether the request has no valid API key."""
        guard = self._policy.guard
        try:
            if guard is not None:
                guard.identify(scope, dict(reversed(scope["headers"])))
        except WaneError:
            return True
        return False

    async def _fail(self, error: WaneError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request with an error, unless its key is refused."""

        async def fail(_: HttpExchange) -> None:
            raise error

        await self._exchanged({**scope, ANSWER: fail}, receive, send)

    async def _pass_on(
        self, worker: int, scope: Scope, receive: Receive, send: Send, marks: Mapping[str, object] = NO_MARKS
    ) -> None:
        """Passes a request on. Answers it with an error if its worker does not."""
        try:
            await self._peers.pass_on(worker, scope, receive, send, marks)
        except WaneError as error:
            if scope["type"] == "http":
                await self._fail(error, scope, receive, send)
                return
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": RESTART, "reason": error.code})
        except EndedEarly:
            if scope["type"] == "http":
                raise
            await send({"type": "websocket.close", "code": RESTART, "reason": Unavailable.code})

    async def _with_body(
        self, scope: Scope, receive: Receive, send: Send, answer: Callable[[Scope, Part, Send], Awaitable[None]]
    ) -> None:
        """Reads a request's body, and calls `answer` with it, without its content encoding."""
        connection = connection_of(scope)
        try:
            part = Part(connection, await self._read(scope, receive), receive)
        except WaneError as error:
            await self._fail(error, scope, receive, send)
            return
        with together(connection, [part]):
            await answer(part.scope(scope), part, send)

    async def _by_body(self, scope: Scope, part: Part, send: Send) -> None:
        """Answers a request whose body names sessions. This worker answers an invalid body."""
        body, path = part.content.removeprefix(BOM_UTF8), scope["path"]
        if path == MANY:
            checked = await self._checked(body)
            parts = None if checked is None else self._cut(checked)
            if checked is None or parts is None:
                await self._app(scope, part.receive, send)
            elif len(parts) == 1:
                await self._answer(next(iter(parts)), scope, part, send)
            else:
                self._app.hot.matches(scope)
                scope[ANSWER] = partial(self._join, checked, part, parts, scope)
                await self._exchanged(scope, part.receive, send)
            return
        named = await self._names(scope, body)
        if (fork := OF_SESSION(path)) is not None:
            await self._fork(self.worker_of(fork[1]), named, scope, part, send)
            return
        worker, marks = self._worker_of_names(path, named), dict[str, object]()
        if named is not None and path == CREATE and named.session is None:
            marks = self._new_id(worker)
        elif named is not None:
            marks = await self._forked(worker, named, scope, part)
        await self._answer(worker, scope, part, send, marks)

    async def _forked(self, worker: int, named: _Named, scope: Scope, part: Part) -> dict[str, object]:
        """If an inference starts a sequence of `worker` from another worker's sequence, returns the mark with that
        sequence's history."""
        match, asked = OF_SEQUENCE(scope["path"]), named.parameters
        if match is None or asked is None or not asked.fork_of or not asked.sequence_id or not self._divides_sessions:
            return {}
        source = f"{match[1]}:{asked.fork_of}"
        if self.worker_of(source) == worker:
            return {}
        path = f"{CREATE}/{source}/fork"
        body = {"session": f"{match[1]}:{asked.sequence_id}", "position": asked.expected_position}
        fork = Part(part, msgspec.json.encode(body), part.rest)
        forks = {**scope, "path": path, "raw_path": quote(path).encode()}
        with together(part, [fork]):
            answer = await self._ask(self.worker_of(source), forks, fork, {HISTORY: True, **OF_PART})
        return {HISTORY: (answer.status, answer.body)}

    async def _checked(self, body: bytes) -> StepsBody | None:
        """Returns a call with steps of many sessions as the API reads it, or None if it is invalid."""
        decoder: Decoder = self._app.state.decoder
        try:
            return await decoder.decode(body, StepsBody)
        except WaneError:
            return None

    async def _answer(
        self, worker: int, scope: Scope, part: Part, send: Send, marks: Mapping[str, object] = NO_MARKS
    ) -> None:
        if worker == self._me:
            await self._app({**scope, **marks}, part.receive, send)
        else:
            await self._pass_on(worker, scope, part.receive, send, marks)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Returns a body without its content encoding. Raises the errors of `read`, and InvalidRequest for an invalid
        timeout."""
        content = connection_of(scope).content
        context, policy = RequestContext.of(scope), self._policy
        if content is not None and ENCODING_BYTES not in context.headers:
            return content
        asks = TIMEOUT_HEADER_BYTES in context.headers
        context.timeout_s = policy.timeout_s(context) if asks else policy.request_timeout_ms / 1000
        context.body_timeout_s = policy.body_timeout_s
        context.deadline = asyncio.get_running_loop().time() + context.timeout_s
        inside = {**scope, "app": self._app, "wane.context": context}
        if content is not None:
            return await uncompressed(Request(inside), content)
        return await read(Request(inside, self._exchanged.bounded(context, receive)))

    async def _names(self, scope: Scope, body: bytes) -> _Named | None:
        """Returns the parts of a body that name a session, or None if the body is invalid. Decodes a large one on the
        decoder's thread."""
        if OF_SEQUENCE(scope["path"]) is not None:
            length = next((value for name, value in scope["headers"] if name == HEADER_LENGTH), b"")
            body = body[: int(length)] if length.isdigit() else body
        decoder: Decoder = self._app.state.decoder

        def large() -> _Named | None:
            return None if excess(body, decoder.most) is not None else _named(body)

        try:
            return _named(body or b"{}") if len(body) <= LARGE_BYTES else await decoder.run(large)
        except (ValueError, WaneError, RecursionError):
            return None

    def _worker_of_names(self, path: str, named: _Named | None) -> int:
        """Returns the worker of the session that a body names, or this worker."""
        match = OF_SEQUENCE(path)
        if named is None:  # this worker answers with the error
            return self._me
        if match is None:
            return self._me if named.session is None else self.worker_of(named.session)
        sequence = None if named.parameters is None else named.parameters.sequence_id
        return self.worker_of(f"{match[1]}:{sequence}") if sequence else self._me

    def _new_id(self, worker: int) -> dict[str, object]:
        """Returns the mark with a random id of a session of `worker`."""
        while self.worker_of(session := token_urlsafe(ID_BYTES)) != worker:
            pass
        return {NEW_ID: session}

    async def _fork(self, worker: int, named: _Named | None, scope: Scope, part: Part, send: Send) -> None:
        """Forks a session of `worker`. The new session may be another worker's, which gets the session's history and
        its state."""
        other = worker if named is None or named.session is None else self.worker_of(named.session)
        if other == worker or not self._divides_sessions:
            await self._answer(worker, scope, part, send, self._new_id(worker))
            return
        answer = await self._ask(worker, scope, part, {HISTORY: True})
        if answer.is_success:
            created = {**scope, "path": CREATE, "raw_path": CREATE.encode()}
            of_history = Part(part, b"{}", part.rest)
            with together(part, [of_history]):
                answer = await self._ask(other, created, of_history, {HISTORY: answer.body, **OF_PART})
        await answer.send(send)

    # Calls with steps of many sessions

    def _cut(self, body: StepsBody) -> dict[int, list[int]] | None:
        """Returns the indexes of each worker's steps, or None if there are too many, or this worker has all steps."""
        if len(body.steps) > self._app.settings.max_batch_inputs:
            return None
        parts: dict[int, list[int]] = {}
        for index, step in enumerate(body.steps):
            parts.setdefault(self.worker_of(step.session), []).append(index)
        return None if [*parts] == [self._me] else parts

    async def _join(
        self, checked: StepsBody, whole: Part, parts: dict[int, list[int]], scope: Scope, exchange: HttpExchange
    ) -> None:
        """Answers a call with steps of several workers' sessions. If all parts fail, answers with the first failure.
        `whole` has the JSON of `checked`."""
        scope["app"] = self._app
        admit(Request(scope), checked.cost(self._app.state.settings))
        steps: _Steps = reader(_Steps).decode(whole.content.removeprefix(BOM_UTF8))
        bodies = [_Steps([steps.steps[at] for at in part], steps.format) for part in parts.values()]
        asked = [Part(whole, msgspec.json.encode(body), whole.rest) for body in bodies]
        with together(whole, asked):
            answers = await asyncio.gather(
                *[self._ask(worker, scope, part, OF_PART) for worker, part in zip(parts, asked, strict=True)]
            )
        if any(answer.is_success for answer in answers):
            document = totals.joined_steps(len(steps.steps), [*zip(parts.values(), answers, strict=True)])
            if "session" in document:  # a part that failed has none
                document["session"] = [step.session for step in checked.steps]
            await exchange.reply(encode.reply(document))
        else:
            failure = encode.Reply(answers[0].body, answers[0].status)
            failure.raw_headers = [pair for pair in answers[0].headers if pair[0] in OF_FAILURE]
            await exchange.reply(failure)

    # Requests for the whole server

    async def _of_all(self, join: totals.Join, scope: Scope, part: Part, send: Send) -> None:
        """Answers a request for the whole server, unless this worker refuses it."""
        parts = [Part(part, part.content, part.rest) for _ in range(self._workers)]
        with together(part, parts):
            answers = [await self._ask(self._me, scope, parts[self._me])]
            if answers[0].is_success:
                others = [worker for worker in range(self._workers) if worker != self._me]
                answers += await asyncio.gather(*[self._ask(other, scope, parts[other], OF_PART) for other in others])
                answers[0] = await asyncio.to_thread(join, answers)
        await answers[0].send(send)

    async def _ask(self, worker: int, scope: Scope, part: Part, marks: Mapping[str, object] = NO_MARKS) -> Answered:
        """Returns a worker's answer to a part of a request. `marks` are further parts of the scope."""
        status, headers, body = 0, list[tuple[bytes, bytes]](), list[bytes]()
        asked = {**part.scope(scope), **marks}

        async def send(event: Message) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                headers.extend((name, value) for name, value in event["headers"])
            else:
                body.append(event.get("body", b""))

        try:
            if worker == self._me:
                await self._app(asked, part.receive, send)
            else:
                await self._peers.pass_on(worker, asked, part.receive, send, marks)
            if not status:
                raise Unavailable("the worker has ended")
        except (WaneError, RuntimeError) as error:
            response = self._policy.envelope({**scope, "wane.context": RequestContext.of(scope)}, error)
            return Answered(response.status_code, response.raw_headers, bytes(response.body))
        return Answered(status, headers, b"".join(body))


class Part:
    """The connection of a request with another body than its client's, which may be one part of the client's request.
    `connection` is the client's, or another part's. `rest` receives the events after the body: the client leaves."""

    def __init__(self, connection: Connection | Part, content: bytes, rest: Receive) -> None:
        self.content = content
        self.rest = rest
        self._is_read = False
        self.loop: asyncio.AbstractEventLoop = connection.loop
        self.hold: Callable[[int], bool] = connection.hold
        self.on_lost: Callable[[], None] | None = None
        self._connection = connection

    def scope(self, scope: Scope) -> Scope:
        """Returns the scope of the request with this body."""
        headers = [pair for pair in scope["headers"] if pair[0] not in OF_BODY]
        headers.append((b"content-length", b"%d" % len(self.content)))
        return {**scope, "headers": headers, "state": {CONNECTION: self}}

    async def receive(self) -> Message:
        """ASGI's function `receive`."""
        if self._is_read:
            return await self.rest()
        self._is_read = True
        return {"type": "http.request", "body": self.content}

    @property
    def has_ended(self) -> bool:
        """Whether the client has left."""
        return self._connection.has_ended


@contextmanager
def together(connection: Connection | Part, parts: Sequence[Part]) -> Iterator[None]:
    """Tells all parts of a request if the client leaves."""

    def leave() -> None:
        for part in parts:
            if part.on_lost is not None:
                part.on_lost()

    connection.on_lost = leave
    try:
        yield
    finally:
        connection.on_lost = None
