"""Sends results as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from wane.service.api.encode import event
from wane.service.api.exchange import context, note_answer
from wane.service.api.problem import failure_document
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
    """A response that streams results. It closes the stream of results as soon as the client disconnects."""

    def __init__(self, request: Request, results: Stream[Any]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        self.results = results
        self.events = self._events(request, results)
        super().__init__(self.events, headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.results), aclosing(self.events):
            await super().stream_response(send)

    @staticmethod
    async def _events(request: Request, results: Stream[Any]) -> AsyncGenerator[bytes, None]:
        try:
            async for result in results:
                if isinstance(result, Finish):
                    note_answer(request.scope, result)
                yield event(result, EVENTS[type(result)])
        except Exception as error:  # the status is already sent, so a failure must be an event
            document = failure_document(request.scope, error)
            context(request.scope).fields["error"] = document["code"]
            yield event(document, "error")
