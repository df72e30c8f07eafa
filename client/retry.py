"""Sends requests until one is answered or the deadline has passed.

Nothing here does input or output. A `Plan` is a generator that yields what is to be done next (`Send`, `Sleep` or
`Read`), gets the outcome back, and returns its result. `driver.py` runs plans, with and without asyncio.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

from .errors import NotWane, Unreachable, WaneError, error_of
from .options import ClientOptions, checked
from .shape import Misfit, fit

T = TypeVar("T")

RETRIED = frozenset({429, 502, 503, 504})
NEXT_ADDRESS = RETRIED - {429}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
DAY_S = 86400.0
"""The longest time of one attempt and of one wait. Sockets and timers refuse much longer ones."""


@dataclass(slots=True)
class Socket:
    """A session's WebSocket: its address, and the driver's connection, with the block in which it is open."""

    path: str
    address: str = ""
    connection: Any = None
    block: Any = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request. With `socket`, send the body as its next message. The outcome is a Reply or Broken."""

    method: str
    address: str
    path: str
    body: bytes | None
    headers: Mapping[str, str] = field(repr=False)  # they hold the key
    timeout_s: float
    streamed: bool = False
    socket: Socket | None = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait. There is no outcome."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. A streamed answer has no content yet, but the driver's `response` and the iterator of its bytes."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    response: Any = None
    chunks: Any = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read on in a streamed answer. The outcome is bytes, None at the end, or Broken. Without time left, end it."""

    reply: Reply
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    """There is no answer. The request may have been carried out."""

    reason: str


Plan: TypeAlias = Generator[Send | Sleep | Read, Any, T]


@dataclass
class Servers:
    """The addresses of one service, and how requests to it are retried. All sessions of a client use the address that
    answered last."""

    addresses: Sequence[str]
    headers: Mapping[str, str] = field(repr=False)  # they hold the key
    deadline_s: float = 10
    retry: bool = True
    current: int = 0
    clock: Any = field(default=time.monotonic, repr=False)

    @classmethod
    def of(cls, addresses: str | Sequence[str] | None, options: ClientOptions) -> Servers:
        """Checks the arguments of a client. Raises ValueError."""
        given = addresses or os.environ.get("WANE_URL", "")
        urls = [url.strip().rstrip("/") for url in (given.split(",") if isinstance(given, str) else given)]
        if not any(urls):
            raise ValueError("give an address such as http://127.0.0.1:8000, or set WANE_URL")
        if any("@" in url for url in urls):  # not shown: it may hold a password
            raise ValueError("an address must not hold a user or a password; give the API key as the argument `key`")
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.query:
                raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        key = options.pop("key", None) or os.environ.get("WANE_API_KEY")  # not checked below, where errors show values
        if key is not None and not (isinstance(key, str) and re.fullmatch(r"[!-~]+", key)):
            raise ValueError("an API key consists of printable ASCII characters without spaces")
        return cls(urls, {"authorization": f"Bearer {key}"} if key else {}, **checked(ClientOptions, options))

    def pause_s(self, turn: int) -> float:
        """Returns how long to wait after this number of turns without success."""
        longest_s = min(FIRST_WAIT_S * float(2 ** min(turn, 6)), LONGEST_WAIT_S)
        return random.uniform(longest_s / 2, longest_s)  # noqa: S311

    def ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        body: object = None,
        deadline: float = 0,
        headers: Mapping[str, str] | None = None,
        socket: Socket | None = None,
        member: str | None = None,
    ) -> Plan[T]:
        """Returns the answer, or its member `member`, as a `kind`. Raises WaneError."""
        reply = yield from self.reply(method, path, body, deadline, headers, socket=socket)
        return self.read(kind, method, path, reply.content, member)

    def read(self, kind: type[T], method: str, path: str, content: bytes, member: str | None = None) -> T:
        """Returns a JSON document, or one member of it, as a `kind`. Raises NotWane."""
        try:
            document = json.loads(content or b"null")
            if member is not None:
                document = fit(dict[str, Any], document).get(member)
            found: T = fit(kind, document)
        except Misfit as error:
            why = f"{member or ''}{error.path}: {error.why}"
        except (ValueError, RecursionError) as error:
            why = f"the body is not JSON: {error}"
        else:
            return found
        raise self.not_wane(method, path, why.removeprefix(".").removeprefix(": "))

    def not_wane(self, method: str, path: str, why: str) -> NotWane:
        return NotWane(f"{self.addresses[self.current]} does not answer {method} {path} as Wane does: {why}")

    def reply(
        self,
        method: str,
        path: str,
        body: object,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        *,
        streamed: bool = False,
        socket: Socket | None = None,
    ) -> Plan[Reply]:
        """Returns the first successful reply. `deadline` is a time of `clock`.

        After a connection error, 502, 503 or 504 the next address is tried, but none before its `Retry-After` if
        another may be asked earlier. Once all have been tried, and after 429, it waits, longer each time. With several
        addresses, an attempt may take half of the remaining time, so that a server that hangs leaves time for another.
        Raises WaneError.
        """
        content = None if body is None else json.dumps(body).encode()
        attempts, count = 0, len(self.addresses)
        ready = [0.0] * count  # the times of `clock` from which on each address may be asked again
        failure: WaneError = Unreachable(f"{self.addresses[self.current]} did not answer {method} {path} in time")
        while (left_s := deadline - self.clock()) > 0:
            at = self.current
            timeout_s = min(left_s / 2 if self.retry and count > 1 else left_s, DAY_S)
            told = {**self.headers, **(headers or {}), "x-request-timeout-ms": str(max(1, int(1000 * timeout_s)))}
            if content is not None:
                told["content-type"] = "application/json"
            outcome = yield Send(method, self.addresses[at], path, content, told, timeout_s, streamed, socket)
            if isinstance(outcome, Reply) and 200 <= outcome.status < 300:
                return outcome
            failure = self._failure(method, path, outcome, at)
            status = outcome.status if isinstance(outcome, Reply) else 503
            if not self.retry or status not in RETRIED:
                break
            attempts += 1
            now = self.clock()
            ready[at] = now + (failure.retry_after_s or 0.0)
            if status in NEXT_ADDRESS and self.current == at:  # in turn, but those that may be asked earlier first
                in_turn = [(at + 1 + number) % count for number in range(count)]
                self.current = min(in_turn, key=lambda number: max(ready[number], now))
            wait_s = max(0.0, ready[self.current] - now)
            if self.current == at or attempts % count == 0:
                wait_s = max(wait_s, self.pause_s(attempts // count))
            if wait_s >= deadline - now:
                break
            if wait_s:
                yield Sleep(min(wait_s, DAY_S))
        raise failure

    def _failure(self, method: str, path: str, outcome: Reply | Broken, at: int) -> WaneError:
        """Returns the error of an attempt."""
        address = self.addresses[at]
        if isinstance(outcome, Broken):
            return Unreachable(f"{address} does not answer: {outcome.reason}")
        if outcome.status < 400:
            return self.not_wane(method, path, f"its status is {outcome.status}")
        try:
            document = json.loads(outcome.content)
        except (ValueError, RecursionError):
            document = None
        text = outcome.content[:200].decode(errors="replace")
        return error_of(f"{method} {path}", outcome.status, document, text, _retry_after_s(outcome, document))


def _retry_after_s(reply: Reply, document: Any) -> float | None:
    """Returns the seconds after which to send the request again, from the document or the header `Retry-After`."""
    told = document.get("retry_after_s") if isinstance(document, dict) else None
    if isinstance(told, int | float) and 0 <= told < math.inf:
        return float(told)
    header = reply.headers.get("retry-after", "")
    if header.isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
