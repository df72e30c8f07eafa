"""Passes the most frequent request, a step of one token without options, to the worker of its session.

The worker that accepted the request checks, counts and logs it. Only the step goes to the session's worker, and only
its answer comes back. Every other request is passed on as a whole (`links.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from logging import INFO
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope

from wane.service import errors
from wane.service.api import encode
from wane.service.api.body import ENCODING, SHORT, OneToken
from wane.service.api.disconnect import until_hangup
from wane.service.api.exchange import HttpExchange, RequestPolicy, fields_of
from wane.service.api.middleware import RequestMiddleware
from wane.service.api.routes.sessions import STEP_HEADER_NAMES, TOP_K
from wane.service.app import Application
from wane.service.errors import WaneError
from wane.service.observability.logs import ACCESS, SERVICE
from wane.service.registry.registry import ModelRegistry
from wane.service.types.answer import Answer
from wane.service.types.request import MAX_POSITION, name_within
from wane.service.workers.links import Peers, connection_of

STEP = "wane.step"  # the key of a scope that has the step, and its worker
OF_OPTIONS = frozenset({ENCODING.encode(), *STEP_HEADER_NAMES})


class PlainStep(OneToken):
    """A step with one token and no option but `expected_position`."""

    expected_position: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)] | None = None


read = msgspec.json.Decoder(PlainStep).decode


class PassedSteps(RequestMiddleware):
    """Answers plain steps of other workers' sessions."""

    def __init__(self, app: Application, peers: Peers, policy: RequestPolicy) -> None:
        super().__init__(app, policy=policy)
        self._matches = app.hot.matches
        self._peers = peers
        # a trace needs the whole request in the session's worker
        self._most_bytes = -1 if policy.tracing is not None else min(SHORT, policy.max_body_bytes)

    def takes(self, scope: Scope, worker: int) -> bool:
        """Returns whether a request for a session of `worker` is a plain step. If so, stores the step in the scope."""
        content = connection_of(scope).content
        if content is None or len(content) > self._most_bytes or not scope["path"].endswith("/tokens"):
            return False
        for name, _ in scope["headers"]:
            if name in OF_OPTIONS:
                return False
        try:
            step = read(content)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        scope[STEP] = step, worker
        return self._matches(scope)

    async def answer(self, scope: Scope, receive: Receive, exchange: HttpExchange) -> None:  # noqa: ARG002
        """Answers an admitted request."""
        here = exchange.context
        step, worker = scope[STEP]
        session = name_within(here.owner.name, scope["path_params"]["session"])
        link = await self._peers.link(worker)
        with until_hangup(Request(scope)):
            asked = session, step.tokens[0], step.expected_position, here.timeout_s
            has_succeeded, found, fields = await link.step(asked, self._peers.timeout_s)
        if not has_succeeded:
            raise error_of(found, fields)
        here.fields |= fields
        await exchange.reply(encode.Reply(found))


def error_of(name: str, members: dict[str, Any]) -> Exception:
    """Returns the error with which a step failed in another worker. `members` are the error's attributes."""
    kind = getattr(errors, name, None)
    if kind is None:
        return RuntimeError(f"the other worker failed: {name}")
    error: WaneError = kind.__new__(kind, members["message"])
    error.__dict__.update(members)
    return error


class Step:
    """A step that another worker has passed to this one. Calls `reply` once with its outcome, unless the client leaves:
    true, the body of the answer and the fields of the access log, or false and the arguments of `error_of`."""

    def __init__(
        self, app: Application, reply: Callable[[object], None], asked: tuple[str, int, int | None, float]
    ) -> None:
        session, token, expected_position, timeout_s = asked
        loop = asyncio.get_running_loop()
        models: ModelRegistry = app.state.registry
        given = session, token, expected_position, TOP_K, loop.time() + timeout_s
        self._reply = reply
        self._epoch = app.state.policy.epochs.enter()
        self._model = ""
        engine = models.resident_engine(session)
        if engine is None:
            self._running: asyncio.Future[Answer] = loop.create_task(self._find(models, given))
        else:
            self._model = engine.name
            self._running = engine.step_one(*given)
        self._running.add_done_callback(self._end)

    async def _find(self, models: ModelRegistry, given: tuple[str, int, int | None, int, float]) -> Answer:
        engine = await models.engine_for(given[0], None, given[-1])
        self._model = engine.name
        return await engine.step_one(*given)

    def leave(self) -> None:
        """The client has left, or waits no longer."""
        self._running.cancel()

    def _end(self, running: asyncio.Future[Answer]) -> None:
        self._epoch.leave()
        if running.cancelled():
            self._reply((False, "Unavailable", vars(errors.Unavailable("the server is stopping"))))
            return
        error = running.exception()
        if error is None:
            answer = running.result()
            fields = {"model": self._model, **fields_of(answer)} if ACCESS.isEnabledFor(INFO) else {}
            self._reply((True, encode.reply(answer).body, fields))
        elif isinstance(error, WaneError):
            known = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
            self._reply((False, known, vars(error)))
        else:
            SERVICE.error("a step that another worker has passed on failed", exc_info=error)
            self._reply((False, type(error).__name__, {}))
