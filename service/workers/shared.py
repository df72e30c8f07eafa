"""Limits that hold for all workers of a server together: the rates of API keys, and their numbers of sessions.

The workers share a table in a file that each of them maps into its memory. Each worker locks the file while it reads
and writes the table. The kernel releases the lock of a process that ends.

    key        level    time     sessions of each worker
    16 bytes   float64  float64  int64 * workers
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from wane.service.auth.keyring import TokenBucket
from wane.service.auth.keys import Key
from wane.service.sessions.stores.memory import OwnedSessions

ROWS = 1 << 16
KEY_BYTES = 16
LEVEL = struct.Struct("<dd")
COUNT = struct.Struct("<q")
NO_KEY = bytes(KEY_BYTES)


class SharedTable:
    """The table. A row is added when it is first used, and is never removed."""

    def __init__(self, path: Path, workers: int) -> None:
        """Opens the table, and creates it if it does not exist."""
        self._row_bytes = KEY_BYTES + LEVEL.size + workers * COUNT.size
        self._workers = workers
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, ROWS * self._row_bytes)  # has no effect on a table of this size
        self.memory = mmap.mmap(self._file, ROWS * self._row_bytes)
        self._rows: dict[bytes, int] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the other workers from the table."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def row(self, key: bytes) -> int:
        """Returns the offset of a key's row, behind the key. The caller has locked the table."""
        offset = self._rows.get(key)
        if offset is not None:
            return offset
        first = int.from_bytes(key[:8], "little")
        for step in range(ROWS):
            offset = (first + step) % ROWS * self._row_bytes
            held = self.memory[offset : offset + KEY_BYTES]
            if held in (key, NO_KEY):
                self.memory[offset : offset + KEY_BYTES] = key
                self._rows[key] = offset + KEY_BYTES
                return offset + KEY_BYTES
        raise MemoryError(f"the workers share the limits of at most {ROWS} keys and owners")

    def counts(self, row: int) -> list[int]:
        """Returns the number of sessions of each worker in a row."""
        start = row + LEVEL.size
        return [COUNT.unpack_from(self.memory, start + COUNT.size * worker)[0] for worker in range(self._workers)]

    def set_count(self, row: int, worker: int, count: int) -> None:
        """Sets one worker's number of sessions in a row."""
        COUNT.pack_into(self.memory, row + LEVEL.size + COUNT.size * worker, count)

    def forget(self, worker: int) -> None:
        """Removes the sessions of a worker that has ended."""
        with self.locked():
            for offset in range(KEY_BYTES, len(self.memory), self._row_bytes):
                if self.counts(offset)[worker]:
                    self.set_count(offset, worker, 0)


class SharedBucket(TokenBucket):
    """A token bucket from which all workers take."""

    __slots__ = ("_key", "_table")

    def __init__(self, table: SharedTable, key: Key) -> None:
        super().__init__(key)
        self._table = table
        self._key = key.digest[:KEY_BYTES]

    def take(self, amount: float, before: float = 0.0) -> float:
        """See `TokenBucket`."""
        table = self._table
        with table.locked():
            row = table.row(self._key)
            held, since_s = LEVEL.unpack_from(table.memory, row)
            if since_s:  # another worker, or this one, has taken before
                self._held, self._since_s = held, since_s
            wait_s = super().take(amount, before)
            LEVEL.pack_into(table.memory, row, self._held, self._since_s)
        return wait_s


class SharedSessions(OwnedSessions):
    """Counts the sessions of each owner over all workers."""

    def __init__(self, table: SharedTable, worker: int) -> None:
        self._table = table
        self._worker = worker
        self._own: Counter[str] = Counter()

    def claim(self, owner: str, most: int | None = None) -> bool:
        """See `OwnedSessions`."""
        table = self._table
        with table.locked():
            row = table.row(blake2b(owner.encode(), digest_size=KEY_BYTES).digest())
            if most is not None and sum(table.counts(row)) >= most:
                return False
            self._own[owner] += 1
            table.set_count(row, self._worker, self._own[owner])
        return True

    def release(self, owner: str) -> None:
        """See `OwnedSessions`."""
        table = self._table
        with table.locked():
            self._own[owner] -= 1
            row = table.row(blake2b(owner.encode(), digest_size=KEY_BYTES).digest())
            table.set_count(row, self._worker, self._own[owner])
            if not self._own[owner]:
                del self._own[owner]
