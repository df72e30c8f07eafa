"""How long the server waits for a client, and how much it keeps for one: what its connections may cost.

uvicorn reads what comes, and writes what there is to write, however long that takes. Here a connection has so much time
for the head of a request, so much for its body, and so much to read what it is sent; and there are so many connections.
`patient_http.py` and `patient_websocket.py` see to it; what went wrong before there is a request to answer they answer
themselves, in bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from service.intake import Intake, Share
from service.refusals import Reason, Refusals
from service.settings import Settings

COME_AGAIN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
DEAF_S = 2.0  # for a client to read its answer, after which what it still sends is no longer taken


@dataclass(frozen=True, slots=True)
class Patience:
    """`connections` at a time; `header_bytes` of a request's head; seconds for a head, for a body, and until something
    that was sent is read."""

    connections: int
    header_bytes: int
    header_s: float
    body_s: float
    send_s: float

    @classmethod
    def of(cls, settings: Settings) -> Patience:
        """What the operator chose."""
        return cls(
            settings.max_connections,
            settings.max_header_bytes,
            settings.header_timeout_s,
            settings.body_timeout_s,
            settings.send_timeout_s,
        )


class Patient(asyncio.Protocol):
    """What every connection has, whatever is spoken on it: to be put before one of uvicorn's protocols. Whoever reads
    nothing of what there is to read, for so long, is cut off."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    client: tuple[str, int] | None

    def __init__(self, *given: Any, patience: Patience, refusals: Refusals, intake: Intake, **named: Any) -> None:
        super().__init__(*given, **named)
        self.patience = patience
        self.refusals = refusals
        self.share = Share(intake)
        self.timer: asyncio.TimerHandle | None = None  # runs while something comes in that is not whole
        self.unread: asyncio.TimerHandle | None = None  # runs while there is more to read than the network takes

    def tell(self, reason: Reason, status: HTTPStatus | None = None) -> None:
        """Why the connection is ended, and what its client is told."""
        self.refusals.tell(reason, self.client, status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.at_ease()
        self.all_is_read()
        super().connection_lost(exc)

    def at_ease(self) -> None:
        """Nothing is waited for."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.unread is None:
            self.unread = self.loop.call_later(self.patience.send_s, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.all_is_read()

    def all_is_read(self) -> None:
        """Or nobody is there any more who would read it."""
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def cut_off(self) -> None:
        """The time is up for what there is to read."""
        self.unread = None
        self.tell(Reason.UNREAD)
        self.transport.abort()


def bare_answer(status: HTTPStatus) -> bytes:
    """The last answer on a connection, which says its status, whether to come again, and nothing else."""
    again = b"retry-after: 1\r\n" if status in COME_AGAIN else b""
    phrase = status.phrase.encode()
    return b"HTTP/1.1 %d %s\r\n%sconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, phrase, again)
