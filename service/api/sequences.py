"""Sequences of the Open Inference Protocol. A sequence of model M with id I is the session `M:I`.

The first colon ends the model's name, because a model's name has no colon.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.requests import Request

from wane.service.api.deps import deadline, note_model, owner, session_engine, session_key
from wane.service.api.exchange import HISTORY, registry
from wane.service.api.schemas.inference import LARGEST_ID, InferParameters
from wane.service.api.schemas.sessions import SessionBody
from wane.service.engine.engine import Engine
from wane.service.errors import (
    InvalidRequest,
    SessionExists,
    TokenizerChanged,
    Unavailable,
    UnknownSession,
    truncate_repr,
)
from wane.service.types.request import SESSION_RULE, History, id_of

STARTS = 3
"""The number of attempts to start a sequence that other clients start at the same time."""


def sequence_id(parameters: InferParameters, name: str = "sequence_id") -> str | None:
    """Returns the id of the request's sequence, or of the sequence in another parameter. Returns None if the request
    has no such sequence. Raises InvalidRequest."""
    sequence: str | int | None = getattr(parameters, name)
    if sequence is None or sequence == "" or sequence == 0:
        return None
    if isinstance(sequence, int) and not 0 < sequence <= LARGEST_ID:
        raise InvalidRequest(f"{name} is {truncate_repr(sequence)}, but must be from 0 to 2^64 - 1", name)
    return str(sequence)


def sequence_key(request: Request, engine: Engine, sequence: str) -> str:
    """Returns the key of the sequence's session. Raises InvalidRequest."""
    try:
        return session_key(request, f"{engine.name}:{sequence}")
    except InvalidRequest as error:
        raise InvalidRequest(
            f"sequence_id is {truncate_repr(sequence)}, but the model's name, a colon and the id must together be "
            f"{SESSION_RULE}",
            "sequence_id",
        ) from error


async def sequence_engine(request: Request, engine: Engine, key: str, sequence: str) -> Engine:
    """Returns the engine of an existing sequence. It is the model's engine, or the engine of the version with which the
    sequence began. Raises InvalidRequest if there is no such sequence."""
    resident = registry(request).resident_engine(key)
    if resident is engine:
        return resident
    try:
        return await session_engine(request, key, engine.name)
    except UnknownSession as error:
        raise no_sequence(sequence) from error


async def start_sequence(
    request: Request, engine: Engine, key: str, begin: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Deletes the sequence if it exists, and starts it with `begin`, by default at position 0. Raises SessionExists if
    other clients start the same sequence during each of STARTS attempts."""
    begin = begin or partial(engine.create_session, id_of(key), None, owner(request), None)
    until = deadline(request)
    for attempt in range(STARTS):
        try:
            older: Engine | None = await session_engine(request, key)
        except UnknownSession:
            older = None
        except TokenizerChanged:  # the sequence began with another tokenizer than that of the served version
            older = engine
        if older is not None:
            await delete_sequence(older, key, until)
        try:
            await begin()
        except SessionExists:
            if attempt == STARTS - 1:
                raise
        else:
            break
    note_model(request, engine)


async def fork_of(
    request: Request, engine: Engine, key: str, parameters: InferParameters, sequence: str
) -> tuple[Engine, Callable[[], Awaitable[object]]]:
    """Returns the engine of the sequence from whose tokens the request starts the sequence with the key `key`, and a
    function that starts it. Raises InvalidRequest if there is no such sequence, or if its stored tokens do not reach
    back to the position."""
    until, position = deadline(request), parameters.expected_position
    copied: tuple[int, bytes] | None = request.scope.get(HISTORY)
    if copied is not None:  # another worker has the sequence
        status, content = copied
        if status == HTTPStatus.NOT_FOUND:
            raise no_sequence(sequence, "fork_of")
        if status != HTTPStatus.OK:
            detail = str(msgspec.json.decode(content).get("detail"))
            if status == HTTPStatus.UNPROCESSABLE_ENTITY:
                raise InvalidRequest(detail, "expected_position")
            raise Unavailable(detail)
        body = msgspec.json.decode(content, type=SessionBody)
        past = History(tuple(body.history or ()), body.position or 0)
        return engine, partial(engine.create_session, id_of(key), body.mode, owner(request), past)
    source = sequence_key(request, engine, sequence)
    try:
        engine = await sequence_engine(request, engine, source, sequence)
        await engine.history(source, position, until)  # checks the position before the sequence of this id is deleted
    except (InvalidRequest, UnknownSession) as error:
        if isinstance(error, InvalidRequest) and error.field == "position":
            raise
        raise no_sequence(sequence, "fork_of") from error
    return engine, partial(engine.fork, source, id_of(key), position, owner(request), until)


async def delete_sequence(engine: Engine, key: str, until: float | None) -> None:
    """Ends the sequence. Does nothing if another client has ended it, or if it has expired."""
    with suppress(UnknownSession):
        await engine.delete_session(key, until)


def no_sequence(sequence: str, field: str = "sequence_id") -> InvalidRequest:
    """Returns the error for a sequence that does not exist."""
    return InvalidRequest(
        f"there is no sequence {truncate_repr(sequence)}: it was not started, was ended, or has expired; begin it with "
        "sequence_start",
        field,
    )
