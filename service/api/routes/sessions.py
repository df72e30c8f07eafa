"""Serves sessions. A session is a sequence that grows with every step. The server keeps the session's state between
requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from fastapi import Path
from msgspec.structs import replace
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from wane.service.api import encode
from wane.service.api.body import (
    LARGE_BYTES,
    ONE_TOKEN,
    PlainStep,
    PlainSteps,
    decode,
    filter_of,
    only_token,
    plain_steps,
    tokens_of,
)
from wane.service.api.deps import (
    deadline,
    engine_and_key,
    header,
    model_engine,
    owner,
    session_engine,
    session_key,
    settings,
)
from wane.service.api.disconnect import WHOLE_BODY, until_hangup
from wane.service.api.exchange import HISTORY, NEW_ID, admit, context, note_answer, registry
from wane.service.api.openapi import Router, answers, parameters_in
from wane.service.api.problem import failure_document, items
from wane.service.api.schemas.completions import CompletionBody
from wane.service.api.schemas.sessions import (
    ContinuationsBody,
    CopiedSession,
    ForkBody,
    RewindBody,
    SessionBody,
    SessionStepBody,
    StepBody,
    StepsBody,
    StepsFormat,
)
from wane.service.engine.engine import Engine
from wane.service.engine.event_names import EventTokens
from wane.service.engine.pending import step_many
from wane.service.engine.steps.rows import StepRow
from wane.service.errors import EarlierStepFailed, InvalidRequest, UnknownSession, as_result, truncate_repr
from wane.service.registry.registry import other_model
from wane.service.sessions.stores.store import DamagedSession
from wane.service.types.answer import (
    Answer,
    Answers,
    Continuations,
    NewSession,
    SessionState,
    SessionView,
    StepColumns,
)
from wane.service.types.body import IDEMPOTENCY, MAX_KEY_CHARACTERS, SESSION_ID, EventInput, EventsBody, anchored
from wane.service.types.cost import Cost, length_of
from wane.service.types.request import SLASH, ContinuationsRequest, History, Owner, StepRequest, name_within

# This pattern is only for the OpenAPI description. `name_within` rejects an invalid id, because a rejection by the
# framework would not be a problem document.
PATTERN: dict[str, Any] = {"pattern": anchored(SESSION_ID)}
SessionId = Annotated[str, Path(examples=["demo"], description="the session's id", json_schema_extra=PATTERN)]
POSITION = "x-wane-position"
DIGITS = "[0-9]{1,15}"
IDEMPOTENCY_KEY = "idempotency-key"
STEP_HEADER_NAMES = {POSITION.encode(), IDEMPOTENCY_KEY.encode()}
KEY = {IDEMPOTENCY_KEY: (IDEMPOTENCY, {"minLength": 1, "maxLength": MAX_KEY_CHARACTERS})}
"""The description of the header with the idempotency key."""
POSITION_TEXT = "has the same effect as the field `expected_position` of the body"
STEP_HEADERS = parameters_in("header", {POSITION: (POSITION_TEXT, {"pattern": anchored(DIGITS)}), **KEY})

LINKS = {
    name: {
        "operationRef": f"#/paths/~1v1~1sessions~1{{session}}{path}/{method}",
        "parameters": {"session": "$response.body#/session"},
        "description": f"{name}s the session",
    }
    for name, path, method in (
        ("read", "", "get"),
        ("step", "~1tokens", "post"),
        ("rewind", "~1rewind", "post"),
        ("delete", "", "delete"),
    )
}
"""The links from a created session to its routes, for the OpenAPI description."""

CREATED = answers(SessionView, status=201, links=LINKS)

STEPS_AT_ONCE = 16  # of a call with many steps, in one iteration of the event loop
TOP_K = ONE_TOKEN.top_k  # the value of `top_k` for a step without `top_k`

router = Router(prefix="/v1/sessions", tags=["sessions"])


@router.on_post(
    "",
    SessionBody,
    status_code=201,
    responses=CREATED
    | answers(
        SessionView, description="The session already exists with the same options and without steps", links=LINKS
    ),
)
async def create(request: Request) -> Response:
    """Starts a session under the client's id or under a new id. Without a history, the session starts at position 0.
    With a history, the session starts at `position`, and the history has the last tokens before that position.

    Answers 200 with the session if the client sends the same request again before the first step.
    """
    if (content := request.scope.get(HISTORY)) is not None:
        copied = msgspec.json.decode(content, type=CopiedSession)
        engine = await model_engine(request, copied.model)
        view = await engine.create_session(copied.session, copied.mode, owner(request), copied.history)
        return _session_reply(view)
    body = await decode(request, SessionBody)
    engine = await model_engine(request, body.model)
    with until_hangup(request):
        history, unknown = await _history(engine, body, deadline(request))
    view = await engine.create_session(_new_id(request, body), body.mode, owner(request), history)
    if unknown:
        view = replace(view, unknown=unknown)
    return _session_reply(view)


def _new_id(request: Request, body: SessionBody | ForkBody) -> str | None:
    """Returns the id of the new session, or None if the engine chooses it."""
    chosen: str | None = request.scope.get(NEW_ID) if body.session is None else body.session
    return chosen


def _session_reply(view: SessionView) -> Response:
    """Returns the answer to a request that creates a session."""
    status, path = 201 if isinstance(view, NewSession) else 200, f"/v1/sessions/{quote(view.session, safe='')}"
    return encode.reply(view, status, {"location": path})


async def _history(engine: Engine, body: SessionBody, until: float | None) -> tuple[History | None, tuple[str, ...]]:
    """Returns two values: the history that the new session continues (None if the body has no history), and the names
    of the history's events that the vocabulary lacks. Raises InvalidRequest, TooLarge."""
    if body.position is None:
        return None, ()
    read = EventTokens(body.history or ())
    if body.input is not None:
        read = await tokens_of(engine, body.input, until)
    elif body.events is not None:
        read = await tokens_of(engine, EventInput(body.events, body.unknown), until)
    return History(read.tokens, body.position), read.unknown


@router.on_get("/{session}", SessionView)
async def read(request: Request, session: SessionId) -> Response:
    """Returns a session's position and options. Does not extend the session's time to live."""
    engine, name = await engine_and_key(request, session)
    return encode.reply(await engine.get_session(name))


@router.on_get("/{session}/state", SessionState)
async def state(request: Request, session: SessionId) -> Response:
    """Returns the input of the output layer after the session's tokens. Does not change the session, and does not
    extend its time to live. If the server no longer has the session's state, the server rebuilds the state."""
    engine, name = await engine_and_key(request, session)
    with until_hangup(request):
        hidden = await engine.session_state(name, deadline(request))
    return encode.reply(hidden)


@router.delete("/{session}", status_code=204)
async def delete(request: Request, session: SessionId) -> Response:
    """Ends a session."""
    name = session_key(request, session)
    try:
        engine = await session_engine(request, name)
    except DamagedSession:  # nothing says whose session it is, and every engine has the same store
        engine = await model_engine(request)
    with until_hangup(request):
        await engine.delete_session(name, deadline(request))
    return Response(status_code=204)


@router.on_post("/{session}/tokens", StepBody, Answer, extra={"parameters": STEP_HEADERS})
async def append(request: Request, session: SessionId) -> Response:
    """Appends tokens to a session, and predicts the next token. With `expected_position` or `idempotency_key`, a retry
    of a step does not append its tokens again.

    A text is tokenised by itself, so text in pieces has other tokens than the whole text. For a text that grows, rewind
    to the last token that is still the same, and append the ids of the rest (`/tokenize`)."""
    request_context, token = context(request.scope), only_token(request.scope.get(WHOLE_BODY))
    body = ONE_TOKEN if token is not None else await decode(request, StepBody)
    expected_position, idempotency_key, until = body.expected_position, None, request_context.deadline
    if not request_context.headers.keys().isdisjoint(STEP_HEADER_NAMES):
        expected_position = position(request_context.header(POSITION), body.expected_position)
        idempotency_key = request_context.header(IDEMPOTENCY_KEY)
    key = name_within(request_context.owner.name, session)
    engine, creator = registry(request).resident_engine(key), None
    if engine is None or body.create or body.model is not None:
        engine, creator = await engine_to_step(request, key, body, expected_position, until)
    request_context.fields["model"] = engine.name
    if token is not None and idempotency_key is None:
        answer = await engine.step_one(key, token, expected_position, TOP_K, until)
    else:
        if token is not None:
            body = StepBody(tokens=(token,))
        answer = await engine.submit(
            await step_request(engine, key, body, until, creator, expected_position, idempotency_key)
        )
    note_answer(request.scope, answer)
    return encode.reply(answer)


async def step_request(
    engine: Engine,
    session: str,
    body: StepBody,
    deadline: float | None,
    creator: Owner | None,
    expected_position: int | None,
    idempotency_key: str | None,
) -> StepRequest:
    """Converts a body to a request for the engine. `session` is the session's key. Raises InvalidRequest, TooLarge,
    DeadlineExceeded."""
    sequence = await tokens_of(engine, body.sequence, deadline)
    return StepRequest(
        session,
        sequence.tokens,
        body.mode,
        expected_position,
        idempotency_key,
        body.top_k,
        deadline,
        body.prove,
        body.cache,
        filter=await filter_of(engine, body),
        unknown_names=sequence.unknown,
        creator=creator,
    )


async def engine_to_step(
    connection: HTTPConnection,
    session: str,
    body: StepBody | CompletionBody,
    expected_position: int | None,
    deadline: float | None,
) -> tuple[Engine, Owner | None]:
    """Returns the engine for a step of a session, and the step's `creator` (see `StepRequest`). `session` is the
    session's key. If the session does not exist and the step may create it, returns the engine of the body's model.

    Raises the errors of `ModelRegistry.engine_for`, and UnknownModel.
    """
    models, creator = registry(connection), owner(connection) if body.create else None
    try:
        engine = await models.engine_for(session, body.model, deadline)
        if creator is None or engine.name == (body.model or models.default):
            return engine, creator
        # The engine found is not the engine of the body's model, so it cannot create the session. If the session has
        # expired, the step creates a new session with the body's model.
        await engine.get_session(session)
    except UnknownSession:
        if creator is None or expected_position:
            raise
    else:
        return engine, None
    if models.is_coming(body.model):
        await models.wait_for(body.model, deadline)
    return models.get(body.model), creator


def position(in_header: str | None, in_body: int | None) -> int | None:
    """Returns the expected position, from the header or the body. Raises InvalidRequest if the two differ."""
    if in_header is None:
        return in_body
    if not re.fullmatch(DIGITS, in_header):
        raise InvalidRequest(f"{POSITION} must be a whole number, not {truncate_repr(in_header)}", POSITION)
    if in_body not in (None, int(in_header)):
        raise InvalidRequest(
            f"expected_position is {in_body}, but the header {POSITION} says {in_header}",
            "expected_position",
        )
    return int(in_header)


@router.on_post("/{session}/rewind", RewindBody, SessionView)
async def rewind(request: Request, session: SessionId) -> Response:
    """Drops a session's tokens after `position`. The session's next step recomputes the state."""
    body = await decode(request, RewindBody)
    engine, name = await engine_and_key(request, session)
    with until_hangup(request):
        view = await engine.rewind(name, body.position, deadline(request))
    return encode.reply(view)


@router.on_post(
    "/{session}/fork",
    ForkBody,
    status_code=201,
    responses=CREATED
    | answers(SessionView, description="The same fork was made before, and has made no step", links=LINKS),
)
async def fork(request: Request, session: SessionId) -> Response:
    """Starts a session from this session's tokens, at its position or an earlier one. Runs no token: if this session's
    state is in memory, the new session gets a copy. This session does not change.

    Answers 200 with the new session if the client sends the same request again before its first step. Such a request
    must have `position`: without it, it is refused with 409 if this session has made a step in the meantime."""
    body = await decode(request, ForkBody)
    engine, name = await engine_and_key(request, session)
    if HISTORY in request.scope:
        view, history = await engine.history(name, body.position, deadline(request))
        packed = history.snapshot or b""
        return encode.reply(
            CopiedSession(body.session, engine.name, view.mode, tuple(history.tokens), history.position, packed)
        )
    with until_hangup(request):
        view = await engine.fork(name, _new_id(request, body), body.position, owner(request), deadline(request))
    return _session_reply(view)


@router.on_post("/{session}/continuations", ContinuationsBody, Continuations)
async def continuations(request: Request, session: SessionId) -> Response:
    """Scores each continuation as the session's next tokens, and predicts the token after it, in mode recurrent. The
    session does not change."""
    body, until = await decode(request, ContinuationsBody), deadline(request)
    engine, name = await engine_and_key(request, session)
    engine.limits.length(sum(length_of(sequence) for sequence in body.continuations))
    with until_hangup(request):
        sequences, total = list[EventTokens](), 0
        for index, item in enumerate(body.continuations):
            if not isinstance(item, tuple):
                await asyncio.sleep(0)  # lets the event loop run other work between many short texts
            sequence = EventInput(item.events, body.unknown) if isinstance(item, EventsBody) else item
            try:
                sequences.append(await tokens_of(engine, sequence, until))
            except InvalidRequest as error:
                where = f"continuations[{index}]"
                raise InvalidRequest(f"{where}: {error.message}", where) from error
            total += len(sequences[-1].tokens)
            engine.limits.length(total)
        body.cost(settings(request), total).check(settings(request))
        wanted = ContinuationsRequest(
            name,
            tuple(sequence.tokens for sequence in sequences),
            tuple(sequence.unknown for sequence in sequences),
            body.top_k,
            until,
            body.cache,
        )
        scored = await engine.continuations(wanted)
    note_answer(request.scope, scored.results[0])
    return await encode.long_reply(scored)


@router.on_post("/tokens", StepsBody, Answers, StepColumns)
async def append_many(request: Request) -> Response:
    """Appends tokens to many sessions, and predicts the next token of each session. A failed step does not fail the
    steps of other sessions."""
    raw = request.scope.get(WHOLE_BODY) or b""
    plain = plain_steps(raw, settings(request).max_batch_inputs) if len(raw) <= LARGE_BYTES else None
    body: StepsBody | PlainSteps = await decode(request, StepsBody) if plain is None else plain
    for name in (POSITION, IDEMPOTENCY_KEY):
        if header(request, name) is not None:
            raise InvalidRequest(f"{name} is only for calls with one step; here, each step has a field for it", name)
    if isinstance(body, PlainSteps):
        admit(request, Cost(len(body.steps), rows_field="steps"))
    models, until = registry(request), deadline(request)
    if models.is_coming():
        await models.wait_for(deadline=until)
    models.check_ready()
    results = await (
        _step_many(request, body.steps) if isinstance(body, StepsBody) else _step_plain(request, body.steps)
    )
    if body.format is StepsFormat.COLUMNS:
        sessions = [step.session for step in body.steps]
        columns = encode.step_columns(sessions, results, partial(failure_document, request.scope))
        return encode.reply(columns) if plain else await encode.long_reply(columns)
    documents = Answers(items(request.scope, results))
    return encode.reply(documents) if plain else await encode.long_reply(documents)


async def _step_plain(request: Request, steps: Sequence[PlainStep]) -> list[encode.StepResult]:
    """Runs plain steps (see `PlainStep`) of different sessions. Passes them to the sessions' engines with
    `Engine.take_step`. `_step_many` runs the steps that `take_step` refuses."""
    models, request_context = registry(request), context(request.scope)
    prefix = request_context.owner.name + SLASH if request_context.owner.name else ""
    engine: Engine | None = None
    rows: list[StepRow | None] = []
    for step in steps:
        step_fields = prefix + step.session, step.tokens[0], step.expected_position, TOP_K, request_context.deadline
        row = None if engine is None else engine.take_step(*step_fields)
        if row is None and (engine := models.resident_engine(step_fields[0])) is not None:
            row = engine.take_step(*step_fields)
        rows.append(row)
    rest = [
        SessionStepBody(session=step.session, tokens=step.tokens, expected_position=step.expected_position)
        for step, row in zip(steps, rows, strict=True)
        if row is None
    ]
    results: list[encode.StepResult] = []
    try:
        others = iter(await _step_many(request, rest) if rest else ())
        for row in rows:
            try:
                results.append(next(others) if row is None else await row)
            except Exception as error:
                results.append(as_result(error))
    except BaseException:
        for row in filter(None, rows):
            row.cancel()
        raise
    return results


async def _step_many(request: Request, bodies: Sequence[SessionStepBody]) -> list[encode.StepResult]:
    """Submits every step to the engine of the step's session. All steps of one session run on the same engine, even if
    another version of the session's model is loaded during the call."""
    until = deadline(request)
    results: list[encode.StepResult | None] = [None] * len(bodies)
    engines: dict[str, Engine] = {}
    creators: dict[str, Owner | None] = {}
    steps: dict[int, StepRequest] = {}
    failed: set[str] = set()
    owner_name = owner(request).name
    for index, body in enumerate(bodies):
        try:
            if body.session in failed:
                raise EarlierStepFailed(body.session)
            session = name_within(owner_name, body.session)
            if session in engines:
                engine, creator = engines[session], creators[session]
                if body.model not in (None, engine.name):
                    raise other_model(session, engine.name, body.model)
            else:
                engine, creator = await engine_to_step(request, session, body, body.expected_position, until)
            engines[session], creators[session] = engine, creator
            if body.tokens is None or index % STEPS_AT_ONCE == STEPS_AT_ONCE - 1:
                await asyncio.sleep(0)  # lets the event loop run other work
            steps[index] = await step_request(
                engine, session, body, until, creator, body.expected_position, body.idempotency_key
            )
        except Exception as error:
            failed.add(body.session)
            results[index] = as_result(error)
    outcomes = await step_many(lambda step: engines[step.session].submit(step), [*steps.values()])
    for index, outcome in zip(steps, outcomes, strict=True):
        results[index] = outcome
    return [result for result in results if result is not None]
