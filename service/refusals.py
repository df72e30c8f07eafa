"""Connections that the server ends by itself, of which no request's line in the log, and no request's metric, tells."""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus

from service.logs import log_access
from service.metrics import Metrics


class Reason(StrEnum):
    """Why a connection is ended."""

    TOO_MANY = "too_many"  # connections are open: 503
    LONG_HEAD = "long_head"  # 431
    LONG_TRAILERS = "long_trailers"  # or lengths of chunks, or what else comes with a body and is not the body: 431
    SLOW_HEAD = "slow_head"  # 408
    SLOW_BODY = "slow_body"  # that nobody waits for: where somebody does, the door answers 408 and counts the request;
    # or a WebSocket's message: 1008
    FULL = "full"  # of bodies and messages that are not answered: 429; 1013
    MALFORMED = "malformed"  # no HTTP: 400; no frame: 1002; no text: 1007
    HANDSHAKE = "handshake"  # of a WebSocket, which is none, or is not waited for: 400, 405, 414, 426, 431
    UNREAD = "unread"  # what was sent: aborted by the kernel
    FRAMES = "frames"  # of a WebSocket, too many that end no message: 1008


class Refusals:
    """Counts them by their reason, which is there from the beginning, and logs each."""

    def __init__(self, metrics: Metrics) -> None:
        self._counted = {reason: metrics.refused_connections.labels(reason.value) for reason in Reason}

    def tell(self, reason: Reason, client: tuple[str, int] | None, status: HTTPStatus | None = None) -> None:
        """Of a connection of `client`, by address and port, which is answered with this status; None: with none."""
        self._counted[reason].inc()
        log_access("refused", {"client": client[0] if client else None, "status": status, "reason": reason.value})
