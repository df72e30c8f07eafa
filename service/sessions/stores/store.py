"""The protocol of a session store, and its records. The store holds the truth; resident states are only a cache."""

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
    """The health of a store. `kind`: `memory` or `redis`. `ready`: whether requests to sessions can be answered.
    `not_durable`: how many sessions have tokens that only this process has, although others share the store."""

    kind: str
    reachable: bool = True
    ready: bool = True
    not_durable: int = 0


DIGEST_BYTES = 16

_BRANCH_BITS = 32


def appended(revision: int) -> int:
    """Returns the revision after an append."""
    return revision + 1


def branch() -> int:
    """Returns an unused revision, with room for its successors, for a session that is created or rewound."""
    return secrets.randbits(_BRANCH_BITS) << _BRANCH_BITS


def follows(revision: int, earlier: int) -> bool:
    """Returns whether only appends lie between two revisions, so that the session still begins as it was at
    `earlier`."""
    return revision >= earlier and revision >> _BRANCH_BITS == earlier >> _BRANCH_BITS


def digest(data: bytes) -> bytes:
    """Returns a digest of a step's tokens or key, of at most 16 bytes: the data itself if it is shorter than that, else
    its BLAKE2b. A collision is expected among 2^64 digests."""
    return data if len(data) < DIGEST_BYTES else hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def of_tokens(tokens: Sequence[int]) -> bytes:
    """Returns the digest of a step's tokens."""
    if len(tokens) == 1:
        return digest(tokens[0].to_bytes(8, "little", signed=True))
    return digest(struct.pack(f"<{len(tokens)}q", *tokens))


def of_key(key: str | None) -> bytes | None:
    """Returns the digest of a step's idempotency key."""
    return None if key is None else digest(key.encode())


class LastStep(NamedTuple):
    """The last step of a session, by which a retry is recognised: its starting position, and digests of its tokens and
    its key."""

    start: int
    tokens: bytes
    key: bytes | None


class Snapshot(NamedTuple):
    """A state that the store keeps with a tail. It is the state at `position`, and lacks the first `dropped_tokens`
    tokens.

    `model_fingerprint` identifies the weights and graphs that made it; no others may continue from it.
    """

    position: int
    dropped_tokens: int
    model_fingerprint: bytes
    state: bytes


class SessionRecord(NamedTuple):
    """A session as a store keeps it.

    `revision` differs after every change: see `appended` and `branch`. Changes compare it: unlike a position, a
    revision is never used twice, so a session that another process rewound and stepped, or deleted and created again,
    is not mistaken for the earlier one. `idle_s` is the time since the session was last touched, when it was read.
    `model_version` is the version that it was started with, for information. `vocabulary` identifies the tokenizer of
    its tail; a model version with another tokenizer cannot run it. `durable`: whether a shared store has the session at
    this revision; None if the store is not shared. `snapshot`: the latest state kept with the tail, if it was read.
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
        """The number of tokens that are not in the tail, because they were cut off or never known. 0: the tail has the
        whole sequence. `<eos>` is cut off together with the first token."""
        return max(self.position - len(self.tail), 0)

    @property
    def earliest(self) -> int:
        """The earliest position that the session can be rewound to; one token must remain in the tail."""
        return self.position - len(self.tail) + 1


class StoreError(Exception):
    """The session store cannot be opened. The message is for the operator, and the process ends."""


class WriteBuffer(Protocol):
    """Holds the latest tokens of sessions until they are written to a store."""

    def flush(self, session: str) -> tuple[Sequence[int], float]:
        """Removes a session from the buffer. Returns the tokens that were appended since the last write, each by a step
        of its own without a key, and the session's idle time in seconds."""
        ...


class Store(Protocol):
    """Keeps sessions. Every method is atomic, and resets the session's idle time unless it says otherwise.

    A store that can answer immediately does not suspend, so that requests do not wait for the event loop. A session
    that is idle for longer than the store's time to live does not exist any more. A store raises Unavailable if its
    backend is unreachable.

    `session_history_tokens`: how many of its latest tokens a session keeps. If it is raised, histories grow with the
    next tokens.
    """

    session_history_tokens: int

    async def create(self, record: SessionRecord, most: int | None = None) -> bool:
        """Adds a new session; returns False if its id exists. Raises Overloaded if there are too many sessions, and
        QuotaExceeded if its owner already has `most`."""
        ...

    async def get(self, session: str) -> SessionRecord | None:
        """Returns the current session. Does not reset its idle time."""
        ...

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        """Returns the session as it was last seen here, without asking the backend. The next comparison checks whether
        it is still the same.

        With `to_step`, returns None also if that comparison would probably fail, and raises PositionConflict, once, if
        tokens that were acknowledged as not durable were lost since the last step.
        """
        ...

    async def touch(self, session: str) -> None:
        """Resets the session's idle time."""
        ...

    def kind(self, session: str) -> tuple[str, str] | None:
        """Returns the session's model and vocabulary as last seen here, without asking the backend; None if the session
        was not seen."""
        ...

    async def append(
        self, record: SessionRecord, tokens: Sequence[int], step: LastStep, snapshot: Snapshot | None = None
    ) -> SessionRecord | None:
        """Appends `tokens` if the session is at the revision of `record` (compare-and-append). Returns None, without
        side effects, if it is not.

        `snapshot`: the state after `tokens`, for the store to keep. A store that does not keep states ignores it.
        """
        ...

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        """Cuts the tail back to `position`, which must be in the tail, and forgets the last step.

        Returns None, without side effects, if the session is not at `revision`.
        """
        ...

    async def delete(self, session: str) -> bool:
        """Deletes a session; returns False if it does not exist."""
        ...

    async def count(self, model: str) -> int:
        """Returns the number of a model's sessions; recently expired ones may be included. A shared store counts the
        sessions that were used here."""
        ...

    @property
    def standing(self) -> StoreHealth:
        """The store's health, for the readiness probe."""
        ...

    async def open(self) -> None:
        """Opens the store; the caller must call this first. Raises StoreError if saved sessions cannot be read."""
        ...

    async def close(self) -> None:
        """Closes the store; the caller must call this last."""
        ...
