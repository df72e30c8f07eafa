"""Runs plans (see `retry.py`): sends, waits and reads, with and without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import httpx

from .retry import Broken, Plan, Read, Reply, Send, Sleep, Socket

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 1.0
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
    return Broken(str(error) or type(error).__name__)


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
        try:
            if isinstance(step, Read):
                return next(step.reply.chunks, None) if step.timeout_s > 0 else self.end(step.reply)
            if step.socket is not None:
                return self._message(step, step.socket)
            ends = time.monotonic() + step.timeout_s
            response = self.http.send(request_of(self.http, step), stream=True)
            chunks = response.iter_bytes()
            if step.streamed and response.is_success:
                return Reply(response.status_code, response.headers, b"", response, chunks)
            with contextlib.closing(response):
                content = b""
                for chunk in chunks:
                    content += chunk
                    if time.monotonic() > ends:
                        return Broken(LATE)
            return Reply(response.status_code, response.headers, content)
        except (httpx.RequestError, httpx.StreamError) as error:
            return Broken(str(error) or type(error).__name__)

    def _message(self, send: Send, socket: Socket) -> Reply | Broken:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        assert send.body is not None, "a message has a body: this is a bug"
        while True:
            reused = socket.connection is not None and socket.address == send.address
            try:
                if not reused:
                    self.close(socket)
                    url, options = message(send)
                    socket.block, socket.address = contextlib.ExitStack(), send.address
                    socket.connection = socket.block.enter_context(connect(url, **options))
                socket.connection.send(send.body.decode())
                reply = answered(socket.connection.recv(send.timeout_s))
            except (OSError, WebSocketException) as error:
                self.close(socket)
                if not reused or isinstance(error, TimeoutError):  # the server may close an idle connection
                    return refused(error)
                continue
            except BaseException:  # interrupted: the next message must not get this one's answer
                self.close(socket)
                raise
            if reply.status != 200:  # after most errors the server closes it
                self.close(socket)
            return reply

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
        try:
            if isinstance(step, Read) and step.timeout_s <= 0:
                return await self.end(step.reply)
            async with asyncio.timeout(step.timeout_s):
                if isinstance(step, Read):
                    return await anext(step.reply.chunks, None)
                if step.socket is not None:
                    return await self._message(step, step.socket)
                response = await self.http.send(request_of(self.http, step), stream=True)
                if step.streamed and response.is_success:
                    return Reply(response.status_code, response.headers, b"", response, response.aiter_bytes())
                async with contextlib.aclosing(response):
                    return Reply(response.status_code, response.headers, await response.aread())
        except (httpx.RequestError, httpx.StreamError, TimeoutError) as error:
            return Broken(str(error) or type(error).__name__)

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
            except (OSError, WebSocketException) as error:
                await self.close(socket)
                if not reused or isinstance(error, TimeoutError):
                    return refused(error)
                continue
            except BaseException:
                await self.close(socket)
                raise
            if reply.status != 200:
                await self.close(socket)
            return reply

    async def end(self, reply: Reply) -> Broken:
        """Ends a streamed answer, which may not be complete."""
        await reply.response.aclose()
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
