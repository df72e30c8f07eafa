"""Sends requests until one is answered or the deadline has passed."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx

from .errors import NotWane, Unreachable, WaneError, error_of
from .options import ClientOptions, checked
from .shape import Misfit, fit

T = TypeVar("T")

RETRIED = frozenset({429, 502, 503, 504})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
DAY_S = 86400.0  # the longest time of one attempt, which is sent to the server in milliseconds
TOO_BIG = 1009  # the code with which a server closes a WebSocket after a message that is too long
LATE = "the answer was not complete in time"
LOGGER = logging.getLogger(f"{__name__}.websockets")
LOGGER.setLevel(logging.INFO)  # at DEBUG, websockets logs the header with the key
WEBSOCKET = dict[str, Any](open_timeout=None, close_timeout=1, compression=None, max_size=None, logger=LOGGER)

Outcome = httpx.Response | str
"""The response to an attempt, or why there is none. The request may then have been carried out."""


@dataclass
class Socket:
    """A session's WebSocket: its path, and the connection, if it is open, with its address."""

    path: str
    address: str = ""
    connection: Any = None

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()


class Connections:
    """The HTTP connections of one client. A process that was forked has connections of its own: those of its parent
    belong to the parent's event loop."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._transport = transport
        self._made = {os.getpid(): self._make()}

    def _make(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self._transport, timeout=None)  # noqa: S113 - `within` limits each exchange

    def http(self) -> httpx.AsyncClient:
        """Returns the connections of this process. Raises RuntimeError if it cannot have its own."""
        if os.getpid() not in self._made:
            if self._transport is not None:
                raise RuntimeError(
                    "this client was made with a transport before the process was forked: make a new client"
                )
            self._made[os.getpid()] = self._make()
        return self._made[os.getpid()]

    async def close(self) -> None:
        """Closes the connections of this process."""
        if os.getpid() in self._made:
            await self._made[os.getpid()].aclose()


class Servers:
    """The addresses of one service, and how requests to it are retried. All sessions of a client use the address that
    answered last. A request is its method and path, such as "GET /v1/models"; a deadline is a time of `clock`."""

    def __init__(
        self,
        addresses: str | Sequence[str] | None,
        transport: httpx.AsyncBaseTransport | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        """Checks the arguments of a client. Raises ValueError."""
        given = addresses or os.environ.get("WANE_URL", "")
        urls = [url.strip().rstrip("/") for url in (given.split(",") if isinstance(given, str) else given)]
        if not any(urls):
            raise ValueError("give an address such as http://127.0.0.1:8000, or set WANE_URL")
        for url in urls:
            if "@" in url:  # not shown: it may hold a password
                raise ValueError("an address must not hold a user or password; give the API key as the argument `key`")
            if not _is_address(url):
                raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        rest: dict[str, Any] = {**(options or {})}
        key = rest.pop("key", None) or os.environ.get("WANE_API_KEY")  # not checked below, where errors show values
        if key is not None and not (isinstance(key, str) and re.fullmatch(r"[!-~]+", key)):
            raise ValueError("an API key consists of printable ASCII characters without spaces")
        rest = {"deadline_s": 10, "retry": True} | checked(ClientOptions, rest)
        self.addresses, self.deadline_s, self.retry = urls, float(rest["deadline_s"]), bool(rest["retry"])
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.connections = Connections(transport)
        self.current = 0
        self.clock, self.sleep = time.monotonic, asyncio.sleep

    def started(self, kind: type, options: Any) -> tuple[dict[str, Any], float]:
        """Checks the options of a call. Returns the fields of its body, and its deadline. Raises ValueError."""
        body = checked(kind, options)
        return body, self.clock() + body.pop("deadline_s", self.deadline_s)

    def pause_s(self, turn: int) -> float:
        """Returns how long to wait after this number of turns without success."""
        longest_s = min(FIRST_WAIT_S * float(2 ** min(turn, 6)), LONGEST_WAIT_S)
        return random.uniform(longest_s / 2, longest_s)  # noqa: S311

    async def ask(
        self, kind: type[T], request: str, body: object, deadline: float, member: str | None = None, **how: Any
    ) -> T:
        """Returns the answer, or its member `member`, as a `kind`. `how`: see `reply`. Raises WaneError."""
        response = await self.reply(request, body, deadline, **how)
        return self.read(kind, request, response.content, member)

    def read(self, kind: type[T], request: str, content: bytes | Mapping[str, Any], member: str | None = None) -> T:
        """Returns a JSON document, or one member of it, as a `kind`. Raises NotWane."""
        try:
            document = json.loads(content or b"null") if isinstance(content, bytes) else content
            if member is not None:
                document = fit(dict[str, Any], document).get(member)
            found: T = fit(kind, document, member or "")
        except Misfit as error:
            raise self.not_wane(request, str(error)) from None
        except (ValueError, RecursionError) as error:
            raise self.not_wane(request, f"the body is not JSON: {error}") from None
        return found

    def not_wane(self, request: str, why: str) -> NotWane:
        return NotWane(f"{self.addresses[self.current]} does not answer {request} as Wane does: {why}")

    async def reply(
        self,
        request: str,
        body: object,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        socket: Socket | None = None,
        streamed: bool = False,
    ) -> httpx.Response:
        """Returns the first successful response. With `socket`, the body is its next message. Raises WaneError.

        After a connection error, 502, 503 or 504 the next address is tried, but none before its `Retry-After` if
        another may be asked earlier. Once all have been tried, and after 429, it waits, longer each time.
        """
        content = None if body is None else json.dumps(body).encode()
        kind = {} if content is None else {"content-type": "application/json"}
        method, path = request.split()
        attempts, count = 0, len(self.addresses)
        ready = [0.0] * count  # the times of `clock` from which on each address may be asked again
        failure: WaneError = Unreachable(f"{self.addresses[self.current]} did not answer {request} in time")
        while (left_s := min(deadline - self.clock(), DAY_S)) > 0:
            at = self.current
            told = {**self.headers, **kind, **(headers or {}), "x-request-timeout-ms": str(max(1, int(1000 * left_s)))}
            made = self.connections.http().build_request(
                method, self.addresses[at] + path, content=content, headers=told
            )
            outcome = await self.attempt(made, left_s, self.addresses[at], socket, streamed)
            if isinstance(outcome, httpx.Response) and outcome.is_success:
                return outcome
            failure = self._failure(request, outcome, at)
            status = 503 if isinstance(outcome, str) else outcome.status_code
            if not self.retry or status not in RETRIED:
                break
            attempts += 1
            now = self.clock()
            ready[at] = now + (failure.retry_after_s or 0.0)
            if status != 429 and self.current == at:  # in turn, but those that may be asked earlier first
                in_turn = [(at + 1 + number) % count for number in range(count)]
                self.current = min(in_turn, key=lambda number: max(ready[number], now))
            wait_s = max(0.0, ready[self.current] - now)
            if self.current == at or attempts % count == 0:
                wait_s = max(wait_s, self.pause_s(attempts // count))
            if wait_s >= deadline - now:
                break
            if wait_s:
                await self.sleep(wait_s)
        raise failure

    async def attempt(
        self, request: httpx.Request, timeout_s: float, address: str, socket: Socket | None, streamed: bool
    ) -> Outcome:
        """Sends a request once. The server of one of several addresses may hang: after a quarter of the time it is
        asked whether it lives, and if it does not answer that for another quarter, the attempt has failed."""
        exchange = self._message(request, address, socket) if socket else self._exchange(request, streamed)
        return await self.within(exchange, timeout_s, address if self.retry and len(self.addresses) > 1 else None)

    async def within(self, exchange: Awaitable[T], timeout_s: float, watched: str | None = None) -> T | str:
        """Awaits an exchange, for at most `timeout_s`. Returns its result, or why it failed."""
        scope = anyio.move_on_after(timeout_s)

        async def limited() -> T | str:
            with scope:
                try:
                    return await exchange
                except (httpx.RequestError, httpx.StreamError) as error:
                    return str(error) or type(error).__name__
            return LATE

        # httpx loses its connection if a task is cancelled in it by other means than anyio's
        task = asyncio.create_task(limited())
        try:
            late = watched is not None and not (await asyncio.wait([task], timeout=timeout_s / 4))[0]
            if late and isinstance(
                await self.within(self.connections.http().get(f"{watched}/healthz"), timeout_s / 4), str
            ):
                scope.cancel()
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.wait([task])
            if not task.exception() and isinstance(found := task.result(), httpx.Response):
                await ended(found)
            raise

    async def _exchange(self, request: httpx.Request, streamed: bool) -> httpx.Response:
        response = await self.connections.http().send(request, stream=True)
        if not (streamed and response.is_success):
            async with aclosing(response):
                await response.aread()
        return response

    async def _message(self, request: httpx.Request, address: str, socket: Socket) -> Outcome:
        """Sends a request's body over a WebSocket, which is opened if it is not open at this address."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        while True:
            reused = socket.connection is not None and socket.address == address
            try:
                if not reused:
                    await socket.close()
                    url = f"ws{address.removeprefix('http')}{socket.path}"
                    socket.connection = await connect(url, additional_headers=self.headers, **WEBSOCKET)
                    socket.address = address
                await socket.connection.send(request.content.decode())
                response = answered(await socket.connection.recv())
                if not response.is_success:  # after most errors the server closes it
                    await socket.close()
                return response
            except (OSError, WebSocketException) as error:
                await socket.close()
                outcome = refused(error)
                if not reused or not isinstance(outcome, str):  # the server may close an idle connection
                    return outcome
            except BaseException:  # late, or cancelled: the next message must not get this one's answer
                if socket.connection is not None:
                    socket.connection.transport.abort()
                socket.connection = None
                raise

    async def events(
        self, path: str, body: Mapping[str, Any], deadline: float, names: Sequence[str]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yields the server-sent events that have one of these names, and their JSON. Raises the error of an event
        `error`. Lines end in line feeds only: JSON may contain other line breaks."""
        request = f"POST {path}"
        response = await self.reply(request, {**body, "stream": True}, deadline, streamed=True)
        try:
            chunks, buffer = response.aiter_bytes(), b""
            while True:
                while b"\n\n" not in buffer:
                    chunk = await self.within(anext(chunks, None), deadline - self.clock())
                    if not isinstance(chunk, bytes):
                        raise Unreachable(f"the answer to {request} was cut off: {chunk or 'it ended early'}")
                    buffer += chunk
                text, _, buffer = buffer.partition(b"\n\n")
                lines = [line.partition(b":") for line in text.split(b"\n")]  # a comment has an empty name
                fields = {field: value.removeprefix(b" ") for field, _, value in lines}
                name, content = fields.get(b"event", b"").decode(errors="replace"), fields.get(b"data", b"")
                if name == "error":
                    document = self.read(dict[str, Any], request, content)
                    status = document.get("status")
                    raise error_of(request, status if type(status) is int else 500, document, "", None)
                if name in names:
                    yield name, content
        finally:
            await ended(response)

    def _failure(self, request: str, outcome: Outcome, at: int) -> WaneError:
        """Returns the error of an attempt."""
        if isinstance(outcome, str):
            return Unreachable(f"{self.addresses[at]} does not answer: {outcome}")
        if outcome.status_code < 400:
            return self.not_wane(request, f"its status is {outcome.status_code}")
        try:
            document = json.loads(outcome.content)
        except (ValueError, RecursionError):
            document = None
        text = outcome.content[:200].decode(errors="replace")
        return error_of(request, outcome.status_code, document, text, _retry_after_s(outcome, document))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # such as a port over 65535
        return False


async def ended(response: httpx.Response) -> None:
    """Ends a streamed response, which may not be complete."""
    await asyncio.shield(asyncio.ensure_future(response.aclose()))


def answered(text: str | bytes) -> httpx.Response:
    """Returns the response of a WebSocket. The status of an error is in its document."""
    if text[:9] in ('{"error":', b'{"error":'):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(text)["error"]
            return httpx.Response(int(document["status"]), json=document)
    return httpx.Response(200, content=text)


def refused(error: Exception) -> Outcome:
    """Returns the outcome of a WebSocket that could not be opened, or was closed without an answer."""
    response = getattr(error, "response", None)  # of websockets' InvalidStatus
    if response is not None:
        return httpx.Response(response.status_code, headers=list(response.headers.raw_items()), content=response.body)
    close = getattr(error, "rcvd", None)  # of websockets' ConnectionClosed
    if close is not None and close.code == TOO_BIG:
        return httpx.Response(413, text=close.reason or "the message is too long")
    return str(error) or type(error).__name__


def _retry_after_s(response: httpx.Response, document: Any) -> float | None:
    """Returns the seconds after which to send the request again, from the document or the header `Retry-After`."""
    told = document.get("retry_after_s") if isinstance(document, dict) else None
    if isinstance(told, int | float) and 0 <= told < math.inf:
        return float(told)
    header = response.headers.get("retry-after", "")
    if header.isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
