"""Where frames begin and end in what a client sends."""

from __future__ import annotations

import random
from itertools import pairwise

from wane.service.net.websocket_protocol import FrameBoundary


def frame(rng: random.Random) -> bytes:
    """A frame of any kind and length; the length is sometimes written in more bytes than it needs."""
    payload = rng.randbytes(rng.choice((0, 1, 125, 126, 127, 300, 65_535, 65_536)))
    lengths = [b"\x7f" + len(payload).to_bytes(8)]
    if len(payload) <= 0xFFFF:
        lengths.append(b"\x7e" + len(payload).to_bytes(2))
    if len(payload) <= 125:
        lengths.append(bytes([len(payload)]))
    length = rng.choice(lengths)
    return rng.randbytes(1) + bytes([length[0] | 0x80]) + length[1:] + rng.randbytes(4) + payload


def test_a_boundary_is_known_however_the_bytes_are_split() -> None:
    rng = random.Random(5)
    for _ in range(200):
        frames = [frame(rng) for _ in range(rng.randint(1, 6))]
        data = b"".join(frames)
        ends = {0} | {sum(map(len, frames[: count + 1])) for count in range(len(frames))}
        near = [min(len(data), max(0, end + rng.randint(-3, 16))) for end in ends]
        cuts = sorted({0, len(data), *near, *(rng.randint(0, len(data)) for _ in range(5))})
        boundary = FrameBoundary()
        for begin, end in pairwise(cuts):
            boundary.feed(data[begin:end])
            assert boundary.is_within_frame == (end not in ends)
