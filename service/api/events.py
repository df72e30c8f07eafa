"""Sends results as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from wane.service.api.encode import event
from wane.service.api.exchange import context, note_answer
from wane.service.api.problem import Failure, described
from wane.service.engine.stream import Stream
from wane.service.types.text import Finish, GeneratedToken, ScoredTokens, ScoreProgress, ScoreSummary

EVENTS: dict[type, str] = {
    GeneratedToken: "token",
    Finish: "finish",
    ScoreProgress: "progress",
    ScoredTokens: "tokens",
    ScoreSummary: "finish",
}
"""The name of the event for each type of result. The event of a failure is `error`."""


class EventStream(StreamingResponse):
    """A response that streams results. It closes them, or what holds them, as soon as the client disconnects."""

    last = b""
    """What is sent after the last result, if nothing failed."""

    def __init__(
        self, request: Request, results: Stream[Any] | AsyncGenerator[Any, None], held: AsyncExitStack | None = None
    ) -> None:
        """`held` closes the results and their sources; None: only the results are to be closed."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self._held = held or results
        self._events = self._encoded(request, results)
        super().__init__(self._events, headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._held), aclosing(self._events):
            await super().stream_response(send)

    async def _encoded(
        self, request: Request, results: Stream[Any] | AsyncGenerator[Any, None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            async for result in results:
                if isinstance(result, Finish):
                    note_answer(request.scope, result)
                yield event(result, EVENTS.get(type(result), ""))
            if self.last:
                yield self.last
        except Exception as error:  # the status is already sent, so a failure must be an event
            failure = described(request.scope, error)
            context(request.scope).fields["error"] = failure.code
            yield self.failed(request, failure)

    def failed(self, request: Request, failure: Failure) -> bytes:
        """Returns the event of a failure."""
        return event(failure.body(context(request.scope).request_id), "error")
