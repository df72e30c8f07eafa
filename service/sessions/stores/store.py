"""What the engine asks of a store of sessions. The store holds the truth; cached states are a cache of it."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from wane.service.sessions.record import TokenHistory
from wane.service.types import Mode


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How a store is: `memory` or `redis`, whether it can be reached, and whether requests to sessions can be answered.
    `not_durable`: how many sessions have tokens that only this process has, though others share the store."""

    kind: str
    reachable: bool = True
    ready: bool = True
    not_durable: int = 0


DIGEST_BYTES = 16

_BRANCH_BITS = 32


def appended(revision: int) -> int:
    """The revision after an append."""
    return revision + 1


def branch() -> int:
    """A revision that no session was ever at, with room for its successors: that of a session that was created or
    rewound."""
    return secrets.randbits(_BRANCH_BITS) << _BRANCH_BITS


def follows(revision: int, earlier: int) -> bool:
    """Whether all that came between two revisions of a session was appended: it still begins as it was at `earlier`."""
    return revision >= earlier and revision >> _BRANCH_BITS == earlier >> _BRANCH_BITS


def digest(data: bytes) -> bytes:
    """What a step's tokens and key are remembered by, in at most 16 bytes: themselves where they are shorter than
    that, else their BLAKE2b. No two are the same but for a collision, of which there is one in 2^64 digests."""
    return data if len(data) < DIGEST_BYTES else hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def of_tokens(tokens: Sequence[int]) -> bytes:
    """What a step's tokens are remembered by."""
    if len(tokens) == 1:
        return digest(tokens[0].to_bytes(8, "little", signed=True))
    return digest(struct.pack(f"<{len(tokens)}q", *tokens))


def of_key(key: str | None) -> bytes | None:
    """What a step's key is remembered by."""
    return None if key is None else digest(key.encode())


class LastStep(NamedTuple):
    """What a retry is recognised by: the position that the step started from, and digests of its tokens and its key."""

    start: int
    tokens: bytes
    key: bytes | None


class Snapshot(NamedTuple):
    """A state that is kept with a tail: that at `position`, which knows all but the first `dropped_tokens` tokens.

    `model_fingerprint` tells which weights and graphs made it: no others may go on from it.
    """

    position: int
    dropped_tokens: int
    model_fingerprint: bytes
    state: bytes


class SessionRecord(NamedTuple):
    """A session as it is kept.

    `revision` is another after every change, as `appended` and `branch` say. It is what comparisons are made on: unlike
    a position it never comes back, so a session that was rewound and stepped again elsewhere, or deleted and created
    again, cannot be taken for its old self. `idle_s` is the time since it was last touched, as of reading.
    `model_version` is the one that it was started under, for information; `vocabulary` tells whose token ids its tail
    holds, and no version of another may run them.
    `durable`: of a store that others share, whether it has the session so; no other promises anything. `snapshot`: the
    latest state that was kept along with the tail, if there is one and it was asked for.
    """

    session: str
    model: str
    model_version: str
    mode: Mode
    position: int
    tail: TokenHistory
    revision: int = 0
    last: LastStep | None = None
    idle_s: float = 0.0
    vocabulary: str = ""
    durable: bool | None = None
    snapshot: Snapshot | None = None

    @property
    def dropped_tokens(self) -> int:
        """How many tokens are not in the tail: cut off, or never known. 0 means all of the sequence is there: `<eos>`
        goes with the first token."""
        return max(self.position - len(self.tail), 0)

    @property
    def earliest(self) -> int:
        """The earliest position that the session can be rewound to: one token must remain in the tail."""
        return self.position - len(self.tail) + 1


class StoreError(Exception):
    """The sessions that are to be served cannot be; the message is for the operator, and the process ends."""


class WriteBuffer(Protocol):
    """Holds the latest tokens of sessions that a store has not written yet."""

    def flush(self, session: str) -> tuple[Sequence[int], float]:
        """Gives up a session: the tokens that were appended since the store last had it, each by a step of its own
        without a key, and for how many seconds it has been idle."""
        ...


class Store(Protocol):
    """Keeps sessions. Every method is atomic, and touches the session's idle time unless it says otherwise.

    A store that has the answer at hand does not suspend: then no request that asks it waits for the event loop.

    A session idle for longer than the store's time to live does not exist any more.
    Implementations that can lose their backing raise Unavailable.

    `session_history_tokens`: how many of its latest tokens a session keeps. It may be raised: then histories grow as
    tokens come.
    """

    session_history_tokens: int

    async def create(self, record: SessionRecord, most: int | None = None) -> bool:
        """Keeps a new session; False if one of that id exists. Raises Overloaded when there are too many, and
        QuotaExceeded when its owner has `most` already."""
        ...

    async def get(self, session: str) -> SessionRecord | None:
        """The session as it is now, its idle time left alone."""
        ...

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        """The session as it was last seen here, without asking: the next comparison tells whether it is still so.

        `to_step`: None too where that is likely to be lost. Raises PositionConflict, once, where tokens that were
        acknowledged as not durable were lost since the last step.
        """
        ...

    async def touch(self, session: str) -> None:
        """The session was used."""
        ...

    def kind(self, session: str) -> tuple[str, str] | None:
        """The session's model and its vocabulary, as last seen here, without asking; None if it was not seen."""
        ...

    async def append(
        self, record: SessionRecord, tokens: Sequence[int], step: LastStep, snapshot: Snapshot | None = None
    ) -> SessionRecord | None:
        """Compare-and-append: None, and nothing done, unless the session is at the revision of `record`.

        `snapshot`: the state after `tokens`, where the store is to keep it: one that does not keep states forgets it.
        """
        ...

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        """Cuts the tail back to `position`, which it must hold, and forgets the last step.

        None, and nothing done, unless the session is at `revision`.
        """
        ...

    async def delete(self, session: str) -> bool:
        """Forgets a session; False if there was none."""
        ...

    async def count(self, model: str) -> int:
        """How many sessions a model has; those that ended by themselves a moment ago may be among them. Of a store that
        others share: those that were used here."""
        ...

    @property
    def standing(self) -> StoreHealth:
        """The store's health, for the readiness probe."""
        ...

    async def open(self) -> None:
        """To be called before anything else. Raises StoreError where sessions are kept that cannot be read."""
        ...

    async def close(self) -> None:
        """To be called when nothing else will be."""
        ...
