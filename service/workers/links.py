"""Passes requests between the workers of one server, over Unix sockets.

A worker that accepts a request for another worker's session passes the request on, as the events of ASGI, and passes
the answer's events back to its client. All frames of one iteration of the event loop are written together, so the steps
that arrive together cost one system call.

    length  number  kind   payload
    uint32  uint64  uint8  MessagePack

Numbers are little-endian. `length` is the payload's number of bytes. `number` names the request on its link. The worker
that passes a request on connects the link, and sends BEGIN, EVENT, LEFT and TAKEN. The other worker answers with EVENT,
TAKEN and END. A plain step (`steps.py`) is sent as one STEP, and answered with one END.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wane.service.errors import DeadlineExceeded, Unavailable
from wane.service.net.connection import CONNECTION, Connection
from wane.service.net.limits import Limits, ReceiveShare
from wane.service.observability.logs import SERVICE

HEAD = struct.Struct("<IQB")
BEGIN, EVENT, LEFT, TAKEN, END, STEP = range(6)
LOST = (
    "the worker of this session has ended; it may have made the step before: repeat the request with the same "
    "expected_position or idempotency key"
)
LATE = "the worker of this session did not answer in time"
WINDOW_BYTES = 1 << 18
"""The largest number of bytes of an answer's events that the client has not taken yet. An event that crosses this limit
is sent, and the next one waits."""
WINDOW_EVENTS = 8  # the same for the events of a request, such as the messages of a WebSocket
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
    found: Connection = scope["state"][CONNECTION]
    return found


class Link(asyncio.Protocol):
    """A connection to another worker. `on_frame` is called with the number, the kind and the payload of each frame, and
    `on_lost` once, when the connection is lost."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._frames: list[bytes] = []
        self.is_lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def send(self, number: int, kind: int, payload: object) -> None:
        """Sends a frame at the end of this iteration of the event loop."""
        if self.is_lost:
            return
        if not self._frames:
            self._loop.call_soon(self._flush)
        data = encode(payload)
        self._frames += (HEAD.pack(len(data), number, kind), data)

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
            self.on_frame(number, kind, decode(received[start + HEAD.size : end]))
            start = end
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_lost = True
        self.on_lost()

    def on_frame(self, number: int, kind: int, payload: Any) -> None:
        raise NotImplementedError

    def on_lost(self) -> None:
        raise NotImplementedError


class Events:
    """Events that one side of a request has sent, and the other side has not taken yet."""

    def __init__(self) -> None:
        self._events: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._has_ended = False

    def put(self, *events: Message) -> None:
        self._events += events
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No further event comes. `error` says why, unless the side has ended as it should."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Message | None:
        """Returns the next event, or None after the last one. Raises the error of `end`."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()


class Window:
    """Limits what is sent and not taken yet."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def take_back(self, amount: int) -> None:
        """The other side has taken `amount`."""
        self._left += amount
        if self._left > 0 and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Nothing more is limited, because the other side has gone."""
        self.is_closed = True
        self.take_back(1 << 60)

    async def use(self, amount: int) -> None:
        """Waits until less than the limit is not taken, and adds `amount`."""
        while self._left <= 0:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._left -= amount


class Call:
    """A request that this worker has passed on."""

    def __init__(self, link: OutgoingLink, number: int) -> None:
        self._link = link
        self._number = number
        self.answer = Events()
        self.window = Window(WINDOW_EVENTS)

    def leave(self) -> None:
        """Tells the other worker that the client has left."""
        self._link.send(self._number, LEFT, None)

    def taken(self, amount: int) -> None:
        """Tells the other worker that the client has taken `amount` bytes."""
        self._link.send(self._number, TAKEN, amount)

    async def send_event(self, event: Message) -> None:
        await self.window.use(1)
        self._link.send(self._number, EVENT, (event,))

    def late(self) -> None:
        self.answer.end(DeadlineExceeded(LATE))


class OutgoingLink(Link):
    """A link whose requests come from this worker."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, Call] = {}
        self._steps: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()

    async def step(self, asked: object, timeout_s: float) -> Any:
        """Passes a plain step on, and returns its outcome (see `steps.py`). Raises Unavailable and DeadlineExceeded."""
        number = next(self._numbers)
        outcome = self._steps[number] = self._loop.create_future()
        self.send(number, STEP, asked)
        timer = self._loop.call_later(timeout_s, _fail, outcome, DeadlineExceeded, LATE)
        try:
            return await outcome
        finally:
            timer.cancel()
            if self._steps.pop(number, None) is not None:
                self.send(number, LEFT, None)

    def begin(self, scope: Scope, content: bytes | None, marks: Mapping[str, object]) -> Call:
        """Passes a request on. `content` is its whole body. If it is None, the request's events are sent one by one.
        `marks` are further parts of the scope."""
        number = next(self._numbers)
        call = self._calls[number] = Call(self, number)
        self.send(number, BEGIN, ({name: scope[name] for name in PASSED_ON if name in scope} | dict(marks), content))
        return call

    def end(self, call: Call) -> None:
        """Forgets a request. Tells the other worker to stop, if its answer is not complete."""
        if self._calls.pop(call._number, None) is not None:
            call.leave()

    def on_frame(self, number: int, kind: int, payload: Any) -> None:
        call = self._calls.get(number)
        if call is None:
            outcome = self._steps.pop(number, None)
            if outcome is not None and not outcome.done():
                outcome.set_result(payload)
        elif kind == EVENT:
            call.answer.put(*payload)
        elif kind == TAKEN:
            call.window.take_back(payload)
        else:
            del self._calls[number]
            call.window.close()
            call.answer.end(RuntimeError(f"the other worker failed: {payload}") if payload else None)

    def on_lost(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.window.close()
            call.answer.end(Unavailable(LOST))
        steps, self._steps = self._steps, {}
        for outcome in steps.values():
            _fail(outcome, Unavailable, LOST)


def _fail(outcome: asyncio.Future[Any], kind: type[Exception], why: str) -> None:
    if not outcome.done():
        outcome.set_exception(kind(why))


class IncomingRequest:
    """A request that another worker has passed to this one. Takes the place of the request's `Connection`."""

    def __init__(self, link: IncomingLink, number: int, content: bytes | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.content = content
        self.is_websocket = False
        self.has_ended = False
        self.on_lost: Callable[[], None] | None = None
        self._link = link
        self._number = number
        self._share = ReceiveShare(link.limits)
        self._held = 0
        self._start: Message | None = None  # the start of the answer, which is sent together with the next event
        self.events = Events()
        self.window = Window(WINDOW_BYTES)
        if content is not None:
            self.events.put({"type": "http.request", "body": content})

    def hold(self, more: int) -> bool:
        """See `Connection.hold`."""
        if not self._share.resize(self._held + more):
            return False
        self._held += more
        return True

    def leave(self) -> None:
        """The client has left."""
        self.has_ended = True
        self.window.close()
        self.events.end()
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    async def receive(self) -> Message:
        """ASGI's function `receive`."""
        event = await self.events.take()
        if event is None:
            return {"type": "websocket.disconnect", "code": 1006} if self.is_websocket else {"type": "http.disconnect"}
        if self.content is None:
            self._link.send(self._number, TAKEN, 1)
        return event

    async def send(self, event: Message) -> None:
        """ASGI's function `send`."""
        if self.has_ended:
            return
        if event["type"] == "http.response.start":
            self._start = event
            return
        await self.window.use(size_of(event))
        start, self._start = self._start, None
        self._link.send(self._number, EVENT, (event,) if start is None else (start, event))

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """Answers the request."""
        self.is_websocket = scope["type"] == "websocket"
        scope["headers"] = [(name, value) for name, value in scope["headers"]]
        scope |= {"asgi": {"version": "3.0"}, "state": {CONNECTION: self}, "extensions": {}}
        failure: str | None = None
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            SERVICE.exception("a request that another worker has passed on failed")
            failure = type(error).__name__
        finally:
            self._share.resize(0)
            self._link.end(self._number, failure)


class Leaves(Protocol):
    """A plain step, whose client may leave."""

    def leave(self) -> None:
        """The client has left."""


RunStep = Callable[[Callable[[object], None], Any], Leaves]
"""Starts a plain step. The first argument is called with its outcome, and the second one is what was asked."""


class IncomingLink(Link):
    """A link whose requests come from another worker."""

    def __init__(self, app: ASGIApp, limits: Limits, run_step: RunStep) -> None:
        super().__init__()
        self._app = app
        self._run_step = run_step
        self.limits = limits
        self._requests: dict[int, IncomingRequest | Leaves] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frame(self, number: int, kind: int, payload: Any) -> None:
        if kind == STEP:
            self._requests[number] = self._run_step(partial(self.end, number), payload)
        elif kind == BEGIN:
            scope, content = payload
            request = self._requests[number] = IncomingRequest(self, number, content)
            task = self._loop.create_task(request.run(self._app, scope))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (asked := self._requests.get(number)) is None:
            return
        elif kind == LEFT:
            asked.leave()
        elif isinstance(asked, IncomingRequest):
            if kind == EVENT:
                asked.events.put(*payload)
            else:
                asked.window.take_back(payload)

    def end(self, number: int, outcome: object) -> None:
        """The request has been answered. `outcome` is the failure of a whole request, or the outcome of a step."""
        self._requests.pop(number, None)
        self.send(number, END, outcome)

    def on_lost(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.leave()


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
        self.timeout_s = timeout_s
        self._links: dict[int, OutgoingLink] = {}
        self._connecting: dict[int, asyncio.Task[OutgoingLink]] = {}

    async def listen(self) -> asyncio.Server:
        """Accepts links from the other workers."""
        path = self._paths[self._me]
        return await asyncio.get_running_loop().create_unix_server(
            lambda: IncomingLink(self._app, self._limits, self._run_step), path
        )

    async def link(self, worker: int) -> OutgoingLink:
        """Returns the link to a worker. Connects it if necessary. Raises Unavailable."""
        link = self._links.get(worker)
        if link is not None and not link.is_lost:
            return link
        if worker not in self._connecting:
            self._connecting[worker] = asyncio.create_task(self._connect(worker))
        try:
            return await asyncio.shield(self._connecting[worker])
        except OSError as error:
            raise Unavailable("the worker of this session is starting again") from error

    async def _connect(self, worker: int) -> OutgoingLink:
        try:
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(OutgoingLink, self._paths[worker])
            self._links[worker] = link
            return link
        finally:
            del self._connecting[worker]

    async def pass_on(
        self,
        worker: int,
        scope: Scope,
        receive: Receive,
        send: Send,
        content: bytes | None,
        marks: Mapping[str, object],
    ) -> None:
        """Passes a request to another worker, and its answer to the client. `content` is the request's whole body, or
        None if it must be read with `receive`. `marks` are further parts of the scope that the other worker gets.

        Raises Unavailable and DeadlineExceeded, before any part of the answer is sent, and EndedEarly after that."""
        link = await self.link(worker)
        connection = connection_of(scope)
        call = link.begin(scope, content, marks)
        connection.on_lost = call.leave
        if connection.has_ended:
            call.leave()
        timer, pump, has_begun, untaken = None, None, False, 0
        if content is None:
            pump = asyncio.create_task(_pump(receive, call))
        else:
            timer = asyncio.get_running_loop().call_later(self.timeout_s, call.late)
        try:
            while (event := await call.answer.take()) is not None:
                if timer is not None:
                    timer.cancel()
                has_begun = True
                await send(event)
                untaken += size_of(event)
                if untaken >= WINDOW_BYTES // 4:
                    call.taken(untaken)
                    untaken = 0
        except (Unavailable, DeadlineExceeded) as error:
            if has_begun:
                raise EndedEarly("the worker of this session ended before the whole answer was sent") from error
            raise
        finally:
            connection.on_lost = None
            if timer is not None:
                timer.cancel()
            if pump is not None:
                pump.cancel()
            link.end(call)

    async def close(self) -> None:
        """Closes the links to the other workers."""
        for link in self._links.values():
            link.transport.close()


async def _pump(receive: Receive, call: Call) -> None:
    """Passes the events of a request on."""
    with suppress(asyncio.CancelledError):
        while not call.window.is_closed:
            event = await receive()
            if event["type"].endswith(".disconnect"):
                if event["type"].startswith("websocket"):
                    await call.send_event(event)
                call.leave()
                return
            await call.send_event(event)
            if event["type"] == "http.request" and not event.get("more_body"):
                return
