"""Saves sessions in a file. A server writes the file after it has drained, and the next server reads it when it starts.

    "wane sessions 1\\n"  unix time  count   sessions  SHA-256 of all
                         float64    uint64            32 bytes

Each session:

    length  id     idle_s   length  session
    uint16  UTF-8  float64  uint32  as in codec.py

Numbers are big-endian. `length` is the number of bytes of the id or the session that follows. The file is replaced
atomically, and is read only if it is complete.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from wane.service.sessions.stores import codec
from wane.service.sessions.stores.store import SessionRecord, StoreError

MAGIC = b"wane sessions 1\n"
PART = ".part"
_HEAD = struct.Struct(">dQ")
_ID = struct.Struct(">H")
_ENTRY = struct.Struct(">dI")
DIGEST_BYTES = hashlib.sha256().digest_size


def save(path: Path, records: Sequence[SessionRecord], now_s: Callable[[], float] = time.time) -> None:
    """Writes the sessions to `path`. `now_s` returns unix time in seconds. Raises OSError if writing fails. The file is
    then unchanged."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            sha = hashlib.sha256()
            for piece in _pieces(records, now_s()):
                sha.update(piece)
                file.write(piece)
            file.write(sha.digest())
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
            _check(path, file)
            file.seek(len(MAGIC))
            saved_s, count = _HEAD.unpack(file.read(_HEAD.size))
            since_s = max(0.0, now_s() - saved_s)
            records = [_record(file, keep, since_s) for _ in range(count)]
    except (OSError, struct.error, ValueError) as error:
        raise StoreError(f"session_file {path} cannot be read: {error}; {ADVICE}") from error
    records.sort(key=lambda record: -record.idle_s)
    return records


ADVICE = "the file was left unchanged; to start without its sessions, move it away"


def _check(path: Path, file: BinaryIO) -> None:
    """Raises StoreError if the file was not written by `save`, or is incomplete."""
    if file.read(len(MAGIC)) != MAGIC:
        raise StoreError(f"session_file {path} is not a file of sessions; {ADVICE}")
    left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
    sha = hashlib.sha256()
    file.seek(0)
    while left > 0:
        piece = file.read(min(left, 2**20))
        sha.update(piece)
        left -= len(piece)
    if file.read() != sha.digest():
        raise StoreError(f"session_file {path} is damaged: its SHA-256 does not match; {ADVICE}")


def _pieces(records: Sequence[SessionRecord], now_s: float) -> Iterator[bytes]:
    yield MAGIC + _HEAD.pack(now_s, len(records))
    for record in records:
        session, data = record.session.encode(), codec.write(record)
        yield _ID.pack(len(session)) + session + _ENTRY.pack(record.idle_s, len(data)) + data


def _record(file: BinaryIO, keep: int, since_s: float) -> SessionRecord:
    (length,) = _ID.unpack(file.read(_ID.size))
    session = file.read(length).decode()
    idle_s, length = _ENTRY.unpack(file.read(_ENTRY.size))
    return codec.read(session, file.read(length), keep, idle_s + since_s)
