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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from secrets import token_urlsafe
from typing import TypeVar, cast
from urllib.parse import quote
from zlib import crc32

import msgspec
from msgspec import Raw, Struct
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service.api import encode
from wane.service.api.body import ENCODING, LARGE_BYTES, Decoder, excess, reader, uncompressed
from wane.service.api.cost import admit_body
from wane.service.api.exchange import (
    HISTORY,
    PART,
    TIMEOUT_HEADER_BYTES,
    HttpExchange,
    RequestContext,
    RequestPolicy,
)
from wane.service.api.schemas.sessions import StepsBody
from wane.service.app import Application
from wane.service.auth.guard import FREE
from wane.service.errors import BodyTimeout, DeadlineExceeded, Unavailable, WaneError
from wane.service.net.connection import CONNECTION, Connection
from wane.service.sessions.sessions import ID_BYTES
from wane.service.settings import IN_MEMORY
from wane.service.workers import totals
from wane.service.workers.links import EndedEarly, Peers, RunStep, connection_of
from wane.service.workers.steps import PassedSteps, Step
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


T = TypeVar("T")


def worker_of(session: str, workers: int) -> int:
    """Returns the number of the worker that has the session with this id."""
    return crc32(session.encode()) % workers


NULL = Raw(b"null")


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


def _read(kind: type[T], body: bytes) -> T:
    """Decodes a body. If a member is given several times, its last value counts, as in the API. Raises ValueError."""
    try:
        decoded: T = reader(cast(Hashable, kind)).decode(body)
        return decoded
    except msgspec.ValidationError:
        return msgspec.convert(from_json(body), kind)


class Placement:
    """The ASGI application of a worker. Passes requests of other workers' sessions on."""

    def __init__(
        self, app: Application, make_peers: Callable[[ASGIApp, RunStep], Peers], me: int, workers: int
    ) -> None:
        self._app = app
        self._peers = make_peers(app, partial(Step, app))
        self._passed_steps = PassedSteps(app, self._peers, app.state.policy)
        self._me = me
        self._workers = workers
        self._most_bytes = app.settings.max_body_bytes
        self._most_steps = app.settings.max_batch_inputs
        self._policy: RequestPolicy = app.state.policy
        self._divides_sessions = app.settings.store == IN_MEMORY
        self._steps = msgspec.json.Decoder(_Steps).decode

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
        match = None if posts and path == MANY else OF_SESSION(path)
        if match is not None and posts and path.endswith("/fork"):
            await self._fork(self.worker_of(match[1]), scope, receive, send)
        elif match is not None:
            worker = self.worker_of(match[1])
            if worker == self._me:
                await self._app(scope, receive, send)
            elif posts and self._passed_steps.takes(scope, worker):
                await self._passed_steps(scope, receive, send)
            else:
                await self._pass_on(worker, scope, receive, send, connection_of(scope).content)
        elif posts and (path == MANY or path in WITH_SESSION or OF_SEQUENCE(path) is not None):
            await self._by_body(scope, receive, send)
        elif scope["type"] == "http" and (join := totals.join_of(scope["method"], path)) is not None:
            await self._of_all(join, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refuses(self, scope: Scope) -> bool:
        """Returns whether the request has no valid API key."""
        guard = self._policy.guard
        try:
            if guard is not None:
                guard.identify(scope, dict(reversed(scope["headers"])))
        except WaneError:
            return True
        return False

    async def _fail(self, error: WaneError, scope: Scope, send: Send) -> None:
        """Answers a request with an error."""
        exchange = HttpExchange(self._policy, scope, send)
        try:
            await exchange.reply(exchange.failed(error))
        finally:
            exchange.finish()

    async def _pass_on(
        self,
        worker: int,
        scope: Scope,
        receive: Receive,
        send: Send,
        content: bytes | None,
        marks: Mapping[str, object] | None = None,
    ) -> None:
        """Passes a request on. Answers it with an error if its worker does not."""
        try:
            await self._peers.pass_on(worker, scope, receive, send, content, marks or {})
        except WaneError as error:
            if scope["type"] == "http":
                await self._fail(error, scope, send)
                return
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": RESTART, "reason": error.code})
        except EndedEarly:
            if scope["type"] == "http":
                raise
            await send({"type": "websocket.close", "code": RESTART, "reason": Unavailable.code})

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose body names sessions. This worker answers an invalid body."""
        try:
            content, receive = await self._read(scope, receive)
        except WaneError as error:
            await self._fail(error, scope, send)
            return
        body = None if content is None else await self._plain(scope, content)
        if content is None or body is None:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path == MANY:
            checked = await self._checked(body)
            parts = None if checked is None else self._cut(checked)
            if checked is None or parts is None:
                await self._app(scope, receive, send)
            elif len(parts) == 1:
                await self._answer(next(iter(parts)), scope, receive, send, content)
            else:
                await self._join(checked, body, parts, scope, send)
            return
        if path == CREATE and (named := await self._with_id(body, self._me)) is not None:
            scope, receive, content = renewed(scope, named)
        names = await self._names(path, scope, body)
        worker = self._worker_of_names(path, names)
        marks = {} if names is None else await self._forked(worker, path, names, scope)
        await self._answer(worker, scope, receive, send, content, marks)

    async def _forked(self, worker: int, path: str, named: _Named, scope: Scope) -> dict[str, object]:
        """If an inference starts a sequence of `worker` from another worker's sequence, returns the mark with that
        sequence's history."""
        match, asked = OF_SEQUENCE(path), named.parameters
        if match is None or asked is None or not asked.fork_of or not asked.sequence_id or not self._divides_sessions:
            return {}
        source = f"{match[1]}:{asked.fork_of}"
        if self.worker_of(source) == worker:
            return {}
        connection, path = connection_of(scope), f"{CREATE}/{source}/fork"
        body = {"session": f"{match[1]}:{asked.sequence_id}", "position": asked.expected_position}
        part = Part(connection, msgspec.json.encode(body))
        forks = {**scope, "path": path, "raw_path": quote(path).encode()}
        with together(connection, [part]):
            answer = await self._ask(self.worker_of(source), forks, part, {HISTORY: True, PART: True, FREE: True})
        return {HISTORY: (answer.status, answer.body)}

    async def _checked(self, body: bytes) -> StepsBody | None:
        """Returns a call with steps of many sessions as the API reads it, or None if it is invalid."""
        decoder: Decoder = self._app.state.decoder
        try:
            return await decoder.decode(body, StepsBody)
        except WaneError:
            return None

    async def _decoded(self, kind: type[T], body: bytes) -> T | None:
        """Returns a decoded body, or None if it is invalid. Decodes a large one on the decoder's thread."""
        decoder: Decoder = self._app.state.decoder

        def large() -> T | None:
            return None if excess(body, decoder.most) is not None else _read(kind, body)

        try:
            return _read(kind, body) if len(body) <= LARGE_BYTES else await decoder.run(large)
        except (ValueError, WaneError, RecursionError):
            return None

    async def _answer(
        self,
        worker: int,
        scope: Scope,
        receive: Receive,
        send: Send,
        content: bytes,
        marks: Mapping[str, object] | None = None,
    ) -> None:
        if worker == self._me:
            await self._app({**scope, **marks} if marks else scope, receive, send)
        else:
            await self._pass_on(worker, scope, receive, send, content, marks)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[bytes | None, Receive]:
        """Reads a body. Returns it, or None if it is too long or the client has left, and a function that receives it
        once more. Raises BodyTimeout, DeadlineExceeded, and InvalidRequest for an invalid timeout."""
        content = connection_of(scope).content
        if content is not None:
            return content, receive
        here, policy = RequestContext.of(scope), self._policy
        asks = TIMEOUT_HEADER_BYTES in here.headers
        timeout_s = policy.timeout_s(here) if asks else policy.request_timeout_ms / 1000
        events: list[Message] = []
        size, is_whole = 0, False
        try:
            async with asyncio.timeout(min(timeout_s, policy.body_timeout_s)):
                while not is_whole and size <= self._most_bytes:
                    event = await receive()
                    events.append(event)
                    if event["type"] != "http.request":
                        break
                    size += len(event.get("body", b""))
                    is_whole = not event.get("more_body")
        except TimeoutError:
            if timeout_s <= policy.body_timeout_s:
                raise DeadlineExceeded("the deadline passed before the whole body was received") from None
            raise BodyTimeout(f"the body was not complete after {policy.body_timeout_s:g} s") from None
        events.reverse()

        async def again() -> Message:
            return events.pop() if events else await receive()

        is_short = is_whole and size <= self._most_bytes
        return b"".join([event.get("body", b"") for event in reversed(events)]) if is_short else None, again

    async def _plain(self, scope: Scope, content: bytes) -> bytes | None:
        """Returns a body without its content encoding and its byte-order mark, or None if its encoding is invalid."""
        if any(name == ENCODING.encode() for name, _ in scope["headers"]):
            here = RequestContext.of(scope)
            here.deadline = asyncio.get_running_loop().time() + self._policy.request_timeout_ms / 1000
            try:
                content = await uncompressed(Request({**scope, "app": self._app, "wane.context": here}), content)
            except WaneError:
                return None
        return content.removeprefix(BOM_UTF8)

    async def _names(self, path: str, scope: Scope, body: bytes) -> _Named | None:
        """Returns the parts of a body that name a session, or None if the body is invalid."""
        if OF_SEQUENCE(path) is not None:
            length = next((value for name, value in scope["headers"] if name == HEADER_LENGTH), b"")
            body = body[: int(length)] if length.isdigit() else body
        return await self._decoded(_Named, body)

    def _worker_of_names(self, path: str, named: _Named | None) -> int:
        """Returns the worker of the session that a body names, or this worker."""
        match = OF_SEQUENCE(path)
        if named is None:  # this worker answers with the error
            return self._me
        if match is None:
            return self._me if named.session is None else self.worker_of(named.session)
        sequence = None if named.parameters is None else named.parameters.sequence_id
        return self.worker_of(f"{match[1]}:{sequence}") if sequence else self._me

    async def _with_id(self, body: bytes, worker: int) -> bytes | None:
        """Returns the body of a request for a new session with a random id of a session of `worker`. Returns None if
        the body has an id, or is invalid."""
        fields = await self._decoded(dict[str, Raw], body or b"{}")
        if fields is None or fields.get("session", NULL) != NULL:
            return None
        while self.worker_of(session := token_urlsafe(ID_BYTES)) != worker:
            pass
        return msgspec.json.encode(fields | {"session": session})

    async def _fork(self, worker: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Forks a session of `worker`. The new session may be another worker's, which gets the session's history and
        its state."""
        try:
            content, receive = await self._read(scope, receive)
        except WaneError as error:
            await self._fail(error, scope, send)
            return
        body = None if content is None else await self._plain(scope, content)
        if content is None or body is None:
            await self._app(scope, receive, send)
            return
        if (named := await self._with_id(body, worker)) is not None:
            scope, receive, content = renewed(scope, named)
        other = self._worker_of_names(CREATE, await self._names(CREATE, scope, body))
        if named is not None or other == worker or not self._divides_sessions:
            await self._answer(worker, scope, receive, send, content)
            return
        connection = connection_of(scope)
        part = Part(connection, body)
        with together(connection, [part]):
            answer = await self._ask(worker, scope, part, {HISTORY: True})
        if answer.is_success:
            created = {**scope, "path": CREATE, "raw_path": CREATE.encode()}
            part = Part(connection, b"{}")
            with together(connection, [part]):
                answer = await self._ask(other, created, part, {PART: True, FREE: True, HISTORY: answer.body})
        await answer.send(send)

    # Calls with steps of many sessions

    def _cut(self, body: StepsBody) -> dict[int, list[int]] | None:
        """Returns the indexes of each worker's steps, or None if there are too many, or this worker has all steps."""
        if len(body.steps) > self._most_steps:
            return None
        parts: dict[int, list[int]] = {}
        for index, step in enumerate(body.steps):
            parts.setdefault(self.worker_of(step.session), []).append(index)
        return None if [*parts] == [self._me] else parts

    async def _join(
        self, checked: StepsBody, body: bytes, parts: dict[int, list[int]], scope: Scope, send: Send
    ) -> None:
        """Answers a call with steps of several workers' sessions. If all parts fail, answers with the first failure.
        `body` is the JSON of `checked`."""
        self._app.hot.matches(scope)
        exchange = HttpExchange(self._policy, scope, send)
        try:
            exchange.admit()
            scope["app"] = self._app
            admit_body(Request(scope), checked)
            steps = self._steps(body)
            asked = [
                Part(connection_of(scope), msgspec.json.encode(_Steps([steps.steps[at] for at in part], steps.format)))
                for part in parts.values()
            ]
            marks = {PART: True, FREE: True}
            with together(connection_of(scope), asked):
                answers = await asyncio.gather(
                    *[self._ask(worker, scope, part, marks) for worker, part in zip(parts, asked, strict=True)]
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
        except (Exception, asyncio.CancelledError) as error:
            if exchange.status is not None:
                raise
            await exchange.reply(exchange.failed(error))
        finally:
            exchange.finish()

    # Requests for the whole server

    async def _of_all(self, join: totals.Join, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for the whole server, unless this worker refuses it."""
        connection = connection_of(scope)
        try:
            content, receive = await self._read(scope, receive)
        except WaneError as error:
            await self._fail(error, scope, send)
            return
        if content is None:
            await self._app(scope, receive, send)
            return
        parts = [Part(connection, content) for _ in range(self._workers)]
        with together(connection, parts):
            answers = [await self._ask(self._me, scope, parts[self._me])]
            if answers[0].is_success:
                others = [worker for worker in range(self._workers) if worker != self._me]
                marks = {PART: True, FREE: True}
                answers += await asyncio.gather(*[self._ask(one, scope, parts[one], marks) for one in others])
                answers[0] = await asyncio.to_thread(join, answers)
        await answers[0].send(send)

    async def _ask(self, worker: int, scope: Scope, part: Part, marks: Mapping[str, object] | None = None) -> Answered:
        """Returns a worker's answer to a part of a request. `marks` are further parts of the scope."""
        marks = marks or {}
        status, headers, body = 0, list[tuple[bytes, bytes]](), list[bytes]()
        plain = [pair for pair in scope["headers"] if pair[0] not in OF_BODY]
        plain.append((b"content-length", b"%d" % len(part.content)))
        asked = {**scope, **marks, "headers": plain, "state": {CONNECTION: part}}

        async def send(event: Message) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                headers.extend((name, value) for name, value in event["headers"])
            else:
                body.append(event.get("body", b""))

        async def receive() -> Message:
            return {"type": "http.request", "body": part.content}

        try:
            if worker == self._me:
                await self._app(asked, receive, send)
            else:
                await self._peers.pass_on(worker, asked, receive, send, part.content, marks)
            if not status:
                raise Unavailable("the worker has ended")
        except (WaneError, RuntimeError) as error:
            response = self._policy.envelope({**scope, "wane.context": RequestContext.of(scope)}, error)
            return Answered(response.status_code, response.raw_headers, bytes(response.body))
        return Answered(status, headers, b"".join(body))


def renewed(scope: Scope, content: bytes) -> tuple[Scope, Receive, bytes]:
    """Returns a request with another body: its scope, its function `receive`, and the body."""
    headers = [pair for pair in scope["headers"] if pair[0] not in OF_BODY]
    part = Part(connection_of(scope), content)

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    length = b"content-length", b"%d" % len(content)
    return {**scope, "headers": [*headers, length], "state": {CONNECTION: part}}, receive, content


class Part:
    """The connection of a request that is a part of another one."""

    def __init__(self, connection: Connection, content: bytes) -> None:
        self.content = content
        self.loop = connection.loop
        self.hold = connection.hold
        self.on_lost: Callable[[], None] | None = None
        self._connection = connection

    @property
    def has_ended(self) -> bool:
        """Whether the client has left."""
        return self._connection.has_ended


@contextmanager
def together(connection: Connection, parts: Sequence[Part]) -> Iterator[None]:
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
