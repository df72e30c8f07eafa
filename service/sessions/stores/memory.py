"""Keeps sessions in this process's memory. They are lost when the process ends, unless they are saved to a file.

A session is one `bytes` object, because a million sessions must fit into a gigabyte:

    touched_s  position  revision  start  identity  tokens' digest  key's digest  tail
    float64    uint64    uint64    int64  uint16    16 bytes at most, each after its length    token ids

`start` is the last step's starting position, or -1 if there is no last step. The key's digest is empty if the step had
no key. An identity (model, version, mode, the width of a token id, the vocabulary) is stored once for all sessions that
share it. A bytes object holds no references, so the garbage collector does not traverse it.

The sessions are spread over shards. A shard is a plain dict, which keeps its order of insertion. A used entry is
removed and inserted again. The longest idle session therefore comes first. Unlike an OrderedDict, a dict needs no
memory for the order, and the garbage collector does not traverse it. A dict is copied when it outgrows its table. For a
million entries the copy would delay every request, so the sessions are spread over many small dicts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wane.service.errors import Overloaded, QuotaExceeded
from wane.service.sessions.record import TokenHistory
from wane.service.sessions.stores import dump_file
from wane.service.sessions.stores.store import (
    DIGEST_BYTES,
    Append,
    Appended,
    LastStep,
    SessionRecord,
    Snapshot,
    StoreHealth,
    UnsavedSessions,
    WriteBuffer,
    appended,
    branch,
    of_tokens,
)
from wane.service.types import Mode, owner_of

TOUCHED = struct.Struct("<d")
_REVISION = struct.Struct("<dQQ")
_IDENTITY = struct.Struct("<H")
_IDENTITY_AT = struct.calcsize("<dQQq")
_HEADER = struct.Struct(f"<dQQqH{1 + DIGEST_BYTES}p{1 + DIGEST_BYTES}p")
NO_STEP = -1
# The memory of a session in addition to its id and its packed bytes, measured by benchmarks/parked.py: the overhead of
# a string, of a bytes object, of an entry in a dict's table, and of an allocator that rounds up to 16 bytes.
OVERHEAD_BYTES = 200


Identity = tuple[str, str, Mode, int, str]
"""Model, version, mode, number of bytes of a token id, and vocabulary. Many sessions share an identity."""


def entry_bytes(session: str, tail: int) -> int:
    """Returns the memory in bytes of a session whose tokens take `tail` bytes."""
    return OVERHEAD_BYTES + len(session) + _HEADER.size + tail


def tail_bytes(packed: bytes) -> int:
    """Returns the length of the session's tokens in bytes."""
    return len(packed) - _HEADER.size


def touched_s(packed: bytes) -> float:
    """Returns the time of the session's last use, in seconds."""
    (when,) = TOUCHED.unpack_from(packed)
    return float(when)


def revision(packed: bytes) -> int:
    """Returns the session's revision."""
    (_, _, changes) = _REVISION.unpack_from(packed)
    return int(changes)


def touched(packed: bytes, now_s: float) -> bytes:
    """Returns the packed session with the time of its last use set to `now_s`."""
    return TOUCHED.pack(now_s) + packed[TOUCHED.size :]


class Packing:
    """Packs and unpacks records. A packed record contains the number of its identity. Identities are numbered in the
    order in which they are first packed. There is one identity for each version and mode of the loaded models."""

    def __init__(self) -> None:
        self._identities: list[Identity] = []
        self._numbers: dict[Identity, int] = {}

    def pack(self, record: SessionRecord, now_s: float) -> bytes:
        """Packs the record, with `now_s` as the time of its last use."""
        identity = record.model, record.model_version, record.mode, record.tail.width, record.vocabulary
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self._identities)
            self._identities.append(identity)
        return self._pack(number, record, now_s)

    def repack(self, packed: bytes, record: SessionRecord, now_s: float) -> bytes:
        """Like `pack`, for a changed record. `packed` is the packed record before the change."""
        (number,) = _IDENTITY.unpack_from(packed, _IDENTITY_AT)
        return self._pack(number, record, now_s)

    def _pack(self, number: int, record: SessionRecord, now_s: float) -> bytes:
        start, tokens, key = record.last or (NO_STEP, b"", None)
        header = _HEADER.pack(now_s, record.position, record.revision, start, number, tokens, key or b"")
        return header + record.tail.data

    def unpack(
        self, session: str, packed: bytes, now_s: float, durable: bool | None = None, snapshot: Snapshot | None = None
    ) -> SessionRecord:
        """Unpacks the record. The record's `idle_s` is the idle time at `now_s`. `durable` and `snapshot` are fields of
        the record that are not packed."""
        touched_s, position, revision, start, number, tokens, key = _HEADER.unpack_from(packed)
        model, version, mode, width, vocabulary = self._identities[number]
        tail = TokenHistory(packed[_HEADER.size :], width)
        last = None if start == NO_STEP else LastStep(start, tokens, key or None)
        idle_s = now_s - touched_s
        return SessionRecord(
            session, model, version, mode, position, tail, revision, last, idle_s, vocabulary, durable, snapshot
        )

    def kind(self, packed: bytes) -> tuple[str, str]:
        """Returns the model and the vocabulary of the packed session."""
        (number,) = _IDENTITY.unpack_from(packed, _IDENTITY_AT)
        model, _, _, _, vocabulary = self._identities[number]
        return model, vocabulary

    def model(self, packed: bytes) -> str:
        """Returns the model of the packed session."""
        return self.kind(packed)[0]


class Shard:
    """Packed sessions in the order of their last use. Each expires after `ttl_s` seconds without use."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, bytes] = {}
        self._quiet_until_s = -math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, session: str, packed: bytes) -> None:
        """Stores the session as the most recently used."""
        self._entries.pop(session, None)
        self._entries[session] = packed

    def get(self, session: str, now_s: float) -> bytes | None:
        """Returns the session unless it has expired. The session's place in the order of last use does not change."""
        packed = self._entries.get(session)
        return packed if packed is not None and now_s <= TOUCHED.unpack_from(packed)[0] + self._ttl_s else None

    def peek(self, session: str) -> bytes | None:
        """Returns the session, even if it has expired."""
        return self._entries.get(session)

    def pop(self, session: str) -> bytes | None:
        """Removes and returns the session, if it exists."""
        return self._entries.pop(session, None)

    def all(self, now_s: float) -> Iterator[tuple[str, bytes]]:
        """Returns an iterator over every session that has not expired, in descending order of idle time."""
        since_s = now_s - self._ttl_s
        return ((session, packed) for session, packed in self._entries.items() if touched_s(packed) >= since_s)

    def oldest(self) -> tuple[str, bytes] | None:
        """Returns the longest idle session."""
        return next(iter(self._entries.items()), None)

    def over(self, now_s: float) -> str | None:
        """Returns the longest idle session's id if the session has expired. The call is cheap while no session can have
        expired."""
        if now_s <= self._quiet_until_s:
            return None
        oldest = self.oldest()
        ends_s = (now_s if oldest is None else touched_s(oldest[1])) + self._ttl_s
        if oldest is not None and now_s > ends_s:
            return oldest[0]
        self._quiet_until_s = ends_s  # no session can expire before this time
        return None


logger = logging.getLogger("wane.store")

SHARDS = 64
ASIDE = ".read"  # suffix that is added to the name of a file whose sessions were read
EXPIRED_AT_ONCE = 1000  # largest number of expired sessions that one call removes, which limits the time of a call


class MemoryStore:
    """A `Store` of sessions in memory, within a budget in bytes. A session expires after `ttl_s` seconds without use.

    A new session is rejected unless it fits with a full token history. Existing sessions may still exceed the budget
    when their token histories grow. The longest idle sessions are then evicted.
    """

    def __init__(
        self,
        session_history_tokens: int,
        ttl_s: float,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_memory_eviction: Callable[[str], object] = lambda _: None,
        file: Path | None = None,
    ) -> None:
        """`on_memory_eviction` is called with the model of every session that is evicted for lack of memory. Sessions
        are read from `file` when the store is opened, and saved to it when the store is closed."""
        self.session_history_tokens = session_history_tokens
        self.used_bytes = 0
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._on_memory_eviction = on_memory_eviction
        self._file = file
        self._is_open = self._is_closed = False
        self._packing = Packing()
        self._shards = [Shard(ttl_s) for _ in range(SHARDS)]
        self._counts: Counter[str] = Counter()
        self._owned: Counter[str] = Counter()  # number of sessions of each owner
        self._buffered: dict[str, WriteBuffer] = {}  # sessions whose latest tokens are in a write buffer

    async def create(self, record: SessionRecord, most: int | None = None) -> SessionRecord | None:
        """See `Store`."""
        session = record.session
        if self._find(session) is not None:
            return None
        self._forget(session)  # an expired session with this id may still be stored
        self._expire([self._shard(session)])
        owner = owner_of(session)
        if most is not None and self._owned[owner] >= most:
            self._expire(self._shards)
            if self._owned[owner] >= most:
                raise QuotaExceeded(owner, most)
        whole = entry_bytes(session, (1 + self.session_history_tokens) * record.tail.width)  # with <eos>
        if self.used_bytes + whole > self.budget_bytes:
            self._expire(self._shards)
        if self.used_bytes + whole > self.budget_bytes:
            raise Overloaded(
                f"{sum(map(len, self._shards))} sessions use {self.used_bytes} bytes, and a new session uses up to "
                f"{whole}: together more than session_budget_bytes, which is {self.budget_bytes}"
            )
        fresh = record._replace(revision=branch())
        self._add(fresh)
        return fresh

    async def get(self, session: str) -> SessionRecord | None:
        """See `Store`."""
        return self.get_cached(session)

    def get_cached(self, session: str, *, to_step: bool = False) -> SessionRecord | None:  # noqa: ARG002  (the record is always current)
        """See `Store`."""
        now_s = self._clock()
        packed = self._find(session)
        return None if packed is None else self._packing.unpack(session, packed, now_s)

    def kind(self, session: str) -> tuple[str, str] | None:
        """See `Store`. A buffered session stays buffered; its next step checks whether it has expired."""
        packed = self._shard(session).peek(session) if session in self._buffered else self._find(session)
        return None if packed is None else self._packing.kind(packed)

    async def touch(self, session: str) -> None:
        """See `Store`."""
        packed = self._find(session)
        if packed is not None:
            self._shard(session).put(session, touched(packed, self._clock()))

    async def append(
        self,
        record: SessionRecord,
        tokens: Sequence[int],
        step: LastStep,
        snapshot: Snapshot | None = None,  # noqa: ARG002  (states are not kept)
    ) -> SessionRecord | None:
        """See `Store`."""
        session, now_s = record.session, self._clock()
        packed = self._find(session)
        if packed is None or revision(packed) != record.revision:
            return None
        position = record.position + len(tokens)
        tail = record.tail.append(tokens, position, self.session_history_tokens)
        changed = self._change(record, packed, now_s, position, tail, appended(record.revision), step)
        self._squeeze()
        return changed

    async def append_many(self, appends: Sequence[Append]) -> list[Appended]:
        """See `Store`."""
        results = list[Appended]()
        for one in appends:
            try:
                results.append(await self.append(*one))
            except Exception as error:  # each append fails by itself
                results.append(error)
        return results

    def buffer(self, session: str, buffer: WriteBuffer) -> bool:
        """Buffers the session's next tokens in `buffer`. The store flushes the buffer before any other operation on the
        session, except `kind`. Returns False, without effect, if the session has been evicted."""
        if self._shard(session).peek(session) is None:
            return False
        self._buffered[session] = buffer
        return True

    def written(self, session: str) -> NDArray[np.int64]:
        """Returns the kept tokens of a buffered session, without those in the buffer: int64 (n)."""
        packed = self._shard(session).peek(session)
        assert packed is not None, "a buffered session is not in the store: this is a bug"
        return self._packing.unpack(session, packed, 0.0).tail.ids()

    def write(self, session: str, tokens: Sequence[int], idle_s: float) -> None:
        """Writes tokens from the session's buffer. The session has been idle for `idle_s` seconds, and stays
        buffered."""
        self._write(session, tokens, idle_s)
        self._squeeze()

    def flush(self, session: str) -> None:
        """Writes the tokens of the session's buffer, if it has one. The session is no longer buffered."""
        buffer = self._buffered.pop(session, None)
        if buffer is not None:
            self.write(session, *buffer.flush(session))

    def _write(self, session: str, tokens: Sequence[int], idle_s: float) -> None:
        used_s = self._clock() - idle_s
        packed = self._shard(session).peek(session)
        assert packed is not None, "a buffered session is not in the store: this is a bug"
        if not tokens:
            self._shard(session).put(session, touched(packed, used_s))
            return
        before = self._packing.unpack(session, packed, used_s)
        position = before.position + len(tokens)
        tail = before.tail.append(tokens, position, self.session_history_tokens)
        step = LastStep(position - 1, of_tokens(tokens[-1:]), None)
        self._change(before, packed, used_s, position, tail, before.revision + len(tokens), step)

    async def rewind(self, session: str, revision: int, position: int) -> SessionRecord | None:
        """See `Store`."""
        packed, now_s = self._find(session), self._clock()
        record = None if packed is None else self._packing.unpack(session, packed, now_s)
        if packed is None or record is None or record.revision != revision:
            return None
        tail = record.tail.without_last(record.position - position)
        return self._change(record, packed, now_s, position, tail, branch())

    async def delete(self, session: str) -> bool:
        """See `Store`."""
        there = self._find(session) is not None
        self._forget(session)
        return there

    async def count(self, model: str) -> int:
        """See `Store`."""
        self._expire(self._shards)
        return self._counts[model]

    @property
    def standing(self) -> StoreHealth:
        """See `Store`."""
        return StoreHealth("memory")

    async def open(self) -> None:
        """See `Store`. Renames the file after reading it, because the first step makes the file's sessions out of date.
        If the store is closed during the read, the file stays for the next process."""
        if self._file is None or not await asyncio.to_thread(self._file.exists):
            self._is_open = True
            return
        records = await asyncio.to_thread(dump_file.load, self._file, self.session_history_tokens)
        if self._is_closed:
            return
        for record in records:
            self._add(record)
        self._squeeze()
        self._put_aside(self._file)
        logger.info("%d sessions were read from %s", sum(map(len, self._shards)), self._file)

    async def close(self) -> None:
        """See `Store`. Does not overwrite a file that could not be read. Raises UnsavedSessions if writing fails."""
        self._is_closed = True
        for session in [*self._buffered]:
            self.flush(session)
        if self._file is None or not self._is_open:
            return
        now_s = self._clock()
        packed = chain.from_iterable(shard.all(now_s) for shard in self._shards)
        alive = [self._packing.unpack(session, entry, now_s) for session, entry in packed]
        try:
            await asyncio.to_thread(dump_file.save, self._file, alive)
        except OSError as error:
            raise UnsavedSessions(
                f"the {len(alive)} sessions in memory are lost: they could not be written to {self._file}: "
                f"{error.strerror}"
            ) from error
        logger.info("%d sessions were written to %s", len(alive), self._file)

    def _put_aside(self, file: Path) -> None:
        """Renames the file after its sessions are loaded. This method must not `await`, so that the sessions are always
        either in the file or in this store."""
        file.replace(file.with_name(file.name + ASIDE))
        self._is_open = True

    def _shard(self, session: str) -> Shard:
        return self._shards[hash(session) % SHARDS]

    def _find(self, session: str) -> bytes | None:
        """Returns the session unless it has expired."""
        if session in self._buffered:
            self.flush(session)
        return self._shards[hash(session) % SHARDS].get(session, self._clock())

    def _change(
        self,
        before: SessionRecord,
        packed: bytes,
        now_s: float,
        position: int,
        tail: TokenHistory,
        revision: int,
        last: LastStep | None = None,
    ) -> SessionRecord:
        """Stores the session at `revision`, with `now_s` as the time of its last use, and returns the new record.
        `packed` is the session's earlier packed value."""
        session, model, version, mode = before[:4]
        record = SessionRecord(session, model, version, mode, position, tail, revision, last, 0.0, before.vocabulary)
        self.used_bytes += len(tail.data) - len(before.tail.data)
        self._shards[hash(session) % SHARDS].put(session, self._packing.repack(packed, record, now_s))
        return record

    def _add(self, record: SessionRecord) -> None:
        """Adds a session."""
        self._counts[record.model] += 1
        self._owned[owner_of(record.session)] += 1
        self.used_bytes += entry_bytes(record.session, len(record.tail.data))
        self._put(record)

    def _put(self, record: SessionRecord) -> None:
        self._shard(record.session).put(record.session, self._packing.pack(record, self._clock() - record.idle_s))

    def _forget(self, session: str) -> None:
        packed = self._shard(session).pop(session)
        if packed is not None:
            self._counts[self._packing.model(packed)] -= 1
            owner = owner_of(session)
            self._owned[owner] -= 1
            if not self._owned[owner]:
                del self._owned[owner]
            self.used_bytes -= entry_bytes(session, tail_bytes(packed))

    def _expire(self, shards: Sequence[Shard]) -> None:
        """Removes at most EXPIRED_AT_ONCE expired sessions. It does not scan the shards, because the longest idle
        session of a shard comes first."""
        now_s = self._clock()
        left = EXPIRED_AT_ONCE
        for shard in shards:
            while left and (session := shard.over(now_s)) is not None:
                if self._find(session) is None:  # the session's write buffer may have a more recent time of use
                    self._forget(session)
                left -= 1

    def _squeeze(self) -> None:
        """Evicts the longest idle sessions until the remaining sessions fit into the budget."""
        while self.used_bytes > self.budget_bytes:
            oldest = [oldest for shard in self._shards if (oldest := shard.oldest()) is not None]
            session, packed = min(oldest, key=lambda entry: touched_s(entry[1]))
            buffer = self._buffered.pop(session, None)
            if buffer is not None:  # the session's write buffer may have a more recent time of use
                self._write(session, *buffer.flush(session))
                continue
            self._forget(session)
            self._on_memory_eviction(self._packing.model(packed))
