"""Saves sessions in a file. A server writes the file after it has drained, and the next server reads it when it starts.

    "wane sessions 2\\n"  SHA-256 of the rest  unix time  count   sessions
                         32 bytes             float64    uint64

Each session:

    bytes of the id  idle_s   bytes of the session  id     session
    uint16           float64  uint32                UTF-8  as in codec.py

Numbers are big-endian. The file is replaced atomically, and is read only if it is complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wane.service.sessions.stores import codec
from wane.service.sessions.stores.store import SessionRecord, StoreError

FIRST, MAGIC = b"wane sessions 1\n", b"wane sessions 2\n"
PART = ".part"
_HEAD = struct.Struct(">dQ")
_ENTRY = struct.Struct(">HdI")
DIGEST_BYTES = hashlib.sha256().digest_size


def save(path: Path, records: Sequence[SessionRecord], now_s: Callable[[], float] = time.time) -> None:
    """Writes the sessions to `path`. `now_s` returns unix time in seconds. Raises OSError if writing fails. The file is
    then unchanged."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("w+b") as file:
            file.write(MAGIC + bytes(DIGEST_BYTES))
            file.write(_HEAD.pack(now_s(), len(records)))
            for record in records:
                session, data = record.session.encode(), codec.write(record)
                file.write(_ENTRY.pack(len(session), record.idle_s, len(data)) + session + data)
            digest = _digest(file)
            file.seek(len(MAGIC))
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path, keep: int, now_s: Callable[[], float] = time.time) -> list[SessionRecord]:
    """Reads the sessions from `path`, in descending order of idle time, with the latest `keep` tokens of each. The idle
    time includes the time since the file was written. Raises StoreError if the file is damaged or has another format.
    """
    try:
        with path.open("rb") as file:
            if (magic := file.read(len(MAGIC))) != MAGIC:
                why = "was written by an earlier version of Wane" if magic == FIRST else "is not a file of sessions"
                raise StoreError(f"session_file {path} {why}; {ADVICE}")
            if file.read(DIGEST_BYTES) != _digest(file):
                raise StoreError(f"session_file {path} is damaged: its SHA-256 does not match; {ADVICE}")
            file.seek(len(MAGIC) + DIGEST_BYTES)
            saved_s, count = _HEAD.unpack(file.read(_HEAD.size))
            since_s = max(0.0, now_s() - saved_s)
            records = []
            for _ in range(count):
                id_bytes, idle_s, size = _ENTRY.unpack(file.read(_ENTRY.size))
                session = file.read(id_bytes).decode()
                records.append(codec.read(session, file.read(size), keep, idle_s + since_s))
    except (OSError, struct.error, ValueError) as error:
        raise StoreError(f"session_file {path} cannot be read: {error}; {ADVICE}") from error
    records.sort(key=lambda record: -record.idle_s)
    return records


ADVICE = "the file was left unchanged; to start without its sessions, move it away"


def _digest(file: io.BufferedReader | io.BufferedRandom) -> bytes:
    """Returns the digest of what follows the file's own digest."""
    file.seek(len(MAGIC) + DIGEST_BYTES)
    return hashlib.file_digest(file, hashlib.sha256).digest()
