"""Limits that hold for all workers of a server together: the rates of API keys, and their numbers of sessions.

The workers share a table in a file that each of them maps into its memory. Each worker locks the file while it reads
and writes the table. The kernel releases the lock of a process that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np

from wane.service.auth.keyring import TokenBucket
from wane.service.auth.keys import Key
from wane.service.sessions.stores.memory import OwnedSessions

ROWS = 1 << 16
KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)


class SharedTable:
    """The table. `rows` has a row for each key or owner. A row is added when it is first used, and is never removed.
    `sessions` has the numbers of all workers."""

    def __init__(self, path: Path, workers: int) -> None:
        """Opens the table, and creates it if it does not exist."""
        row = np.dtype([("key", f"V{KEY_BYTES}"), ("held", "f8"), ("since_s", "f8"), ("sessions", "i8", (workers,))])
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, ROWS * row.itemsize)  # has no effect on a table of this size
        self.rows = np.frombuffer(mmap.mmap(self._file, ROWS * row.itemsize), row)
        self._indexes: dict[bytes, int] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the other workers from the table."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def row(self, key: bytes) -> np.void:
        """Returns a key's row. The caller has locked the table."""
        if (known := self._indexes.get(key)) is not None:
            return self.rows[known]  # type: ignore[no-any-return]
        first = int.from_bytes(key[:8], "little")
        for step in range(ROWS):
            index = (first + step) % ROWS
            row: np.void = self.rows[index]
            if row["key"].tobytes() in (key, NO_KEY):
                row["key"] = np.void(key)
                self._indexes[key] = index
                return row
        raise MemoryError(f"the workers share the limits of at most {ROWS} keys and owners")

    def forget(self, worker: int) -> None:
        """Removes the sessions of a worker that has ended."""
        with self.locked():
            counts = self.rows["sessions"][:, worker]
            counts[counts != 0] = 0  # keeps the unused pages of the file empty


class SharedBucket(TokenBucket):
    """A token bucket from which all workers take."""

    __slots__ = ("_key", "_table")

    def __init__(self, table: SharedTable, key: Key) -> None:
        super().__init__(key)
        self._table = table
        self._key = key.digest[:KEY_BYTES]

    def take(self, amount: float, before: float = 0.0) -> float:
        """See `TokenBucket`."""
        with self._table.locked():
            row = self._table.row(self._key)
            if row["since_s"]:  # another worker, or this one, has taken before
                self._held, self._since_s = float(row["held"]), float(row["since_s"])
            wait_s = super().take(amount, before)
            row["held"], row["since_s"] = self._held, self._since_s
        return wait_s


class SharedSessions(OwnedSessions):
    """Counts the sessions of each owner over all workers."""

    def __init__(self, table: SharedTable, worker: int) -> None:
        self._table = table
        self._worker = worker

    def claim(self, owner: str, most: int | None = None) -> bool:
        """See `OwnedSessions`."""
        return self._count(owner, 1, most)

    def release(self, owner: str) -> None:
        """See `OwnedSessions`."""
        self._count(owner, -1, None)

    def _count(self, owner: str, more: int, most: int | None) -> bool:
        key = blake2b(owner.encode(), digest_size=KEY_BYTES).digest()
        with self._table.locked():
            sessions = self._table.row(key)["sessions"]
            if most is not None and sessions.sum() >= most:
                return False
            sessions[self._worker] += more
        return True
