"""The limits that `connection.py` enforces: the receive budget, and the reasons for which connections are rejected.

The receive budget covers large bodies only. The memory for heads and small messages is bounded by the limit on
connections. A session's next step is therefore accepted even while many large bodies are being received. The request
metrics and the access log do not include rejected connections, so this module counts and logs them.
"""

from __future__ import annotations

import asyncio
import math
import socket
from enum import StrEnum
from http import HTTPStatus

from wane.service.observability.logs import log_access
from wane.service.observability.metrics import Metrics
from wane.service.settings import Settings

SMALL_BYTES = 1 << 12  # a connection with at most this many unanswered bytes does not use the receive budget


class RejectReason(StrEnum):
    """Why a connection is rejected. The comments name the HTTP status or the close code that the client receives."""

    TOO_MANY = "too_many"  # 503: the connection exceeds the limit on open connections
    LONG_HEAD = "long_head"  # 431: the head of a request is too long
    LONG_TRAILERS = "long_trailers"  # 431: too many bytes of trailers or of chunk lengths
    SLOW_HEAD = "slow_head"  # 408: the head of a request was received too slowly
    # 408: the body was received too slowly, and no route reads it; 1008: a message was received too slowly
    SLOW_BODY = "slow_body"
    FULL = "full"  # 429 or 1013: the receive budget has no room for the received bytes
    MALFORMED = "malformed"  # 400: invalid HTTP; 1002: an invalid frame; 1007: invalid UTF-8
    # 400, 405, 414, 426 or 431: the WebSocket handshake is invalid, or the client sent data before the server's answer
    HANDSHAKE = "handshake"
    UNREAD = "unread"  # no status: the client read nothing, and the kernel aborted the connection
    FRAMES = "frames"  # 1008: too many WebSocket frames without a complete message


class Limits:
    """What all connections of one server share: the settings, the receive budget, and the counts of rejected
    connections. The budget limits the total number of unanswered bytes, which are received bytes of requests and
    messages that are not answered yet. The bytes of a connection that has at most SMALL_BYTES are not counted."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Exports the counter of each reason as 0 from the start."""
        self.settings = settings
        self.most_bytes = max(settings.receive_budget_bytes, 2 * settings.max_body_bytes)
        self.taken_bytes = 0
        self._rejected = {reason: metrics.connections_rejected.labels(reason.value) for reason in RejectReason}

    def has_room(self, count: int) -> bool:
        """Whether the budget has room for `count` more bytes."""
        return self.taken_bytes + count <= self.most_bytes

    def count_rejected(
        self, reason: RejectReason, client: tuple[str, int] | None, status: HTTPStatus | None = None
    ) -> None:
        """Counts and logs one rejected connection. `client` is the client's address and port. `status` is the status of
        the response, or None if no response is sent."""
        self._rejected[reason].inc()
        log_access("refused", {"client": client[0] if client else None, "status": status, "reason": reason.value})


class ReceiveShare:
    """The part of the receive budget that one connection uses."""

    __slots__ = ("_limits", "counted")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.counted = 0

    def resize(self, count: int) -> bool:
        """Sets the connection's number of unanswered bytes to `count`. Returns False, without a change, if the budget
        has no room for the additional bytes. A `count` that is not larger than the previous number always fits."""
        more = (count if count > SMALL_BYTES else 0) - self.counted
        if more > 0 and not self._limits.has_room(more):
            return False
        self.counted += more
        self._limits.taken_bytes += more
        return True


RETRYABLE = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
MOST_MILLISECONDS = 2**31 - 1  # the largest value of TCP_USER_TIMEOUT


def abort_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Makes the kernel abort the connection when the client has acknowledged no byte for `seconds`.

    Only the kernel can detect this. The kernel buffers megabytes, so a transport's writes succeed although the client
    does not read. The time runs from the last byte that the client acknowledged. Later writes do not restart it. After
    the abort the transport reports TimeoutError. On systems without Linux's TCP_USER_TIMEOUT this function does
    nothing.

    The kernel also aborts a client that reads slowly through a receive window smaller than one segment. In a test with
    `seconds` = 30, a client with SO_RCVBUF 4096 that read 2 KB every 0.5 s was reset after 32 s.
    """
    connection = transport.get_extra_info("socket")
    if hasattr(socket, "TCP_USER_TIMEOUT") and connection.family in (socket.AF_INET, socket.AF_INET6):
        milliseconds = min(math.ceil(seconds * 1000), MOST_MILLISECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def bare_answer(status: HTTPStatus, text: bytes = b"") -> bytes:
    """Returns the bytes of the last response on a connection. The response has the header `retry-after` if the client
    may retry."""
    more = b"retry-after: 1\r\n" if status in RETRYABLE else b""
    if text:
        more += b"content-type: text/plain; charset=utf-8\r\n"
    head = b"HTTP/1.1 %d %s\r\n%sconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, status.phrase.encode(), more, len(text)) + text
