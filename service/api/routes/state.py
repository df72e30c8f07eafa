"""Serves the input of a model's output layer after a session's tokens, for a ranker or an index outside the server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.deps import deadline, session_engine, session_key
from wane.service.api.disconnect import until_hangup
from wane.service.api.openapi import answers
from wane.service.api.routes.sessions import SessionId
from wane.service.types.answer import SessionState

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.head("/{session}/state", include_in_schema=False)
@router.get("/{session}/state", response_model=None, responses=answers(SessionState))
async def state(request: Request, session: SessionId) -> Response:
    """Returns the input of the output layer after the session's tokens. Does not change the session, and does not
    extend its time to live. If the server no longer has the session's state, the server rebuilds the state."""
    name = session_key(request, session)
    engine = await session_engine(request, name)
    with until_hangup(request):
        hidden = await engine.session_state(name, deadline(request))
    return encode.reply(hidden)
