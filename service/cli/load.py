"""Sends requests over several connections at once, and times the answers.

The command shares the machine with the server, so a request must cost the command little: requests are encoded before
they are timed, and each connection is one protocol object of asyncio.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import cast
from urllib.parse import urlsplit

import httptools

from wane.client.servers import Servers
from wane.service.cli.connect import TIMEOUT_S, CommandError

SHOWN = 300
"""The largest number of bytes of a refusal that a message shows."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer's body, and the time from the request to the end of the answer, in milliseconds."""

    ms: float
    body: bytes


class _Connection(asyncio.Protocol):
    """A connection that sends each request after the answer to the request before it."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self.answers: list[Timed] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self) -> None:
        """Sends the next request. After the last answer, ends `done`."""
        if len(self.answers) == len(self._requests):
            self.done.set_result(None)
        else:
            self._sent = time.perf_counter()
            self.transport.write(self._requests[len(self.answers)])

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        taken_ms, body = 1000 * (time.perf_counter() - self._sent), b"".join(self._body)
        self._body.clear()
        if self.done.done():
            return
        status = self._parser.get_status_code()
        if not 200 <= status < 300:
            self._fail(f"the server answered {status}: {body[:SHOWN].decode(errors='replace')}")
        else:
            self.answers.append(Timed(taken_ms, body))
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server closed a connection{'' if error is None else f': {error}'}")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(CommandError(why))


class Load:
    """A server, to which requests are sent."""

    def __init__(self, url: str) -> None:
        """Raises CommandError if `url` is not an address."""
        try:
            servers = Servers(url)
        except ValueError as error:
            raise CommandError(str(error)) from error
        self._url = urlsplit(servers.addresses[0])
        self._headers = servers.headers

    def request(self, method: str, path: str, document: object = None) -> bytes:
        """Returns a request. `document` is its body, as JSON."""
        body = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
        headers = {"host": self._url.netloc, **self._headers, "content-length": str(len(body))}
        if body:
            headers["content-type"] = "application/json"
        head = [f"{method} {self._url.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*head, "", ""]).encode() + body

    def drive(self, requests: Sequence[Sequence[bytes]]) -> tuple[list[list[Timed]], float]:
        """Sends each sequence of requests over a connection of its own, one request after the other; all connections
        begin at the same time. Returns the answers of each connection, and the seconds until the last answer. Raises
        CommandError if a request is refused or is not answered in time."""
        run: Callable[..., tuple[list[list[Timed]], float]] = asyncio.run
        if find_spec("uvloop") is not None:
            import uvloop

            run = uvloop.run
        try:
            return run(self._drive(requests))
        except TimeoutError as error:
            raise CommandError(f"the server did not answer all requests within {TIMEOUT_S} s") from error
        except OSError as error:
            raise CommandError(f"{self._url.geturl()} cannot be reached: {error}") from error

    async def _drive(self, requests: Sequence[Sequence[bytes]]) -> tuple[list[list[Timed]], float]:
        loop = asyncio.get_running_loop()
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        port = self._url.port or (80 if secure is None else 443)
        connections: list[_Connection] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for each in requests:
                    make = partial(_Connection, each)
                    _, connection = await loop.create_connection(make, self._url.hostname or "", port, ssl=secure)
                    connections.append(connection)
                begun = time.perf_counter()
                for connection in connections:
                    connection.send()
                await asyncio.gather(*(connection.done for connection in connections))
                return [connection.answers for connection in connections], time.perf_counter() - begun
        finally:
            for connection in connections:
                connection.done.cancel()
                connection.transport.close()
