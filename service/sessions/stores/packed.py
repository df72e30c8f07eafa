"""Packed sessions in memory, within a budget in bytes: the sessions of a `MemoryStore`, and a `RedisStore`'s copies of
those that its process uses.

A session is one `bytes` object, because a million sessions must fit into a gigabyte, and because the garbage collector
does not traverse an object that holds no references. It has these fields, then those of `codec.py` and the tail:

    used in seconds  revision  identity's number
    float64          uint64    uint16

An identity is stored once for all sessions that share it.

The sessions are spread over shards. A shard is a plain dict, which keeps its order of insertion: a used entry is
removed and inserted again, so the longest idle session comes first. Unlike an OrderedDict, a dict needs no memory for
the order. A dict is copied when it outgrows its table. For a million entries the copy would delay every request, so the
sessions are spread over many small dicts.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator

from wane.service.sessions.stores.codec import FIELDS, NO_STEP, Identity, identity_of
from wane.service.sessions.stores.store import LastStep, SessionRecord, TokenHistory

# The memory of a session in addition to its id and its packed bytes, measured by benchmarks/parked.py: the overhead of
# a string, of a bytes object, of an entry in a dict's table, and of an allocator that rounds up to 16 bytes.
OVERHEAD_BYTES = 200
_USED, _NUMBER = struct.Struct(">d"), struct.Struct(">H")
_HEADER = struct.Struct(f">dQH{FIELDS}")
_NUMBER_AT = 16
HEADER_BYTES = _HEADER.size
"""The size of a packed session without its tail."""
SHARDS = 64
EXPIRED_AT_ONCE = 1000  # largest number of expired sessions that one call removes, which limits the time of a call


def used_s(packed: bytes) -> float:
    """Returns the time of a packed session's last use, in seconds."""
    (when,) = _USED.unpack_from(packed)
    return float(when)


def entry_bytes(session: str, tail: int) -> int:
    """Returns the memory in bytes of a session whose tokens take `tail` bytes."""
    return OVERHEAD_BYTES + len(session) + HEADER_BYTES + tail


class PackedSessions:
    """Packed sessions in the order of their last use. Each expires after `ttl_s` seconds without use."""

    def __init__(
        self,
        ttl_s: float,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        update: Callable[[str], bool] = lambda _session: False,
        on_forget: Callable[[str], object] = lambda _session: None,
        on_evict: Callable[[str], object] = lambda _model: None,
        *,
        durable: bool | None = None,
    ) -> None:
        """`clock` returns seconds. `update` is called with a session before it is removed as expired or evicted. It
        returns True if it stored a newer record of the session. `on_forget` is called with each removed session, and
        `on_evict` with the model of each evicted one. `durable`: see `SessionRecord`, for all sessions."""
        self.used_bytes = 0
        self.budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._update = update
        self._on_forget = on_forget
        self._on_evict = on_evict
        self._durable = durable
        self._identities: list[Identity] = []  # numbered in the order in which they are first packed
        self._numbers: dict[Identity, int] = {}
        self._shards: list[dict[str, bytes]] = [{} for _ in range(SHARDS)]
        self._quiet_until_s = [-math.inf] * SHARDS  # until this time, no session of the shard can expire
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def put(self, record: SessionRecord) -> None:
        """Stores a session in place of its earlier record, if there is one. Its last use was `record.idle_s` ago."""
        session, tail = record.session, len(record.tail.data)
        shard = self._shards[hash(session) % SHARDS]
        before = shard.pop(session, None)
        if before is None:
            self.used_bytes += entry_bytes(session, tail)
        else:
            self._counts[self._identity(before)[0]] -= 1
            self.used_bytes += tail + HEADER_BYTES - len(before)
        self._counts[record.model] += 1
        identity = identity_of(record)
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self._identities)
            self._identities.append(identity)
        start, tokens, key = record.last or (NO_STEP, b"", b"")
        when_s, position = self._clock() - record.idle_s, record.position
        shard[session] = (
            _HEADER.pack(when_s, record.revision, number, position, start, tokens, key or b"") + record.tail.data
        )

    def get(self, session: str) -> SessionRecord | None:
        """Returns the session unless it has expired. This is no use of the session."""
        packed = self._shards[hash(session) % SHARDS].get(session)
        if packed is None:
            return None
        record = self._unpack(session, packed, self._clock())
        return record if record.idle_s <= self._ttl_s else None

    def peek(self, session: str) -> SessionRecord:
        """Returns a stored session, even if it has expired."""
        return self._unpack(session, self._shards[hash(session) % SHARDS][session], self._clock())

    def _unpack(self, session: str, packed: bytes, now_s: float) -> SessionRecord:
        when_s, revision, number, position, start, tokens, key = _HEADER.unpack_from(packed)
        model, version, mode, width, vocabulary = self._identities[number]
        tail = TokenHistory(packed[HEADER_BYTES:], width)
        last = None if start == NO_STEP else LastStep(start, tokens, key or None)
        idle_s = now_s - when_s
        return SessionRecord(
            session, model, version, mode, position, tail, revision, last, idle_s, vocabulary, self._durable
        )

    def _identity(self, packed: bytes) -> Identity:
        (number,) = _NUMBER.unpack_from(packed, _NUMBER_AT)
        identity: Identity = self._identities[number]
        return identity

    def kind(self, session: str, *, expired: bool = False) -> tuple[str, str] | None:
        """Returns the session's model and vocabulary, unless it has expired. `expired`: also of an expired session."""
        packed = self._shards[hash(session) % SHARDS].get(session)
        if packed is None or (not expired and self._clock() > used_s(packed) + self._ttl_s):
            return None
        model, _, _, _, vocabulary = self._identity(packed)
        return model, vocabulary

    def touch(self, session: str) -> None:
        """Sets the time of the session's last use to now, if it is stored."""
        shard = self._shards[hash(session) % SHARDS]
        packed = shard.pop(session, None)
        if packed is not None:
            shard[session] = _USED.pack(self._clock()) + packed[_USED.size :]

    def drop_tail(self, session: str) -> None:
        """Removes the tokens of a stored session, which the caller keeps elsewhere until the next `put`."""
        shard = self._shards[hash(session) % SHARDS]
        self.used_bytes += HEADER_BYTES - len(shard[session])
        shard[session] = shard[session][:HEADER_BYTES]

    def forget(self, session: str) -> None:
        """Removes a session, if it is stored."""
        packed = self._shards[hash(session) % SHARDS].pop(session, None)
        if packed is not None:
            self._counts[self._identity(packed)[0]] -= 1
            self.used_bytes -= entry_bytes(session, len(packed) - HEADER_BYTES)
            self._on_forget(session)

    def all(self) -> Iterator[SessionRecord]:
        """Returns an iterator over every session that has not expired."""
        now_s = self._clock()
        for shard in self._shards:
            for session, packed in shard.items():
                if used_s(packed) >= now_s - self._ttl_s:
                    yield self._unpack(session, packed, now_s)

    def count(self, model: str) -> int:
        """Returns the number of a model's sessions. Removes expired sessions: see `expire`."""
        self.expire()
        return self._counts[model]

    def expire(self) -> None:
        """Removes at most EXPIRED_AT_ONCE expired sessions. Does not scan the shards, because the longest idle session
        of a shard comes first."""
        now_s, left = self._clock(), EXPIRED_AT_ONCE
        for number, shard in enumerate(self._shards):
            while left and now_s > self._quiet_until_s[number]:
                oldest = next(iter(shard.items()), None)
                ends_s = (now_s if oldest is None else used_s(oldest[1])) + self._ttl_s
                if oldest is None or now_s <= ends_s:
                    self._quiet_until_s[number] = ends_s
                    break
                if not self._update(oldest[0]):
                    self.forget(oldest[0])
                left -= 1

    def squeeze(self) -> None:
        """Evicts the longest idle sessions until the remaining sessions fit into the budget."""
        while self.used_bytes > self.budget_bytes:
            oldest = [entry for shard in self._shards if (entry := next(iter(shard.items()), None)) is not None]
            session, packed = min(oldest, key=lambda entry: used_s(entry[1]))
            if not self._update(session):
                self.forget(session)
                self._on_evict(self._identity(packed)[0])
