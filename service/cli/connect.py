"""What `wane compare` and `wane report` share: a client whose requests are traced, and the errors of a command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from wane.client import Wane
from wane.service.observability.tracing import Parent, Tracing

Document = dict[str, Any]

TIMEOUT_S = 60
PARENT_VARIABLE = "TRACEPARENT"


class CommandError(Exception):
    """The command failed because of its arguments, its input or a server. The message says why."""


class TracedTransport(httpx.AsyncHTTPTransport):
    """Records a span for every request. If the environment variable TRACEPARENT is set, each span has the parent that
    this variable names."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__()
        self._tracing = tracing
        self._parent = Parent.of(os.environ.get(PARENT_VARIABLE, "").encode())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with self._tracing.calling(request.method, request.url.path, self._parent) as headers:
            request.headers.update(headers)
            return await super().handle_async_request(request)


def connect(url: str, tracing: Tracing | None, transport: httpx.AsyncBaseTransport | None = None) -> Wane:
    """Returns a client that sends each request once, because a command measures latencies, and names a server that
    does not answer. Raises CommandError if `url` is not an address."""
    if tracing is not None:
        transport = TracedTransport(tracing)
    try:
        return Wane(url, deadline_s=TIMEOUT_S, retry=False, transport=transport)
    except ValueError as error:
        raise CommandError(str(error)) from error


@contextmanager
def traced() -> Iterator[Tracing | None]:
    """Yields the object that traces the calls of one command. Yields None if the environment variables of OpenTelemetry
    do not enable tracing."""
    logging.basicConfig(format="%(message)s")
    tracing = Tracing.open(os.environ)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()
