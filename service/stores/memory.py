"""Sessions in this process's memory: gone with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from service.engine.ownership import owner_of
from service.engine.standing import Standing
from service.errors import Overloaded, QuotaExceeded
from service.stores import saved
from service.stores.packed import Packing, entry_bytes, revision, tail_bytes, touched, touched_s
from service.stores.shard import Shard
from service.stores.store import LastStep, Record, Snapshot, appended, rewound
from service.stores.tail import Tail

logger = logging.getLogger("wane.store")

SHARDS = 64
ASIDE = ".read"  # behind the name of a file whose sessions were read
EXPIRED_AT_ONCE = 1000  # sessions that one call forgets at most, so that none takes long


class MemoryStore:
    """A `Store` of sessions that are each idle for at most `ttl_s`, within a budget in bytes.

    A new session is refused where there is no room for it and a whole tail. Those that are there may outgrow the
    budget all the same, as their tails fill; then the longest idle end before their time.
    """

    def __init__(
        self,
        tail_tokens: int,
        ttl_s: float,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_squeeze: Callable[[str], object] = lambda _: None,
        file: Path | None = None,
    ) -> None:
        """`on_squeeze` is told the model of every session that had to end for lack of room. `file`: where sessions are
        saved when the store is closed, and were when it is opened."""
        self.tail_tokens = tail_tokens
        self.used_bytes = 0
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._on_squeeze = on_squeeze
        self._file = file
        self._is_open = self._is_closed = False
        self._packing = Packing()
        self._shards = [Shard(ttl_s) for _ in range(SHARDS)]
        self._counts: Counter[str] = Counter()
        self._owned: Counter[str] = Counter()  # by owner

    async def create(self, record: Record, most: int | None = None) -> bool:
        """See `Store`."""
        session = record.session
        if self._find(session) is not None:
            return False
        self._forget(session)  # one of that id may be over and still be there
        self._expire([self._shard(session)])
        owner = owner_of(session)
        if most is not None and self._owned[owner] >= most:
            self._expire(self._shards)
            if self._owned[owner] >= most:
                raise QuotaExceeded(owner, most)
        whole = entry_bytes(session, (1 + self.tail_tokens) * record.tail.width)  # with <eos>
        if self.used_bytes + whole > self._budget_bytes:
            self._expire(self._shards)
        if self.used_bytes + whole > self._budget_bytes:
            raise Overloaded(
                f"the {sum(map(len, self._shards))} sessions that there are take {self.used_bytes} bytes, and one more "
                f"takes up to {whole}: too much for session_budget_bytes, which is {self._budget_bytes}"
            )
        self._add(record)
        return True

    async def get(self, session: str) -> Record | None:
        """See `Store`."""
        return self.look(session)

    def look(self, session: str) -> Record | None:
        """See `Ready`."""
        now_s = self._clock()
        packed = self._shards[hash(session) % SHARDS].get(session, now_s)
        return None if packed is None else self._packing.unpack(session, packed, now_s)

    def kind(self, session: str) -> tuple[str, str] | None:
        """See `Ready`."""
        packed = self._find(session)
        return None if packed is None else self._packing.kind(packed)

    def recall(self, session: str, *, to_step: bool = False) -> Record | None:  # noqa: ARG002  (it is always so)
        """See `Store`."""
        return self.look(session)

    async def touch(self, session: str) -> None:
        """See `Store`."""
        packed = self._find(session)
        if packed is not None:
            self._shard(session).put(session, touched(packed, self._clock()))

    async def append(
        self,
        session: str,
        revision: int,
        tokens: Sequence[int],
        step: LastStep,
        snapshot: Snapshot | None = None,  # noqa: ARG002  (states are not kept)
    ) -> Record | None:
        """See `Store`."""
        record = self._at(session, revision)
        return None if record is None else self.extend(record, tokens, step)

    def extend(self, record: Record, tokens: Sequence[int], step: LastStep) -> Record | None:
        """See `Ready`."""
        session, now_s = record.session, self._clock()
        packed = self._shards[hash(session) % SHARDS].get(session, now_s)
        if packed is None or revision(packed) != record.revision:
            return None
        position = record.position + len(tokens)
        tail = record.tail.append(tokens, position, self.tail_tokens)
        return self._change(record, packed, now_s, position, tail, appended(record.revision), step)

    async def rewind(self, session: str, revision: int, position: int) -> Record | None:
        """See `Store`."""
        packed, now_s = self._find(session), self._clock()
        record = None if packed is None else self._packing.unpack(session, packed, now_s)
        if packed is None or record is None or record.revision != revision:
            return None
        tail = record.tail.without_last(record.position - position)
        return self._change(record, packed, now_s, position, tail, rewound(revision))

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
    def standing(self) -> Standing:
        """See `Store`."""
        return Standing("memory")

    async def open(self) -> None:
        """See `Store`. A file that was read is put aside: from the first step on it is out of date. One that was still
        being read when the store was closed stays where it is, for the next process."""
        if self._file is None or not await asyncio.to_thread(self._file.exists):
            self._is_open = True
            return
        records = await asyncio.to_thread(saved.load, self._file, self.tail_tokens)
        if self._is_closed:
            return
        for record in records:
            self._add(record)
        while self.used_bytes > self._budget_bytes:
            self._squeeze()
        self._put_aside(self._file)
        logger.info("%d sessions were read from %s", sum(map(len, self._shards)), self._file)

    async def close(self) -> None:
        """See `Store`. A file that could not be read is left as it is."""
        self._is_closed = True
        if self._file is None or not self._is_open:
            return
        now_s = self._clock()
        packed = chain.from_iterable(shard.all(now_s) for shard in self._shards)
        alive = [self._packing.unpack(session, entry, now_s) for session, entry in packed]
        try:
            await asyncio.to_thread(saved.save, self._file, alive)
        except OSError:
            logger.exception("the sessions could not be written to %s", self._file)
        else:
            logger.info("%d sessions were written to %s", len(alive), self._file)

    def _put_aside(self, file: Path) -> None:
        """Not to be interrupted: its sessions are in the file, or here."""
        file.replace(file.with_name(file.name + ASIDE))
        self._is_open = True

    def _shard(self, session: str) -> Shard:
        return self._shards[hash(session) % SHARDS]

    def _find(self, session: str) -> bytes | None:
        """The session, unless it has been idle for longer than the time to live."""
        return self._shard(session).get(session, self._clock())

    def _at(self, session: str, revision: int) -> Record | None:
        """The session, if it is at `revision`."""
        packed = self._find(session)
        if packed is None:
            return None
        record = self._packing.unpack(session, packed, self._clock())
        return record if record.revision == revision else None

    def _change(
        self,
        before: Record,
        packed: bytes,
        now_s: float,
        position: int,
        tail: Tail,
        revision: int,
        last: LastStep | None = None,
    ) -> Record:
        """The session at its next revision, used now; `packed` is what it was before."""
        session, model, version, mode = before[:4]
        record = Record(session, model, version, mode, position, tail, revision, last, 0.0, before.vocabulary)
        self.used_bytes += len(tail.data) - len(before.tail.data)
        self._shards[hash(session) % SHARDS].put(session, self._packing.repack(packed, record, now_s))
        while self.used_bytes > self._budget_bytes:
            self._squeeze()
        return record

    def _add(self, record: Record) -> None:
        """One more session."""
        self._counts[record.model] += 1
        self._owned[owner_of(record.session)] += 1
        self.used_bytes += entry_bytes(record.session, len(record.tail.data))
        self._put(record)

    def _put(self, record: Record) -> None:
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
        """Forgets sessions that are over: from the front of their order, never by a scan, and some at a time."""
        now_s = self._clock()
        left = EXPIRED_AT_ONCE
        for shard in shards:
            while left and (session := shard.over(now_s)) is not None:
                self._forget(session)
                left -= 1

    def _squeeze(self) -> None:
        """Ends the session that was longest idle."""
        oldest = [oldest for shard in self._shards if (oldest := shard.oldest()) is not None]
        session, packed = min(oldest, key=lambda entry: touched_s(entry[1]))
        self._forget(session)
        self._on_squeeze(self._packing.model(packed))
