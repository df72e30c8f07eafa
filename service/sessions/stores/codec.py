"""Encodes a session and a snapshot for other processes: in a shared store, or in a dump file.

A session:

    revision  run     length  format  stamp   position  start  tokens' digest    key's digest      identity  tail
    uint64    uint32  uint16  uint8   uint64  uint64    int64  16 bytes at most  16 bytes at most  JSON      token ids

Numbers are big-endian, and token ids are little-endian. `run` is the time of Redis's last save to disk or, before the
first save, of its start. It therefore changes with every restart of Redis. In a dump file it is 0. `length` is the
number of bytes of the head, from `format` to `identity`. `stamp` is a random number that identifies a change and its
writer. `start` is the last step's starting position, or -1 if there is no last step. `identity` (model, version, mode,
width of a token id, vocabulary) does not change. A byte with the digest's length stands before each digest.

A snapshot (`Snapshot`), which is stored at every checkpoint in addition to the session's last tokens:

    position  dropped_tokens  length  model_fingerprint  state
    uint64    uint64          uint16  `length` bytes     float32, as in the state pool

Numbers are big-endian. The state has this machine's byte order.
"""

from __future__ import annotations

import json
import secrets
import struct
from functools import lru_cache

from wane.models.manifest import Manifest
from wane.service.sessions.record import TokenHistory
from wane.service.sessions.stores.store import DIGEST_BYTES, LastStep, SessionRecord, Snapshot, digest
from wane.service.types import Mode, id_of

_SNAPSHOT_HEAD = struct.Struct(">QQH")


def write_snapshot(snapshot: Snapshot) -> bytes:
    head = _SNAPSHOT_HEAD.pack(snapshot.position, snapshot.dropped_tokens, len(snapshot.model_fingerprint))
    return head + snapshot.model_fingerprint + snapshot.state


def read_snapshot(data: bytes) -> Snapshot | None:
    """Decodes a snapshot. Returns None if the bytes are invalid. In this case the state is rebuilt from the stored
    tokens."""
    if len(data) < _SNAPSHOT_HEAD.size:
        return None
    position, dropped_tokens, length = _SNAPSHOT_HEAD.unpack_from(data)
    state = data[_SNAPSHOT_HEAD.size :]
    return Snapshot(position, dropped_tokens, state[:length], state[length:])


def model_fingerprint(manifest: Manifest, bits: bytes) -> bytes:
    """Returns a digest of the model's version, its files, and its graphs' results on this kind of processor (`bits`). A
    snapshot with another fingerprint is not used, and the state is rebuilt."""
    told = json.dumps([manifest.name, manifest.version, sorted(manifest.files.items()), bits.hex()])
    return digest(told.encode())


def due(before: int, after: int, every: int) -> bool:
    """Returns whether a step from position `before` to `after` reaches a checkpoint. A checkpoint is a position that is
    a multiple of `every`."""
    return after // every > before // every


FORMAT = 1
NO_STEP = -1
STAMP_BITS = 64
REVISION = struct.Struct(">Q")
_FRONT = struct.Struct(">QIH")
_RUN = struct.Struct(">QI")
_HEAD = struct.Struct(f">BQQq{1 + DIGEST_BYTES}p{1 + DIGEST_BYTES}p")
IDENTITIES = 4096  # size of the cache of identities: above the number of versions and modes of all loaded models


class Unreadable(ValueError):
    """The bytes are not a session, or were written by a later version of Wane."""


def head(record: SessionRecord) -> bytes:
    """Encodes a session without its revision and its tokens. Every call draws a new stamp."""
    start, tokens, key = record.last or (NO_STEP, b"", None)
    identity = _identity(record.model, record.model_version, record.mode, record.tail.width, record.vocabulary)
    stamp = secrets.randbits(STAMP_BITS)
    return _HEAD.pack(FORMAT, stamp, record.position, start, tokens, key or b"") + identity


def write(record: SessionRecord) -> bytes:
    about = head(record)
    return _FRONT.pack(record.revision, 0, len(about)) + about + record.tail.data


def after_run(written: bytes) -> bytes:
    """Returns the bytes that follow the field `run` in a session that `write` encoded."""
    return written[_RUN.size :]


def read(session: str, data: bytes, keep: int, idle_s: float = 0.0) -> SessionRecord:
    """Decodes a session with its latest `keep` tokens. Raises Unreadable."""
    try:
        revision, _, length = _FRONT.unpack_from(data)
        about = data[_FRONT.size : _FRONT.size + length]
        form, _, position, start, tokens, key = _HEAD.unpack_from(about)
        if form != FORMAT:
            raise Unreadable(
                f"session {id_of(session)!r} is written in format {form}, but this version reads format {FORMAT}"
            )
        model, version, mode, width, vocabulary = _read_identity(about[_HEAD.size :])
    except (struct.error, ValueError, TypeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"the stored bytes of session {id_of(session)!r} cannot be read") from error
    ids = data[_FRONT.size + length :]
    if not ids or len(ids) % width:
        raise Unreadable(
            f"the tokens of session {id_of(session)!r} take {len(ids)} bytes, which is no positive multiple of {width}"
        )
    last = None if start == NO_STEP else LastStep(start, tokens, key or None)
    tail = TokenHistory(ids if position <= keep else ids[-keep * width :], width)
    return SessionRecord(session, model, version, mode, position, tail, revision, last, idle_s, vocabulary)


@lru_cache(IDENTITIES)
def _identity(model: str, version: str, mode: Mode, width: int, vocabulary: str) -> bytes:
    return json.dumps([model, version, mode.value, width, vocabulary], ensure_ascii=False).encode()


@lru_cache(IDENTITIES)
def _read_identity(data: bytes) -> tuple[str, str, Mode, int, str]:
    model, version, mode, width, vocabulary = json.loads(data)
    if width not in (2, 4):
        raise ValueError(f"the width of a token id is {width}, but must be 2 or 4")
    return str(model), str(version), Mode(mode), int(width), str(vocabulary)
