"""A session in one `bytes` object: a million of them have to fit into a gigabyte.

    touched_s  position  revision  start  identity  tokens' digest  key's digest  tail
    float64    uint64    uint64    int64  uint16    16 bytes at most, each after its length    token ids

`start` is that of the last step, -1 where there is none; a key's digest is empty where it had no key. What many
sessions have in common, model, version, mode, the width of an id and the vocabulary, is their identity, kept once.
Bytes hold no references, so the garbage collector does not walk through them, however many there are.
"""

from __future__ import annotations

import struct

from service.engine.mode import Mode
from service.stores.store import DIGEST_BYTES, LastStep, Record, Snapshot
from service.stores.tail import Tail

TOUCHED = struct.Struct("<d")
_REVISION = struct.Struct("<dQQ")
_IDENTITY = struct.Struct("<H")
_IDENTITY_AT = struct.calcsize("<dQQq")
_HEADER = struct.Struct(f"<dQQqH{1 + DIGEST_BYTES}p{1 + DIGEST_BYTES}p")
NO_STEP = -1
# Measured by benchmarks/parked.py: a string, a bytes object, a share of a dict's table, and what goes to waste because
# memory is handed out in steps of 16 bytes.
BESIDE_BYTES = 200


Identity = tuple[str, str, Mode, int, str]
"""What many sessions have in common: model, version, mode, how many bytes a token id takes, and the vocabulary."""


def entry_bytes(session: str, tail: int) -> int:
    """Memory that a session takes whose tail is of so many bytes."""
    return BESIDE_BYTES + len(session) + _HEADER.size + tail


def tail_bytes(packed: bytes) -> int:
    """How long the session's tail is."""
    return len(packed) - _HEADER.size


def touched_s(packed: bytes) -> float:
    """When the session was last used."""
    (when,) = TOUCHED.unpack_from(packed)
    return float(when)


def revision(packed: bytes) -> int:
    """How often the session was changed."""
    (_, _, changes) = _REVISION.unpack_from(packed)
    return int(changes)


def touched(packed: bytes, now_s: float) -> bytes:
    """The session, used now."""
    return TOUCHED.pack(now_s) + packed[TOUCHED.size :]


class Packing:
    """Packs records and unpacks them. Identities are numbered as they come: there are as many as the models loaded
    have versions and modes."""

    def __init__(self) -> None:
        self._identities: list[Identity] = []
        self._numbers: dict[Identity, int] = {}

    def pack(self, record: Record, now_s: float) -> bytes:
        """The record, used now."""
        identity = record.model, record.model_version, record.mode, record.tail.width, record.vocabulary
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self._identities)
            self._identities.append(identity)
        return self._pack(number, record, now_s)

    def repack(self, packed: bytes, record: Record, now_s: float) -> bytes:
        """As `pack`, of a record that was changed; `packed` is what it was."""
        (number,) = _IDENTITY.unpack_from(packed, _IDENTITY_AT)
        return self._pack(number, record, now_s)

    def _pack(self, number: int, record: Record, now_s: float) -> bytes:
        start, tokens, key = record.last or (NO_STEP, b"", None)
        header = _HEADER.pack(now_s, record.position, record.revision, start, number, tokens, key or b"")
        return header + record.tail.data

    def unpack(
        self, session: str, packed: bytes, now_s: float, durable: bool | None = None, snapshot: Snapshot | None = None
    ) -> Record:
        """The record, as of now; `durable` and `snapshot` are not packed."""
        touched_s, position, revision, start, number, tokens, key = _HEADER.unpack_from(packed)
        model, version, mode, width, vocabulary = self._identities[number]
        tail = Tail(packed[_HEADER.size :], width)
        last = None if start == NO_STEP else LastStep(start, tokens, key or None)
        idle_s = now_s - touched_s
        return Record(
            session, model, version, mode, position, tail, revision, last, idle_s, vocabulary, durable, snapshot
        )

    def kind(self, packed: bytes) -> tuple[str, str]:
        """The session's model and vocabulary."""
        (number,) = _IDENTITY.unpack_from(packed, _IDENTITY_AT)
        model, _, _, _, vocabulary = self._identities[number]
        return model, vocabulary

    def model(self, packed: bytes) -> str:
        """The session's model."""
        return self.kind(packed)[0]
