"""Tests of WebSockets whose messages are split at every byte, and of the frames' ends."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise

import pytest
from websockets.frames import Frame, Opcode

from tests.service.slow_client import HANDSHAKE, frame, serving
from wane.service.net.framing import Frames

FIRST, SECOND, THIRD = (json.dumps({"tokens": [1] * count}).encode() for count in (1, 2, 3))


def masked(text: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    """Returns a client's frame, with a random mask."""
    return Frame(opcode, text, fin).serialize(mask=True)


def fragmented(text: bytes) -> bytes:
    """Returns a message as two frames, with a ping frame between them."""
    return masked(text[:5], fin=False) + masked(b"", Opcode.PING) + masked(text[5:], Opcode.CONT)


async def positions(pieces: list[bytes], count: int) -> list[int]:
    """Sends the bytes of some steps in these pieces, one piece in each event loop iteration. Reads at least `count`
    answers. Returns the positions in the answers."""
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        said = b""
        while said.count(b'"position"') < count:
            some = await reader.read(2**16)
            assert some, said
            said += some
        writer.close()
    return [int(part.partition(b",")[0]) for part in said.split(b'"position":')[1:]]


STEPS = [masked(FIRST), masked(SECOND), masked(THIRD)]
WHOLE = b"".join(STEPS)
FRAGMENTS = fragmented(SECOND)


@pytest.mark.parametrize(
    "pieces",
    [
        STEPS,
        [WHOLE],
        [WHOLE[at : at + 1] for at in range(len(WHOLE))],
        [WHOLE[:1], WHOLE[1:]],
        [STEPS[0] + STEPS[1][:2], STEPS[1][2:] + STEPS[2]],
        [STEPS[0], STEPS[1][:9], STEPS[1][9:], STEPS[2]],
        [STEPS[0], FRAGMENTS, STEPS[2]],
        [STEPS[0], FRAGMENTS[:20], FRAGMENTS[20:], STEPS[2]],
        [STEPS[0], masked(SECOND, Opcode.BINARY), STEPS[2]],
        [STEPS[0], masked(SECOND.ljust(5000)), STEPS[2]],
        [STEPS[0], masked(b"", Opcode.PING), STEPS[1], masked(b"", Opcode.PONG), STEPS[2]],
        [frame(0x81, FIRST), frame(0x81, SECOND), frame(0x81, THIRD)],
    ],
    ids=[
        "one by one",
        "at once",
        "byte by byte",
        "split after the first byte",
        "split after a header",
        "split within a payload",
        "fragments",
        "split fragments",
        "bytes",
        "long",
        "pings",
        "a mask of zeros",
    ],
)
async def test_the_same_messages_are_read_however_the_bytes_are_split(pieces: list[bytes]) -> None:
    assert await positions(pieces, 3) == [1, 2, 3]


async def test_a_whole_message_within_another_message_is_an_error() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        for piece in (masked(FIRST), masked(b"{", fin=False), masked(FIRST)):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        said = await reader.read()  # waits until the server closes the connection
        writer.close()
    assert b"expected a continuation frame" in said and said.count(b'"position"') <= 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x81",
        b"\x81\x80",
        frame(0x01, b"{}"),
        frame(0x82, b"{}"),
        frame(0xC1, b"{}"),
        frame(0x81, b"x" * 126),
        frame(0x81, b"{}") + b"\x81",
        frame(0x81, b"{}")[:-1],
        b"\x81\x02{}",
        b"\x81\x02\x00\x00\x00\x00{}",
    ],
    ids=["one byte", "a header", "fragment", "bytes", "reserved", "long", "more", "less", "no mask", "no mask, longer"],
)
def test_data_other_than_one_short_text_is_not_a_short_text(data: bytes) -> None:
    assert not Frames().is_short_text(data)


@pytest.mark.parametrize("size", [0, 1, 125])
def test_a_short_text_is_recognised_unless_a_message_is_incomplete(size: int) -> None:
    frames, text = Frames(), masked(b"a" * size)
    assert frames.is_short_text(text)
    frames.take(masked(b"{", fin=False))
    assert not frames.is_short_text(text)


def test_frames_without_a_message_and_the_bytes_of_a_message_are_counted() -> None:
    frames, first, ping, last = (
        Frames(),
        masked(b"{" * 300, fin=False),
        masked(b"", Opcode.PING),
        masked(b"}", Opcode.CONT),
    )
    assert frames.take(ping) == 0 and (frames.without_message, frames.message_bytes) == (1, 0)
    assert frames.take(first + ping) == 0 and frames.without_message == 3 and frames.is_within_message
    assert frames.message_bytes == len(first + ping)
    assert frames.take(last + first) == len(first + ping + last)
    assert (frames.without_message, frames.message_bytes) == (1, len(first))


# Frame boundaries.


def random_frame(rng: random.Random) -> bytes:
    """Returns a whole message or a control frame of a random length. Sometimes encodes the length in more bytes than
    necessary."""
    payload = rng.randbytes(rng.choice((0, 1, 125, 126, 127, 300, 65_535, 65_536)))
    lengths = [b"\x7f" + len(payload).to_bytes(8)]
    if len(payload) <= 0xFFFF:
        lengths.append(b"\x7e" + len(payload).to_bytes(2))
    if len(payload) <= 125:
        lengths.append(bytes([len(payload)]))
    length = rng.choice(lengths)
    return (
        bytes([rng.choice((0x81, 0x82, 0x88, 0x89, 0x8A))])
        + bytes([length[0] | 0x80])
        + length[1:]
        + rng.randbytes(4)
        + payload
    )


def test_frame_boundaries_are_found_however_the_bytes_are_split() -> None:
    rng = random.Random(5)
    for _ in range(200):
        frames = [random_frame(rng) for _ in range(rng.randint(1, 6))]
        data = b"".join(frames)
        ends = {0} | {sum(map(len, frames[: count + 1])) for count in range(len(frames))}
        near = [min(len(data), max(0, end + rng.randint(-3, 16))) for end in ends]
        cuts = sorted({0, len(data), *near, *(rng.randint(0, len(data)) for _ in range(5))})
        found = Frames()
        for begin, end in pairwise(cuts):
            found.take(data[begin:end])
            assert found.is_within_message == (end not in ends)
