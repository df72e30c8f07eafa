"""Sends requests over several connections at once, and times the answers.

The command shares the machine with the server, so a request must cost the command little: requests are encoded before
they are timed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import urlsplit

import httptools

from wane.client.servers import Servers
from wane.service.cli.connect import TIMEOUT_S, CommandError

RECEIVED_BYTES = 1 << 16
SHOWN = 300
"""The largest number of bytes of a refusal that a message shows."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer's body, and the time from the request to the end of the answer, in milliseconds."""

    ms: float
    body: bytes


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Timed:
    """Sends a request, and returns its answer. Raises CommandError if it is refused or not answered."""
    parts, is_complete = list[bytes](), asyncio.Event()
    parser = httptools.HttpResponseParser(SimpleNamespace(on_body=parts.append, on_message_complete=is_complete.set))
    sent = time.perf_counter()
    writer.write(request)
    while not is_complete.is_set():
        try:
            if not (data := await reader.read(RECEIVED_BYTES)):
                raise CommandError("the server closed a connection")
            parser.feed_data(data)
        except ConnectionError as error:
            raise CommandError(f"the server closed a connection: {error}") from error
        except httptools.HttpParserError as error:
            raise CommandError(f"the server's answer is not HTTP: {error}") from error
    taken_ms, body, status = 1000 * (time.perf_counter() - sent), b"".join(parts), parser.get_status_code()
    if not 200 <= status < 300:
        raise CommandError(f"the server answered {status}: {body[:SHOWN].decode(errors='replace')}")
    return Timed(taken_ms, body)


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
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        port = self._url.port or (80 if secure is None else 443)

        async def ask(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], each: Sequence[bytes]) -> list[Timed]:
            return [await _ask(*stream, request) for request in each]

        streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for _ in requests:  # a comprehension would lose the open connections if one cannot be opened
                    streams.append(await asyncio.open_connection(self._url.hostname, port, ssl=secure))  # noqa: PERF401
                begun = time.perf_counter()
                answers = await asyncio.gather(*map(ask, streams, requests))
                return answers, time.perf_counter() - begun
        finally:
            for _, writer in streams:
                writer.close()
