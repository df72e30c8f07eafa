"""The protocol of a session store, and its records. The store is authoritative; resident states are only a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import getrandbits
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from wane.service.errors import Unavailable
from wane.service.types.common import Mode
from wane.service.types.request import Owner


class DamagedSession(Unavailable, code=Unavailable.code):
    """The stored bytes of a session cannot be read. The session can only be deleted."""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """`kind`: `memory` or `redis`. `reachable`: whether the store answers. If not, requests to sessions are refused."""

    kind: str
    reachable: bool = True


DIGEST_BYTES = 16

_BRANCH_BITS = 32


def branch() -> int:
    """Returns an unused revision for a session that is created or rewound. Each append increments the revision by 1.
    These revisions are unused too."""
    # `secrets` would ask the kernel for each append of a batch. Python seeds this generator for every process.
    return getrandbits(_BRANCH_BITS) << _BRANCH_BITS


def is_first(revision: int) -> bool:
    """Returns whether a revision is that of a session's creation, or of a rewind: no append has followed."""
    return revision & ((1 << _BRANCH_BITS) - 1) == 0


def follows(revision: int, earlier: int) -> bool:
    """Returns whether only appends lie between two revisions. If so, the session still begins with the tokens that it
    had at revision `earlier`."""
    return revision >= earlier and revision >> _BRANCH_BITS == earlier >> _BRANCH_BITS


def digest(data: bytes) -> bytes:
    """Returns the digest of a step's tokens or key. Data of fewer than 16 bytes is its own digest. The digest of longer
    data is a BLAKE2b hash of 16 bytes. A collision of such hashes is expected only among about 2^64 digests."""
    return data if len(data) < DIGEST_BYTES else hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def of_tokens(tokens: Sequence[int]) -> bytes:
    if len(tokens) == 1:
        return tokens[0].to_bytes(8, "little", signed=True)  # short, so its own digest
    return digest(np.asarray(tokens, "<i8").tobytes())


def of_key(key: str | None) -> bytes | None:
    return None if key is None else digest(key.encode())


@dataclass(slots=True)
class TokenHistory:
    """Token ids as little-endian unsigned integers of `width` bytes, oldest first; immutable.

    The history begins with `<eos>` as long as it holds the whole sequence. The history has no `<eos>` if the beginning
    of the sequence was cut off or was never known.
    """

    data: bytes
    width: int

    @classmethod
    def start(cls, eos_id: int, vocabulary_size: int) -> Self:
        """Returns the history of a sequence without tokens, which holds only `<eos>`. A token takes two bytes if all
        ids fit in two bytes, and four otherwise."""
        width = 2 if vocabulary_size <= 1 << 16 else 4
        return cls(eos_id.to_bytes(width, "little"), width)

    def __len__(self) -> int:
        return len(self.data) // self.width

    def ids(self) -> NDArray[np.int64]:
        """Returns the token ids, oldest first: int64 (len,)."""
        return np.frombuffer(self.data, dtype=f"<u{self.width}").astype(np.int64)

    def append(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the history with `tokens` appended. `position` is the length of the sequence after the append.

        A sequence of up to `keep` tokens is kept whole, with `<eos>`. Only the last `keep` tokens of a longer sequence
        are kept.
        """
        width = self.width
        if len(tokens) == 1:
            data = self.data + tokens[0].to_bytes(width, "little")
        else:
            data = self.data + np.array(tokens, f"<u{width}").tobytes()
        return TokenHistory(data if position <= keep else data[-keep * width :], width)

    def ending(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the history of a sequence of `position` tokens that ends in `tokens`. `self` must be the history of
        an empty sequence.

        If there are fewer tokens than `position`, the beginning is unknown, and the history has no `<eos>`.
        """
        start = self if len(tokens) == position else TokenHistory(b"", self.width)
        return start.append(tokens, position, keep)

    def without_last(self, count: int) -> TokenHistory:
        """Returns the history without its latest `count` tokens. At least one token must remain."""
        assert 0 <= count < len(self), "a rewind leaves no token: this is a bug"
        return TokenHistory(self.data[: len(self.data) - count * self.width], self.width)


class LastStep(NamedTuple):
    """The last step of a session: its starting position, and digests of its tokens and its key. A retry of the step is
    recognised by these values."""

    start: int
    tokens: bytes
    key: bytes | None


class Snapshot(NamedTuple):
    """A state that the store keeps with a session. The state is the one at `position`, and has not read the session's
    first `dropped_tokens` tokens.

    `model_fingerprint` identifies the weights and graphs that computed the state. Only the same weights and graphs may
    continue from it.
    """

    position: int
    dropped_tokens: int
    model_fingerprint: bytes
    state: bytes


class SessionRecord(NamedTuple):
    """A session as a store keeps it.

    Every change gives the session another `revision`: see `branch`. A change succeeds only if the revision is the
    expected one. Unlike a position, a revision is never used twice. A session that another process
    rewound and stepped, or deleted and created again, is therefore not mistaken for the earlier session. `tail` holds
    the latest tokens. `idle_s` is the time between the session's last use and the read of this record. `model_version`
    is the version that created the session, for information only. `vocabulary` identifies the tokenizer of `tail`. A
    model version with another tokenizer cannot run the session. `durable` is true if a shared store has acknowledged
    this revision, and None if the store is not shared. `snapshot` is the latest state in the store, if it was read.
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
        """The number of tokens that are missing from the beginning of `tail`, because they were cut off or were never
        known. If this number is 0, `tail` holds the whole sequence, and begins with the start token `<eos>`, which is
        not counted. Otherwise `tail` has no start token."""
        return max(self.position - len(self.tail), 0)

    @property
    def earliest(self) -> int:
        """The earliest position to which the session can be rewound. At least one token must remain in `tail`."""
        return self.position - len(self.tail) + 1

    def rewound(self, position: int) -> SessionRecord:
        """Returns the session after a rewind to `position`: see `Store.rewind`."""
        tail = self.tail.without_last(self.position - position)
        return self._replace(position=position, tail=tail, revision=branch(), last=None, idle_s=0.0, snapshot=None)


class Commit(NamedTuple):
    """A step to be committed: `tokens` are appended if the session is at the revision of `record` (compare-and-append).

    key: the step's idempotency key. slot: the slot of the state after the step, which has not read the session's first
    `dropped_tokens` tokens; None if there is no state. creator: the owner of the session that the step creates; None if
    the session exists. snapshot: the state after the step, if the store should keep it. A store that does not keep
    states ignores it."""

    record: SessionRecord
    tokens: Sequence[int]
    key: str | None = None
    slot: int | None = None
    dropped_tokens: int = 0
    creator: Owner | None = None
    snapshot: Snapshot | None = None

    @property
    def position(self) -> int:
        """The session's position after the step."""
        return self.record.position + len(self.tokens)

    @property
    def step(self) -> LastStep:
        """The `LastStep` that the session will have."""
        return LastStep(self.record.position, of_tokens(self.tokens), of_key(self.key))


Appended = SessionRecord | Exception | None
"""The result of one append: the session after it, the error, or None if the session had another revision."""


class StoreError(Exception):
    """The session store cannot be opened. The process prints the message for the operator and exits."""


class UnsavedSessions(StoreError):
    """The sessions in memory could not be saved when the process ended."""


Flush = Callable[[str], tuple[TokenHistory, int, float]]
"""Removes a session from a buffer (`Store.buffer`). Returns the session's tokens, its position, and its idle time in
seconds. Each token since `Store.buffer` was appended by a separate step without a key."""


class Store(Protocol):
    """Stores sessions. Every method is atomic. Every method resets the session's idle time, unless its docstring says
    otherwise. A store that can answer immediately does not suspend its caller. A session expires when it is idle for
    longer than the store's time to live. A store raises Unavailable if its backend is unreachable.

    `session_history_tokens`: the number of latest tokens that a session keeps. If this number is increased, the
    histories of existing sessions grow with their next tokens. `most_buffered_bytes`: the most memory that the tokens
    of sessions in buffers (`buffer`) may use together; 0 if the store leaves none to a buffer. `vocabulary_sizes`: the
    number of tokens of each vocabulary that a model has. A shared store checks the token ids that it reads."""

    session_history_tokens: int
    most_buffered_bytes: int
    vocabulary_sizes: dict[str, int]

    async def create(self, record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        """Adds a new session, with its snapshot if the store keeps states, and returns it with its revision. Returns
        None if a session with this id exists. Raises Overloaded if there are too many sessions, and QuotaExceeded if
        the session's owner already has `most` sessions."""

    async def get(self, session: str) -> SessionRecord | None:
        """Returns the current session. Does not reset its idle time."""

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:
        """Returns the session as this process last saw it, without a request to the backend. A later append or rewind
        checks whether the session is still the same. `to_step`: the caller will append to the session, so the result
        is also None if an append would probably fail."""

    async def touch(self, session: str) -> None: ...

    def kind(self, session: str) -> tuple[str, str] | None:
        """Returns the session's model and vocabulary as this process last saw them, without a request to the backend.
        Returns None if this process has not seen the session."""

    async def append_many(self, commits: Sequence[Commit]) -> list[Appended]:
        """Appends the tokens of a batch of steps, each to another session, and returns a result for each. Each append
        succeeds or fails by itself. A store of another process makes them in one round trip."""

    def buffer(self, session: str, flush: Flush, most_bytes: int) -> bool:
        """Leaves the tokens of a stored session to a buffer, which uses up to `most_bytes` for them. The session's
        steps then add their tokens to the buffer alone. Before any other operation on the session, except `kind`, the
        store takes the tokens from the buffer by `flush`. Returns False, without side effects, if it does not do so:
        because other processes must see each step, or because the session has been evicted."""

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        """Rewinds the session to `position`, and deletes its `LastStep`. At least one token must remain in `tail`.
        Returns None, without side effects, if the session is not at `revision`."""

    async def delete(self, session: str) -> bool:
        """Deletes a session. Returns False if it does not exist."""

    async def count(self, model: str) -> int:
        """Returns the number of a model's sessions. Recently expired sessions may be included. A shared store counts
        only the sessions that this process used."""

    @property
    def standing(self) -> StoreHealth: ...

    async def open(self) -> None:
        """Must be called before all other methods. Raises StoreError if saved sessions cannot be read."""

    async def close(self) -> None: ...
