"""Sequences of the Open Inference Protocol. A sequence of model M with id I is the session `M:I`.

The first colon ends the model's name, because a model's name has no colon.
"""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request

from wane.service.api.deps import deadline, note_model, owner, session_engine, session_key
from wane.service.api.exchange import registry
from wane.service.api.schemas.inference import LARGEST_ID, InferParameters
from wane.service.engine.engine import Engine
from wane.service.errors import InvalidRequest, SessionExists, TokenizerChanged, UnknownSession, truncate_repr
from wane.service.types.request import SESSION_RULE, id_of

STARTS = 3
"""The number of attempts to start a sequence that other clients start at the same time."""


def sequence_id(parameters: InferParameters) -> str | None:
    """Returns the id of the request's sequence, or None if the request has no sequence. Raises InvalidRequest."""
    sequence = parameters.sequence_id
    if sequence is None or sequence == "" or sequence == 0:
        return None
    if isinstance(sequence, int) and not 0 < sequence <= LARGEST_ID:
        raise InvalidRequest(f"sequence_id is {truncate_repr(sequence)}, but must be from 0 to 2^64 - 1", "sequence_id")
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


async def start_sequence(request: Request, engine: Engine, key: str) -> None:
    """Deletes the sequence if it exists, and starts it at position 0. Raises SessionExists if other clients start the
    same sequence during each of STARTS attempts."""
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
            await engine.create_session(id_of(key), None, owner(request), None)
        except SessionExists:
            if attempt == STARTS - 1:
                raise
        else:
            break
    note_model(request, engine)


async def delete_sequence(engine: Engine, key: str, until: float | None) -> None:
    """Ends the sequence. Does nothing if another client has ended it, or if it has expired."""
    with suppress(UnknownSession):
        await engine.delete_session(key, until)


def no_sequence(sequence: str) -> InvalidRequest:
    """Returns the error for a sequence that does not exist."""
    return InvalidRequest(
        f"there is no sequence {truncate_repr(sequence)}: it was not started, was ended, or has expired; begin it with "
        "sequence_start",
        "sequence_id",
    )
