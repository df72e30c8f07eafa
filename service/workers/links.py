"""Passes requests between the workers of one server, over Unix sockets.

A worker that accepts a request for another worker's session passes the request on, as the events of ASGI, and passes
the answer's events back to its client. All frames of one iteration of the event loop are written together, so the steps
that arrive together cost one system call.

    length  number  kind   payload
    uint32  uint64  uint8  MessagePack

Numbers are little-endian. `length` is the payload's number of bytes. `number` names the request on its link. The worker
that passes a request on connects the link, and begins a whole request with BEGIN and a step with STEP (`steps.py`).
Then both sides of a whole request send EVENT, and TAKEN for the events that they have taken. END is the last frame of
either side: the outcome, or, from the worker that passes the request on, that the client has left.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service import errors
from wane.service.errors import DeadlineExceeded, Overloaded, Unavailable, WaneError
from wane.service.net.connection import CONNECTION, Connection
from wane.service.net.limits import Limits, ReceiveShare
from wane.service.observability.logs import SERVICE

HEAD = struct.Struct("<IQB")
BEGIN, STEP, EVENT, TAKEN, END = range(5)
LOST = (
    "the worker of this session has ended; it may have made the step before: repeat the request with the same "
    "expected_position or idempotency key"
)
STARTS_AGAIN = "the worker of this session is starting again"
LATE = "the worker of this session did not answer in time"
WINDOW_BYTES = 1 << 18
"""The largest number of bytes of a request's or an answer's events that the other side has not taken yet. An event that
crosses this limit is sent, and the next one waits."""
EVENT_BYTES = 512  # what an event counts beside its content
PASSED_ON = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers"),
    *("client", "server", "subprotocols"),
)
"""The parts of a request's scope that the other worker gets."""
encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


def size_of(event: Message) -> int:
    """Returns the number of bytes, or of characters, of an event's content."""
    return len(event.get("body") or event.get("text") or event.get("bytes") or b"")


def connection_of(scope: Scope) -> Connection:
    """Returns the connection of a request that this worker has accepted."""
    connection: Connection = scope["state"][CONNECTION]
    return connection


def told(error: BaseException) -> tuple[str, dict[str, Any]]:
    """Returns what another worker is told about an error, for `error_of`."""
    if not isinstance(error, WaneError):
        return type(error).__name__, {}
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)), vars(error)


def error_of(name: str, members: dict[str, Any]) -> Exception:
    """Returns the error with which a request failed in another worker. `members` are the error's attributes."""
    kind = getattr(errors, name, None)
    if kind is None:
        return RuntimeError(f"the other worker failed: {name}")
    error: WaneError = kind.__new__(kind, members["message"])
    error.__dict__.update(members)
    return error


class Side(Protocol):
    """One side of a request on a link."""

    def end(self, error: Exception | None, result: Any = None) -> None:
        """The other side has ended the request, with the error or the result."""


class Outcome(asyncio.Future[Any]):
    """The outcome of a step that this worker has passed on."""

    def end(self, error: Exception | None, result: Any = None) -> None:
        """See `Side`."""
        if self.done():
            return
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)


class Link(asyncio.Protocol):
    """A connection between two workers. `accept` starts a request that the other worker passes on: it gets the link,
    the request's number, the kind of its first frame and the payload. Only the accepted end of a link has it."""

    def __init__(self, accept: Callable[[Link, int, int, Any], Side] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._accept = accept
        self._received = bytearray()
        self._frames: list[bytes] = []
        self._requests: dict[int, Side] = {}
        self._numbers = count()
        self.is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def open(self, side: Side) -> int:
        """Returns the number of a new request to the other worker. Raises Unavailable."""
        if self.is_lost:
            raise Unavailable(STARTS_AGAIN)
        number = next(self._numbers)
        self._requests[number] = side
        return number

    def send(self, number: int, kind: int, payload: object) -> None:
        """Sends a frame at the end of this iteration of the event loop."""
        if self.is_lost:
            return
        if not self._frames:
            self._loop.call_soon(self._flush)
        data = encode(payload)
        self._frames += (HEAD.pack(len(data), number, kind), data)

    def end(self, number: int, error: BaseException | None = None, result: object = None) -> None:
        """Ends a request on this side, unless the other side has ended it."""
        if self._requests.pop(number, None) is not None:
            self.send(number, END, (None if error is None else told(error), result))

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        self.transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        received, start = self._received, 0
        received += data
        while len(received) - start >= HEAD.size:
            length, number, kind = HEAD.unpack_from(received, start)
            end = start + HEAD.size + length
            if len(received) < end:
                break
            self._frame(number, kind, decode(received[start + HEAD.size : end]))
            start = end
        del received[:start]

    def _frame(self, number: int, kind: int, payload: Any) -> None:
        if self._accept is not None and kind in (BEGIN, STEP):
            self._requests[number] = self._accept(self, number, kind, payload)
        elif kind == END:
            side = self._requests.pop(number, None)
            if side is not None:
                error, result = payload
                side.end(None if error is None else error_of(*error), result)
        elif isinstance(stream := self._requests.get(number), Stream):
            if kind == EVENT:
                stream.put(payload)
            else:
                stream.taken(payload)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_lost = True
        requests, self._requests = self._requests, {}
        for side in requests.values():
            side.end(Unavailable(LOST))


class Stream:
    """One side of a whole request: the events of the other side, and a limit of those that it has not taken."""

    def __init__(self, link: Link, number: int | None = None) -> None:
        """`number` is the request's number on the link; None: a new one."""
        self.has_ended = False
        self._link = link
        self.number = link.open(self) if number is None else number
        self._events: asyncio.Queue[Message | Exception | None] = asyncio.Queue()
        self._left = WINDOW_BYTES
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._taken = 0

    def put(self, events: list[Message]) -> None:
        """The other side has sent events."""
        for event in events:
            self._events.put_nowait(event)

    def taken(self, amount: int) -> None:
        """The other side has taken events with so many bytes."""
        self._left += amount
        if self._left > 0:
            self._has_room.set()

    def end(self, error: Exception | None, result: Any = None) -> None:  # noqa: ARG002
        """See `Side`. `take` returns the remaining events first."""
        self.has_ended = True
        self._has_room.set()
        self._events.put_nowait(error)

    def leave(self) -> None:
        """Ends the request, unless it has ended."""
        self._link.end(self.number)
        if not self.has_ended:
            self.end(None)

    async def emit(self, *events: Message) -> None:
        """Sends events when the other side has taken enough of the earlier ones."""
        await self._has_room.wait()
        if self.has_ended:
            return
        self._link.send(self.number, EVENT, events)
        self._left -= sum(EVENT_BYTES + size_of(event) for event in events)
        if self._left <= 0:
            self._has_room.clear()

    async def take(self) -> Message | None:
        """Returns the next event, or None after the last one. Raises the error with which the request has ended."""
        event = await self._events.get()
        if event is None or isinstance(event, Exception):
            self._events.put_nowait(event)  # for the next call
            if event is not None:
                raise event
            return None
        self._taken += EVENT_BYTES + size_of(event)
        if self._taken >= WINDOW_BYTES // 4:
            self._link.send(self.number, TAKEN, self._taken)
            self._taken = 0
        return event


class IncomingRequest(Stream):
    """A request that another worker has passed to this one. Takes the place of the request's `Connection`. `content` is
    the whole body. If it is None, the request's events come one by one."""

    def __init__(self, link: Link, number: int, content: bytes | None, limits: Limits) -> None:
        super().__init__(link, number)
        self.loop = asyncio.get_running_loop()
        self.content = content
        self.is_websocket = False
        self.on_lost: Callable[[], None] | None = None
        self._share = ReceiveShare(limits)
        self._held = 0
        self._start: Message | None = None  # the start of the answer, which is sent together with the next event
        if content is not None:
            self.put([{"type": "http.request", "body": content}])

    def hold(self, more: int) -> bool:
        """See `Connection.hold`."""
        if not self._share.resize(self._held + more):
            return False
        self._held += more
        return True

    def end(self, error: Exception | None, result: Any = None) -> None:  # noqa: ARG002
        """The client has left, or the other worker has ended."""
        super().end(None)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def _hold(self, count: int) -> None:
        """Counts bytes of the body. Raises Overloaded."""
        if not self.hold(count):
            raise Overloaded("the server is receiving too much data: try again later")

    async def receive(self) -> Message:
        """ASGI's function `receive`. Raises Overloaded if the receive budget has no room for a part of the body."""
        event = await self.take()
        if event is None:
            return {"type": "websocket.disconnect", "code": 1006} if self.is_websocket else {"type": "http.disconnect"}
        if self.content is None and not self.is_websocket:
            self._hold(size_of(event))
        return event

    async def send(self, event: Message) -> None:
        """ASGI's function `send`."""
        if event["type"] == "http.response.start":
            self._start = event
            return
        start, self._start = self._start, None
        await (self.emit(event) if start is None else self.emit(start, event))

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Answers the request."""
        self.is_websocket = scope["type"] == "websocket"
        scope["headers"] = [(name, value) for name, value in scope["headers"]]
        scope |= {"asgi": {"version": "3.0"}, "state": {CONNECTION: self}, "extensions": {}}
        failure: Exception | None = None
        try:
            self._hold(len(self.content or b""))
            await app(scope, self.receive, self.send)
        except Exception as error:
            if not isinstance(error, Overloaded):
                SERVICE.exception("a request that another worker has passed on failed")
            failure = error
        finally:
            self._share.resize(0)
            self._link.end(self.number, failure)


RunStep = Callable[[Callable[[BaseException | None, object], None], Any], Side]
"""Starts a plain step. The first argument is called with its outcome, and the second one is what was asked."""


class EndedEarly(RuntimeError):
    """The worker that answers a request ended after the answer had begun."""


class Peers:
    """The other workers of this server. `paths[i]` is the Unix socket of worker i, and `me` this worker's number."""

    def __init__(
        self, paths: list[str], me: int, limits: Limits, timeout_s: float, app: ASGIApp, run_step: RunStep
    ) -> None:
        """`app` answers the requests that other workers pass on, and `run_step` their plain steps. A request whose
        answer does not begin within `timeout_s` fails."""
        self._app = app
        self._run_step = run_step
        self._paths = paths
        self._me = me
        self._limits = limits
        self._timeout_s = timeout_s
        self._links: dict[int, Link] = {}
        self._connecting: dict[int, asyncio.Task[Link]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def listen(self) -> asyncio.Server:
        """Accepts links from the other workers."""
        return await asyncio.get_running_loop().create_unix_server(partial(Link, self._accept), self._paths[self._me])

    def _accept(self, link: Link, number: int, kind: int, payload: Any) -> Side:
        """Starts a request that another worker passes on."""
        if kind == STEP:
            return self._run_step(partial(link.end, number), payload)
        scope, content = payload
        request = IncomingRequest(link, number, content, self._limits)
        task = asyncio.create_task(request.run(self._app, scope))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return request

    async def _link(self, worker: int) -> Link:
        """Returns the link to a worker. Connects it if necessary. Raises Unavailable."""
        link = self._links.get(worker)
        if link is not None and not link.is_lost:
            return link
        if worker not in self._connecting:
            self._connecting[worker] = asyncio.create_task(self._connect(worker))
        try:
            return await asyncio.shield(self._connecting[worker])
        except OSError as error:
            raise Unavailable(STARTS_AGAIN) from error

    async def _connect(self, worker: int) -> Link:
        try:
            _, link = await asyncio.get_running_loop().create_unix_connection(Link, self._paths[worker])
            self._links[worker] = link
            return link
        finally:
            del self._connecting[worker]

    async def step(self, worker: int, asked: object) -> Any:
        """Passes a plain step on, and returns its result (see `steps.py`). Raises Unavailable, DeadlineExceeded and the
        step's errors."""
        link = await self._link(worker)
        outcome = Outcome()
        number = link.open(outcome)
        link.send(number, STEP, asked)
        timer = outcome.get_loop().call_later(self._timeout_s, _late, outcome)
        try:
            return await outcome
        finally:
            timer.cancel()
            link.end(number)

    async def pass_on(
        self, worker: int, scope: Scope, receive: Receive, send: Send, marks: Mapping[str, object]
    ) -> None:
        """Passes a request to another worker, and its answer to the client. The request's body is the `content` of its
        connection, or, if that is None, is read with `receive`. `marks` are further parts of the scope that the other
        worker gets.

        Raises Unavailable, DeadlineExceeded and the other worker's failure, before any part of the answer is sent, and
        EndedEarly after that."""
        link = await self._link(worker)
        connection, request = connection_of(scope), Stream(link)
        parts = {name: scope[name] for name in PASSED_ON if name in scope} | dict(marks)
        link.send(request.number, BEGIN, (parts, connection.content))
        connection.on_lost = request.leave
        if connection.has_ended:
            request.leave()
        timer, pump, has_begun = None, None, False
        if connection.content is None:
            pump = asyncio.create_task(_pump(receive, request))
        else:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, _late, request)
        try:
            while (event := await request.take()) is not None:
                if timer is not None:
                    timer.cancel()
                has_begun = True
                await send(event)
        except WaneError as error:
            if has_begun:
                raise EndedEarly("the worker of this session ended before the whole answer was sent") from error
            raise
        finally:
            connection.on_lost = None
            if timer is not None:
                timer.cancel()
            if pump is not None:
                pump.cancel()
            request.leave()

    async def close(self) -> None:
        """Closes the links to the other workers."""
        for link in self._links.values():
            link.transport.close()


def _late(side: Side) -> None:
    """Ends a request that the other worker has not answered in time."""
    side.end(DeadlineExceeded(LATE))


async def _pump(receive: Receive, request: Stream) -> None:
    """Passes the events of a request on."""
    with suppress(asyncio.CancelledError):
        while not request.has_ended:
            event = await receive()
            is_last = event["type"].endswith(".disconnect")
            if not is_last or event["type"].startswith("websocket"):
                await request.emit(event)
            if is_last:
                request.leave()
            if is_last or (event["type"] == "http.request" and not event.get("more_body")):
                return
