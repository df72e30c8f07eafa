"""Limits the costs of a connection: limits, timeouts, the receive budget, and counts of rejected connections.

uvicorn waits as long as a client takes. Here there are timeouts for the head of a request, for its body, and for
reading a response, and a limit on the number of connections. `http_protocol.py` and `websocket_protocol.py` enforce
them. A connection that they reject never becomes a request, so it is counted and logged here.

The receive budget covers large bodies only. The number of connections limits heads, and messages of some KiB, so a
session's next step is accepted even while many large bodies are being received.
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

SMALL_BYTES = 1 << 12  # unanswered bytes of a connection that do not count against the budget


class ReceiveBudget:
    """Counts the unanswered bytes of all connections that have more than SMALL_BYTES of them."""

    def __init__(self, most: int) -> None:
        """`most`: bytes, over all connections."""
        self.most = most
        self.taken = 0

    def has_room(self, count: int) -> bool:
        """Whether `count` more bytes fit now."""
        return self.taken + count <= self.most


class ReceiveShare:
    """The unanswered bytes of one connection."""

    __slots__ = ("counted", "receive_budget")

    def __init__(self, receive_budget: ReceiveBudget) -> None:
        self.receive_budget = receive_budget
        self.counted = 0

    def is_now(self, count: int) -> bool:
        """Notes that the connection has `count` unanswered bytes. Returns False, and notes nothing, if the budget has
        no room for them. A smaller count than before always fits."""
        more = (count if count > SMALL_BYTES else 0) - self.counted
        if more > 0 and not self.receive_budget.has_room(more):
            return False
        self.counted += more
        self.receive_budget.taken += more
        return True


class RejectReason(StrEnum):
    """Why a connection is rejected, and the status that the client receives."""

    TOO_MANY = "too_many"  # open connections: 503
    LONG_HEAD = "long_head"  # 431
    LONG_TRAILERS = "long_trailers"  # or too many bytes of chunk lengths: 431
    SLOW_HEAD = "slow_head"  # 408
    SLOW_BODY = "slow_body"  # no handler waits for it (else the middleware answers): 408; a slow message: 1008
    FULL = "full"  # the receive budget: 429; 1013
    MALFORMED = "malformed"  # invalid HTTP: 400; an invalid frame: 1002; invalid UTF-8: 1007
    HANDSHAKE = "handshake"  # of a WebSocket: invalid, or too late: 400, 405, 414, 426, 431
    UNREAD = "unread"  # the client read nothing, and the kernel aborted the connection
    FRAMES = "frames"  # of a WebSocket: too many that end no message: 1008


class RejectedConnections:
    """Counts rejected connections by reason, and logs each. Each count is exported from the start, as 0."""

    def __init__(self, metrics: Metrics) -> None:
        self._counted = {reason: metrics.connections_rejected.labels(reason.value) for reason in RejectReason}

    def tell(self, reason: RejectReason, client: tuple[str, int] | None, status: HTTPStatus | None = None) -> None:
        """Counts and logs one. `client`: address and port. `status`: of the response, if there is one."""
        self._counted[reason].inc()
        log_access("refused", {"client": client[0] if client else None, "status": status, "reason": reason.value})


RETRYABLE = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
MOST_MILLISECONDS = 2**31 - 1  # the largest value of the socket option
DEAF_S = 2.0  # time for a rejected client to read its answer, before the connection is closed


class TimeoutProtocol(asyncio.Protocol):
    """A mixin for uvicorn's protocols: the limits, the receive share and the timer of a connection. It reports a
    connection that the kernel aborted because the client read nothing (see `abort_unread`)."""

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
        self.timer: asyncio.TimerHandle | None = None  # runs while a head, a body or a message is incomplete

    def tell(self, reason: RejectReason, status: HTTPStatus | None = None) -> None:
        """Reports that the connection is rejected."""
        self.rejected.tell(reason, self.client, status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.at_ease()
        if isinstance(exc, TimeoutError):
            self.tell(RejectReason.UNREAD)
        super().connection_lost(exc)

    def at_ease(self) -> None:
        """Stops the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def abort_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Has the kernel abort the connection once the client has accepted no byte for `seconds`.

    Only the kernel can notice this: it buffers megabytes, so a transport's writes succeed although the client does not
    read. It measures from the last byte that the client accepted; later writes give the client no more time. The
    transport then reports TimeoutError. Systems without Linux's TCP_USER_TIMEOUT abort nothing.

    The kernel also aborts a client that reads slowly through a receive window smaller than one segment. A client with
    SO_RCVBUF 4096 that read 2 KB each 0.5 s was reset after 32 s, where `seconds` was 30.
    """
    connection = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):
        milliseconds = min(math.ceil(seconds * 1000), MOST_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def bare_answer(status: HTTPStatus, text: bytes = b"") -> bytes:
    """Returns the bytes of the last response on a connection, with a `retry-after` if the client may retry."""
    more = b"retry-after: 1\r\n" if status in RETRYABLE else b""
    if text:
        more += b"content-type: text/plain; charset=utf-8\r\n"
    head = b"HTTP/1.1 %d %s\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, status.phrase.encode(), more, len(text)) + text
