"""What a connection may cost: limits, timeouts, the budget of bytes being received, counts of rejected connections.

uvicorn reads what comes, and writes what there is to write, however long that takes. Here a connection has a limited
time for the head of a request, for its body, and to read what it is sent; and the number of connections is limited.
`http_protocol.py` and `websocket_protocol.py` hold connections to these limits. What goes wrong before there is a
request they answer themselves, in bytes; no request's log line or metric tells of it, so it is counted and logged here.

The receive budget covers large bodies only. The head of a connection, and messages of some KiB, are bounded by the
number of connections: a session's next step is taken whatever large bodies are being received.
"""

from __future__ import annotations

import asyncio
import math
import socket
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from wane.service.observability.logs import log_access
from wane.service.observability.metrics import Metrics
from wane.service.settings import Settings

SMALL_BYTES = 1 << 12  # that a connection may have under way uncounted


class ReceiveBudget:
    """Counts the bytes that came and are not answered, on those connections that have more than a few."""

    def __init__(self, most: int) -> None:
        """`most`: bytes, over all connections."""
        self.most = most
        self.taken = 0

    def has_room(self, count: int) -> bool:
        """Whether `count` more bytes fit now."""
        return self.taken + count <= self.most


class ReceiveShare:
    """What one connection has under way."""

    __slots__ = ("counted", "receive_budget")

    def __init__(self, receive_budget: ReceiveBudget) -> None:
        self.receive_budget = receive_budget
        self.counted = 0

    def is_now(self, count: int) -> bool:
        """Notes that the connection has `count` bytes under way; or, where there is no room for more, notes nothing
        and says False. What is less than it was always fits."""
        more = (count if count > SMALL_BYTES else 0) - self.counted
        if more > 0 and not self.receive_budget.has_room(more):
            return False
        self.counted += more
        self.receive_budget.taken += more
        return True


class RejectReason(StrEnum):
    """Why a connection is ended."""

    TOO_MANY = "too_many"  # connections are open: 503
    LONG_HEAD = "long_head"  # 431
    LONG_TRAILERS = "long_trailers"  # or lengths of chunks, or what else comes with a body and is not the body: 431
    SLOW_HEAD = "slow_head"  # 408
    SLOW_BODY = "slow_body"  # no handler waits for it (where one does, the middleware answers 408 and counts the
    # request); or a WebSocket's message: 1008
    FULL = "full"  # of bodies and messages that are not answered: 429; 1013
    MALFORMED = "malformed"  # no HTTP: 400; no frame: 1002; no text: 1007
    HANDSHAKE = "handshake"  # of a WebSocket: invalid, or too late: 400, 405, 414, 426, 431
    UNREAD = "unread"  # what was sent: aborted by the kernel
    FRAMES = "frames"  # of a WebSocket, too many that end no message: 1008


class RejectedConnections:
    """Counts them by their reason, which is there from the beginning, and logs each."""

    def __init__(self, metrics: Metrics) -> None:
        self._counted = {reason: metrics.connections_rejected.labels(reason.value) for reason in RejectReason}

    def tell(self, reason: RejectReason, client: tuple[str, int] | None, status: HTTPStatus | None = None) -> None:
        """Of a connection of `client`, by address and port, which is answered with this status; None: with none."""
        self._counted[reason].inc()
        log_access("refused", {"client": client[0] if client else None, "status": status, "reason": reason.value})


COME_AGAIN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
MOST_MILLISECONDS = 2**31 - 1  # that a socket's option holds
DEAF_S = 2.0  # for a client to read its answer, after which what it still sends is no longer taken


class TimeoutProtocol(asyncio.Protocol):
    """The part that every connection has, whatever protocol it speaks: a mixin for one of uvicorn's protocols. It
    counts and logs a connection that the kernel aborted because the client read nothing (see `abort_unread`)."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None

    def __init__(
        self,
        *given: Any,
        settings: Settings,
        rejected: RejectedConnections,
        receive_budget: ReceiveBudget,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        self.settings = settings
        self.rejected = rejected
        self.share = ReceiveShare(receive_budget)
        self.timer: asyncio.TimerHandle | None = None  # runs while something comes in that is not whole

    def tell(self, reason: RejectReason, status: HTTPStatus | None = None) -> None:
        """Why the connection is ended, and what its client is told."""
        self.rejected.tell(reason, self.client, status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.at_ease()
        if isinstance(exc, TimeoutError):
            self.tell(RejectReason.UNREAD)
        super().connection_lost(exc)

    def at_ease(self) -> None:
        """Nothing is waited for."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def abort_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Has the kernel abort the connection once the client has accepted no byte of what was sent to it for `seconds`.

    Only the kernel can tell. A write of ours succeeds as long as the kernel has room for it, which is megabytes, so the
    transport never notices that nobody reads a stream of small events, or the end of an answer. The kernel counts from
    the last byte that the client accepted, and what we write meanwhile gives the client no more time. The transport
    then reports TimeoutError. Systems without TCP_USER_TIMEOUT, which is Linux's, abort nothing.

    The kernel also aborts a client that reads, but slowly and through a receive window smaller than one segment. A
    client with SO_RCVBUF 4096 that read 2 KB each 0.5 s was reset after 32 s, where `seconds` was 30.
    """
    connection = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):
        milliseconds = min(math.ceil(seconds * 1000), MOST_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def bare_answer(status: HTTPStatus, text: bytes = b"") -> bytes:
    """The last answer on a connection: its status, whether to come again, and a `text`, if there is one."""
    more = b"retry-after: 1\r\n" if status in COME_AGAIN else b""
    if text:
        more += b"content-type: text/plain; charset=utf-8\r\n"
    head = b"HTTP/1.1 %d %s\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, status.phrase.encode(), more, len(text)) + text
