"""Steps and predictions over HTTP without ASGI: what one token costs most is the way to the engine and back.

Most requests are for what comes next, in a session or after some tokens, and come whole, in one read of the network.
Such a request is decoded, admitted and begun where it is read, and answered, in one write, where its run is over: no
messages, no middleware, and for a step of a session or a window no task. All others, and all that there is something
wrong with, are left to the application before anything was done for them: what a request means, and what is said of a
bad one, is written there only, and what is the same on both ways is called by both.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from wane.service.api.body import parse
from wane.service.api.deps import registry, session_key
from wane.service.api.exchange import InFlight, InlineInFlight, ResponseSink
from wane.service.api.middleware import ADMITTED, RequestContext, RequestMiddleware
from wane.service.api.routes import predict, sessions
from wane.service.api.schemas.predict import PredictBody
from wane.service.api.schemas.sessions import StepBody

MOST_BYTES = 1 << 12  # of a body, if so many are taken: longer ones are not for a few tokens


class FastPath:
    """Begins requests for what comes next; under the protocol, beside the application."""

    def __init__(self, app: ASGIApp, middleware: RequestMiddleware, step: Route, prediction: Route) -> None:
        """The routes are of the application `app`, which is behind `middleware`."""
        self._app = app
        self._step = step
        self._prediction = prediction
        self.middleware = middleware
        self.most_bytes = min(MOST_BYTES, middleware.max_body_bytes)

    def leads_to(self, scope: Scope) -> bool:
        """Whether a request may be for here, by its method and path; it is then marked with its route."""
        if scope["method"] != "POST" or self.middleware.tracing is not None:
            return False
        path: str = scope["path"]
        if path == self._prediction.path:
            scope["route"], scope["path_params"] = self._prediction, {}
            return True
        match = self._step.path_regex.fullmatch(path) if path.isprintable() else None
        if match is None:
            return False
        scope["route"], scope["path_params"] = self._step, match.groupdict()
        return True

    def begin(self, scope: Scope, body: bytes, exchange: ResponseSink) -> InFlight | None:
        """A request on its way to be answered; None, and nothing done, where it is none for here."""
        if len(body) > self.most_bytes:
            return None
        started_s = time.perf_counter()
        here = scope["wane.context"] = RequestContext.of(scope)
        scope["app"] = self._app
        begin = self._begin_step if scope["route"] is self._step else self._begin_prediction
        try:
            return begin(Request(scope), here, body, exchange, started_s)
        except Exception:  # it is told there, and logged if nobody expected it
            return None

    def _begin_step(
        self, request: Request, here: RequestContext, body: bytes, exchange: ResponseSink, started_s: float
    ) -> InFlight | None:
        given = parse(body, StepBody)
        if given.tokens is None:
            return None
        position = sessions.position(request, given)
        self._admit(request.scope, here)
        session = session_key(request, request.path_params["session"])
        engine = registry(request).engine_at_once(session)
        if engine is None:
            return None
        here.fields["model"] = engine.name
        underway = InlineInFlight(request.scope, here, exchange, self.middleware, engine, started_s)
        try:
            quick = engine.begin(sessions.step(request, session, tuple(given.tokens), position, given))
        except Exception as error:
            underway.fail(error)
            return underway
        if quick is None:
            underway.leave()
            return None
        underway.goes_on(quick, "step")
        return underway

    def _begin_prediction(
        self, request: Request, here: RequestContext, body: bytes, exchange: ResponseSink, started_s: float
    ) -> InFlight | None:
        given = parse(body, PredictBody)
        if given.tokens is None or given.session is not None:
            return None
        self._admit(request.scope, here)
        engine = registry(request).get(given.model)
        asked = predict.asked(request, given, tuple(given.tokens))
        here.fields["model"] = engine.name
        underway = InlineInFlight(request.scope, here, exchange, self.middleware, engine, started_s)
        try:
            quick = engine.begin_window(asked)
        except Exception as error:
            underway.fail(error)
            return underway
        if quick is None:
            underway.wait_for(engine.predict(asked))
        else:
            underway.goes_on(quick, "predict")
        return underway

    def _admit(self, scope: Scope, here: RequestContext) -> None:
        """Does what the door does. Raises what it raises, for it to say so again."""
        self.middleware.set_deadline(here)
        if self.middleware.guard is not None:
            self.middleware.admit(self.middleware.guard, scope, here)
            scope[ADMITTED] = here.principal
