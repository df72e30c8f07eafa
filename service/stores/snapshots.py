"""States beside tails: when one is kept, and how it is written.

    position  cut     length  maker  state
    uint64    uint64  uint16         float32, as the slab holds it

Numbers are big-endian, states as this machine has them.
"""

from __future__ import annotations

import json
import struct

from models.manifest import Manifest
from service.stores.store import Snapshot, digest

_HEAD = struct.Struct(">QQH")


def write_snapshot(snapshot: Snapshot) -> bytes:
    """A snapshot, in bytes."""
    head = _HEAD.pack(snapshot.position, snapshot.cut, len(snapshot.maker))
    return head + snapshot.maker + snapshot.state


def read_snapshot(data: bytes) -> Snapshot | None:
    """The snapshot that was written; None for what is none: then the tail will do."""
    if len(data) < _HEAD.size:
        return None
    position, cut, length = _HEAD.unpack_from(data)
    state = data[_HEAD.size :]
    return Snapshot(position, cut, state[:length], state[length:])


def maker(manifest: Manifest, bits: bytes) -> bytes:
    """What tells states of this model from those of all others: a digest of its version, of every file, and of what its
    graphs compute on this kind of processor (`bits`). A state from another kind is not gone on from: it is rebuilt."""
    told = json.dumps([manifest.name, manifest.version, sorted(manifest.files.items()), bits.hex()])
    return digest(told.encode())


def due(before: int, after: int, every: int) -> bool:
    """Whether a state is to be kept by a step from one position to another: one of every `every` tokens."""
    return after // every > before // every
