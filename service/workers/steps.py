"""Passes the most frequent request, a step of a session, to the worker of its session.

The worker that accepted the request checks, counts and logs it. Only the step goes to the session's worker, and only
its answer comes back. Every other request is passed on as a whole (`links.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from logging import INFO
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from wane.service.api import encode
from wane.service.api.body import FAILURES, SHORT, OneToken, reader
from wane.service.api.disconnect import WHOLE_BODY, until_hangup
from wane.service.api.exchange import HttpExchange, RequestContext, fields_of
from wane.service.api.middleware import RequestMiddleware
from wane.service.api.routes.sessions import STEP_HEADER_NAMES, TOP_K, append
from wane.service.app import Application
from wane.service.errors import Unavailable, WaneError
from wane.service.net.connection import CONNECTION
from wane.service.observability.logs import ACCESS, SERVICE
from wane.service.types.answer import Answer
from wane.service.types.request import MAX_POSITION, Owner, id_of, name_within, owner_of
from wane.service.workers.links import Peers

ANSWER = "wane.answer"  # the key of a scope with the function that answers the request
Asked = tuple[str, bytes, dict[bytes, bytes], float, int | None]
"""What the session's worker gets: the session's name, the body, the headers of STEP_HEADER_NAMES, the timeout in
seconds, and the largest number of sessions of the owner."""


class PlainStep(OneToken):
    """A step with one token and no option but `expected_position`."""

    expected_position: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)] | None = None


def plain_step(content: bytes) -> PlainStep | None:
    """Returns a step without further options, or None for any other body, valid or invalid."""
    try:
        return None if len(content) > SHORT else reader(PlainStep).decode(content)
    except FAILURES:
        return None


class Exchanged(RequestMiddleware):
    """Calls the function at ANSWER in the scope of an admitted request."""

    async def answer(self, scope: Scope, receive: Receive, exchange: HttpExchange) -> None:  # noqa: ARG002
        """See `RequestMiddleware`."""
        await scope[ANSWER](exchange)


async def pass_step(scope: Scope, worker: int, peers: Peers, exchange: HttpExchange) -> None:
    """Answers a step of a session of `worker`, whose whole body has been received. The session's worker makes it."""
    context = exchange.context
    session = name_within(context.owner.name, scope["path_params"]["session"])
    headers = {name: context.headers[name] for name in STEP_HEADER_NAMES if name in context.headers}
    asked: Asked = session, scope["state"][CONNECTION].content, headers, context.timeout_s, context.owner.sessions
    with until_hangup(Request(scope)):
        body, fields = await peers.step(worker, asked)
    context.fields |= fields
    await exchange.reply(encode.Reply(body))


class Step:
    """A step that another worker has passed to this one. Calls `reply` once with its outcome: the error, or None
    and the body of the answer with the fields of the access log."""

    def __init__(self, app: Application, reply: Callable[[BaseException | None, object], None], asked: Asked) -> None:
        session, content, headers, timeout_s, most_sessions = asked
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._reply = reply
        self._epoch = app.state.policy.epochs.enter()
        self._fields: dict[str, object] = {}
        self._running: asyncio.Future[Answer] | asyncio.Task[Response]
        step = None if headers else plain_step(content)
        engine = None if step is None else app.state.registry.resident_engine(session)
        if step is None or engine is None:
            context = RequestContext("", headers=headers, deadline=deadline, fields=self._fields)
            context.owner = Owner(owner_of(session), most_sessions)
            request = Request({"type": "http", "app": app, "wane.context": context, WHOLE_BODY: content})
            self._running = loop.create_task(append(request, id_of(session)))
        else:
            self._fields["model"] = engine.name
            self._running = engine.step_one(session, step.tokens[0], step.expected_position, TOP_K, deadline)
        self._running.add_done_callback(self._end)

    def end(self, error: Exception | None, result: object = None) -> None:  # noqa: ARG002
        """The client has left, or waits no longer."""
        self._running.cancel()

    def _end(self, running: asyncio.Future[Answer] | asyncio.Future[Response]) -> None:
        self._epoch.leave()
        if running.cancelled():
            self._reply(Unavailable("the server is stopping"), None)
            return
        error = running.exception()
        if error is not None:
            if not isinstance(error, WaneError):
                SERVICE.error("a step that another worker has passed on failed", exc_info=error)
            self._reply(error, None)
            return
        answer = running.result()
        if isinstance(answer, Answer):
            self._fields |= fields_of(answer) if ACCESS.isEnabledFor(INFO) else {}
            answer = encode.reply(answer)
        self._reply(None, (answer.body, self._fields))
