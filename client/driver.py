"""Runs plans (see `retry.py`): sends, waits and reads, with and without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from functools import update_wrapper
from inspect import signature
from socket import SHUT_RDWR
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import anyio
import httpx

from .retry import Broken, Plan, Read, Reply, Send, Sleep, Socket

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 1.0
TOO_BIG = 1009  # the code with which a server closes a WebSocket after a message that is too long
LOGGER = logging.getLogger(f"{__name__}.websockets")
LOGGER.setLevel(logging.INFO)  # at DEBUG, websockets logs the header with the key
LATE = "the answer was not complete in time"


def message(send: Send) -> tuple[str, dict[str, Any]]:
    """Returns the address of a session's WebSocket, and the arguments with which it is opened."""
    headers = {name: value for name, value in send.headers.items() if name == "authorization"}
    return f"ws{send.address.removeprefix('http')}{send.path}", {
        "additional_headers": headers,
        "open_timeout": send.timeout_s,
        "close_timeout": CLOSE_S,
        "compression": None,
        "max_size": None,
        "logger": LOGGER,
    }


def answered(text: str | bytes) -> Reply:
    """Returns the reply of a WebSocket. The status of an error is in its document."""
    content = text.encode() if isinstance(text, str) else text
    if content.startswith(b'{"error":'):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(content)["error"]
            return Reply(int(document["status"]), {}, json.dumps(document).encode())
    return Reply(200, {}, content)


def refused(error: Exception) -> Reply | Broken:
    """Returns the outcome of a WebSocket that could not be opened, or was closed without an answer."""
    response = getattr(error, "response", None)  # of websockets' InvalidStatus
    if response is not None:
        return Reply(response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.body or b"")
    close = getattr(error, "rcvd", None)  # of websockets' ConnectionClosed
    if close is not None and close.code == TOO_BIG:
        return Reply(413, {}, (close.reason or "the message is too long").encode())
    return Broken(str(error) or type(error).__name__)


@contextlib.contextmanager
def limited(connection: Any, timeout_s: float) -> Iterator[None]:
    """Shuts a socket down if the block lasts longer than `timeout_s`, which ends all waiting for it. `connection` is
    the socket, or None if there is none."""

    def shut() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(SHUT_RDWR)

    timer = threading.Timer(max(0.0, timeout_s), shut)
    timer.daemon = True
    if connection is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def socket_of(response: httpx.Response) -> Any:
    """Returns the socket from which a response is read. Returns None for a transport without sockets."""
    stream = response.extensions.get("network_stream")
    return stream and stream.get_extra_info("socket")


def request_of(http: httpx.Client | httpx.AsyncClient, send: Send) -> httpx.Request:
    return http.build_request(
        send.method, send.address + send.path, content=send.body, headers=send.headers, timeout=send.timeout_s
    )


class Driver:
    """Runs plans in this thread."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self.http = httpx.Client(transport=transport)
        weakref.finalize(self, self.http.close)

    def run(self, plan: Plan[T]) -> T:
        """Runs a plan, and returns its result."""
        outcome = None
        with contextlib.closing(plan):
            while True:
                try:
                    step = plan.send(outcome)
                except StopIteration as ended:
                    result: T = ended.value
                    return result
                outcome = self._outcome(step)

    def _outcome(self, step: Send | Sleep | Read) -> Any:
        if isinstance(step, Sleep):
            return time.sleep(step.seconds)
        ends = time.monotonic() + step.timeout_s
        try:
            if isinstance(step, Read):
                if step.timeout_s <= 0:
                    return self.end(step.reply)
                with limited(socket_of(step.reply.response), step.timeout_s):
                    return next(step.reply.chunks, None)
            if step.socket is not None:
                return self._message(step, step.socket, ends)
            response = self.http.send(request_of(self.http, step), stream=True)
            if step.streamed and response.is_success:
                return Reply(response.status_code, response.headers, b"", response, response.iter_bytes())
            with contextlib.closing(response), limited(socket_of(response), ends - time.monotonic()):
                return Reply(response.status_code, response.headers, response.read())
        except (httpx.RequestError, httpx.StreamError) as error:
            return Broken(LATE if time.monotonic() >= ends else str(error) or type(error).__name__)

    def _message(self, send: Send, socket: Socket, ends: float) -> Reply | Broken:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        assert send.body is not None, "a message has a body: this is a bug"
        while (left_s := ends - time.monotonic()) > 0:
            reused = socket.connection is not None and socket.address == send.address
            try:
                if not reused:
                    self.close(socket)
                    url, options = message(send)
                    socket.block, socket.address = contextlib.ExitStack(), send.address
                    connecting = connect(url, **options | {"open_timeout": left_s})
                    socket.connection = socket.block.enter_context(connecting)
                with limited(socket.connection.socket, ends - time.monotonic()):
                    socket.connection.send(send.body.decode())
                    reply = answered(socket.connection.recv())
                    if reply.status != 200:  # after most errors the server closes it
                        self.close(socket)
                return reply
            except (OSError, WebSocketException) as error:
                self.close(socket)
                outcome = refused(error)
                if not reused or isinstance(outcome, Reply):  # the server may close an idle connection
                    return outcome
            except BaseException:  # interrupted: the next message must not get this one's answer
                self.close(socket)
                raise
        return Broken(LATE)

    def end(self, reply: Reply) -> Broken:
        """Ends a streamed answer, which may not be complete."""
        reply.response.close()
        return Broken(LATE)

    def close(self, socket: Socket) -> None:
        """Closes a WebSocket."""
        block, socket.block, socket.connection = socket.block, None, None
        if block is not None:
            block.close()


class AsyncDriver:
    """Runs plans in a task of asyncio."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.http = httpx.AsyncClient(transport=transport)

    async def run(self, plan: Plan[T]) -> T:
        """Runs a plan, and returns its result."""
        outcome = None
        with contextlib.closing(plan):
            while True:
                try:
                    step = plan.send(outcome)
                except StopIteration as ended:
                    result: T = ended.value
                    return result
                outcome = await self._outcome(step)

    async def _outcome(self, step: Send | Sleep | Read) -> Any:
        if isinstance(step, Sleep):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, Read) and step.timeout_s <= 0:
            return await self.end(step.reply)
        if isinstance(step, Send) and step.socket is not None:
            try:
                async with asyncio.timeout(step.timeout_s):
                    return await self._message(step, step.socket)
            except TimeoutError:
                return Broken(LATE)
        # httpx loses its connection if a task is cancelled in it by other means than anyio's
        scope = anyio.move_on_after(step.timeout_s)
        task = asyncio.create_task(self._exchange(step, scope))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.wait([task])
            found = None if task.exception() else task.result()
            if isinstance(found, Reply) and found.response is not None:
                await self.end(found)
            raise

    async def _exchange(self, step: Send | Read, scope: anyio.CancelScope) -> Any:
        """Sends a request, or reads on, until `scope` ends."""
        with scope:
            try:
                if isinstance(step, Read):
                    return await anext(step.reply.chunks, None)
                response = await self.http.send(request_of(self.http, step), stream=True)
                if step.streamed and response.is_success:
                    return Reply(response.status_code, response.headers, b"", response, response.aiter_bytes())
                async with contextlib.aclosing(response):
                    return Reply(response.status_code, response.headers, await response.aread())
            except (httpx.RequestError, httpx.StreamError) as error:
                return Broken(str(error) or type(error).__name__)
        return Broken(LATE)

    async def _message(self, send: Send, socket: Socket) -> Reply | Broken:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        assert send.body is not None, "a message has a body: this is a bug"
        while True:
            reused = socket.connection is not None and socket.address == send.address
            try:
                if not reused:
                    await self.close(socket)
                    url, options = message(send)
                    socket.block, socket.address = contextlib.AsyncExitStack(), send.address
                    socket.connection = await socket.block.enter_async_context(connect(url, **options))
                await socket.connection.send(send.body.decode())
                reply = answered(await socket.connection.recv())
                if reply.status != 200:
                    await self.close(socket)
                return reply
            except (OSError, WebSocketException) as error:
                await self.close(socket)
                outcome = refused(error)
                if not reused or isinstance(outcome, Reply):
                    return outcome
            except BaseException:  # interrupted, or late: it is not waited for
                if socket.connection is not None:
                    socket.connection.transport.abort()
                await self.close(socket)
                raise

    async def end(self, reply: Reply) -> Broken:
        """Ends a streamed answer, which may not be complete."""
        await asyncio.shield(asyncio.ensure_future(reply.response.aclose()))
        return Broken(LATE)

    async def close(self, socket: Socket) -> None:
        """Closes a WebSocket."""
        block, socket.block, socket.connection = socket.block, None, None
        if block is not None:
            await block.aclose()


class Blocking(Generic[C]):
    """An object whose methods run the plans of `plans`."""

    def __init__(self, plans: C, driver: Driver) -> None:
        self._plans, self._driver = plans, driver


class Awaiting(Generic[C]):
    """An object whose coroutines run the plans of `plans`."""

    def __init__(self, plans: C, driver: AsyncDriver) -> None:
        self._plans, self._driver = plans, driver


def blocking(plan: Callable[Concatenate[C, P], Plan[T]]) -> Callable[Concatenate[Blocking[C], P], T]:
    """Returns the method that runs a plan. It has the plan's arguments and docstring."""

    def run(self: Blocking[C], /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._driver.run(plan(self._plans, *arguments, **options))

    return _described(plan, run)


def awaiting(
    plan: Callable[Concatenate[C, P], Plan[T]],
) -> Callable[Concatenate[Awaiting[C], P], Coroutine[Any, Any, T]]:
    """Returns the coroutine function that runs a plan."""

    async def run(self: Awaiting[C], /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._driver.run(plan(self._plans, *arguments, **options))

    return _described(plan, run)


def _described(plan: Callable[..., Any], method: T) -> T:
    """Gives a method the plan's docstring and signature, with the plan's result as its result."""
    told = signature(plan)
    result = str(told.return_annotation).removeprefix("Plan[").removesuffix("]")
    update_wrapper(method, plan)  # type: ignore[arg-type]
    method.__signature__ = told.replace(return_annotation=result)  # type: ignore[attr-defined]
    return method
