"""Encodes sessions in a dump file and in a shared store. Numbers are big-endian, and token ids are little-endian. This
encoding and that in memory (`packed.py`) have the same four fields, and end with the tail:

    position  start  tokens' digest    key's digest      tail
    uint64    int64  16 bytes at most  16 bytes at most  token ids

`start` is the last step's starting position, or -1 if there is no last step. A byte with the digest's length stands
before each digest. The key's digest is empty if the step had no key.

The identity (model, version, mode, the width of a token id, the vocabulary) stands between the digests and the tail, as
JSON. Before them stand:

    revision  run     format  stamp   bytes of the identity  bytes of the tail
    uint64    uint32  uint8   uint64  uint16                 uint32

`run` is the time of Redis's last save to disk or, before the first save, of its start. It therefore changes with every
restart of Redis. In a dump file it is 0. `stamp` is a random number that identifies a change and its writer. The fields
from `format` to the identity are the head.

A snapshot (`Snapshot`), which is stored at every checkpoint in addition to the session's last tokens:

    position  dropped_tokens  length  model_fingerprint  state
    uint64    uint64          uint16  `length` bytes     float32, as in the state pool

The state has this machine's byte order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import lru_cache
from random import getrandbits

from wane.models.manifest import Manifest
from wane.service.sessions.stores.store import DIGEST_BYTES, LastStep, SessionRecord, Snapshot, TokenHistory, digest
from wane.service.types.common import Mode
from wane.service.types.request import id_of

FORMAT = 2
NO_STEP = -1
STAMP_BITS = 64
FARTHEST = 2**53  # the scripts of a store count exactly up to this position
IDENTITIES = 4096  # size of the cache of identities: above the number of versions and modes of all loaded models
REVISION = struct.Struct(">Q")
FIELDS = f"Qq{1 + DIGEST_BYTES}p{1 + DIGEST_BYTES}p"
_HEAD = struct.Struct(f">BQHI{FIELDS}")
_RUN_AT, _HEAD_AT = 8, 12
_SNAPSHOT_HEAD = struct.Struct(">QQH")

Identity = tuple[str, str, Mode, int, str]
"""Model, version, mode, number of bytes of a token id, and vocabulary."""


class Unreadable(ValueError):
    """The bytes are not a session, or were written by another version of Wane."""


def head(record: SessionRecord) -> bytes:
    """Encodes a session for other processes, without its revision, its run and its tail. Every call draws a new
    stamp."""
    start, tokens, key = record.last or (NO_STEP, b"", b"")
    identity, stamp, size = _written(identity_of(record)), getrandbits(STAMP_BITS), len(record.tail.data)
    return _HEAD.pack(FORMAT, stamp, len(identity), size, record.position, start, tokens, key or b"") + identity


def write(record: SessionRecord) -> bytes:
    """Encodes a session for other processes."""
    return REVISION.pack(record.revision) + bytes(_HEAD_AT - _RUN_AT) + head(record) + record.tail.data


def read(
    session: str, data: bytes, keep: int, idle_s: float = 0.0, vocabulary_sizes: Mapping[str, int] | None = None
) -> SessionRecord:
    """Decodes a session with its latest `keep` tokens. `vocabulary_sizes` has the number of tokens of vocabularies. The
    ids of a session are checked if its vocabulary is among them. Raises Unreadable."""
    if len(data) > _HEAD_AT and data[_HEAD_AT] != FORMAT:
        raise Unreadable(
            f"session {id_of(session)!r} is not written in format {FORMAT}, which is the only one this version reads"
        )
    try:
        (revision,) = REVISION.unpack_from(data)
        _, _, length, size, position, start, tokens, key = _HEAD.unpack_from(data, _HEAD_AT)
        tail_at = _HEAD_AT + _HEAD.size + length
        model, version, mode, width, vocabulary = _read_identity(data[_HEAD_AT + _HEAD.size : tail_at])
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the stored bytes of session {id_of(session)!r} cannot be read") from error
    ids = data[tail_at:]
    if len(ids) != size or not size or size % width:
        raise Unreadable(
            f"the tokens of session {id_of(session)!r} take {len(ids)} bytes, but should take {size}, in tokens of "
            f"{width} bytes"
        )
    tail = TokenHistory(ids, width)
    # A tail is the whole sequence with <eos>, or lacks at least one of the sequence's tokens.
    if position > FARTHEST or (position != len(tail) - 1 and position <= len(tail)):
        raise Unreadable(f"session {id_of(session)!r} cannot have {len(tail)} stored tokens at position {position}")
    if not NO_STEP <= start <= position:
        raise Unreadable(f"session {id_of(session)!r} is at position {position}, but its last step starts at {start}")
    size = (vocabulary_sizes or {}).get(vocabulary, 1 << 8 * width)
    largest = int(tail.ids().max())
    if largest >= size:
        raise Unreadable(f"session {id_of(session)!r} has the token {largest}, but its vocabulary has {size} tokens")
    last = None if start == NO_STEP else LastStep(start, tokens, key or None)
    tail = TokenHistory(ids if position <= keep else ids[-keep * width :], width)
    return SessionRecord(session, model, version, mode, position, tail, revision, last, idle_s, vocabulary)


def identity_of(record: SessionRecord) -> Identity:
    return record.model, record.model_version, record.mode, record.tail.width, record.vocabulary


@lru_cache(IDENTITIES)
def _written(identity: Identity) -> bytes:
    model, version, mode, width, vocabulary = identity
    return json.dumps([model, version, mode.value, width, vocabulary], ensure_ascii=False).encode()


@lru_cache(IDENTITIES)
def _read_identity(data: bytes) -> Identity:
    model, version, mode, width, vocabulary = json.loads(data)
    if width not in (2, 4):
        raise ValueError(f"the width of a token id is {width}, but must be 2 or 4")
    return str(model), str(version), Mode(mode), int(width), str(vocabulary)


def write_snapshot(snapshot: Snapshot) -> bytes:
    """Encodes a snapshot."""
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
