"""Appends one step's tokens to a session, and asserts that a session is there."""

from __future__ import annotations

from collections.abc import Sequence

from wane.service.sessions.stores.store import Commit, SessionRecord, Snapshot, Store


async def append(
    store: Store, record: SessionRecord, tokens: Sequence[int], snapshot: Snapshot | None = None
) -> SessionRecord | None:
    """Returns the session after the append, or None if it was at another revision. Raises the store's error."""
    (result,) = await store.append_many([Commit(record, tokens, snapshot=snapshot)])
    if isinstance(result, Exception):
        raise result
    return result


def present(record: SessionRecord | None) -> SessionRecord:
    assert record is not None
    return record
