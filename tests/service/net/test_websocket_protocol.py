"""Tests of Wane's own WebSocket protocol class, with messages that are split at every byte and with texts of every
length."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from wane.service.net.receive_queue import CHANNEL, ClientDisconnected
from wane.service.net.websocket_protocol import FrameBoundary, short_text
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from tests.service.slow_client import HANDSHAKE, frame, serving, until
from wane.service.observability.metrics import Metrics
from wane.service.server import protocols
from wane.service.settings import Settings

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
def test_data_other_than_one_short_text_is_parsed_by_websockets(data: bytes) -> None:
    assert short_text(data) is None


@pytest.mark.parametrize("size", [0, 1, 125])
def test_a_short_text_is_read(size: int) -> None:
    assert short_text(masked(b"a" * size)) == b"a" * size


@asynccontextmanager
async def serving_texts(texts: list[bytes], refused: asyncio.Event) -> AsyncIterator[str]:
    """Starts a server that sends these texts on every WebSocket. After the client has disconnected, the server checks
    that another send fails, and sets the event `refused`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        channel = scope[CHANNEL]
        await receive()
        await send({"type": "websocket.accept"})
        for text in texts:
            await channel.send_text(text)
        while (await channel.receive())["type"] != "websocket.disconnect":
            pass
        with pytest.raises(ClientDisconnected):
            await channel.send_text(b"late")
        await channel.send_close(1000, "late")  # has no effect and raises no error, because the WebSocket is closed
        refused.set()

    named = protocols(Settings(), Metrics())
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, **named))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"ws://{host}:{port}/"
    server.should_exit = True
    await task


async def test_texts_of_every_length_are_received_unchanged() -> None:
    texts = [b"x" * size for size in (0, 1, 125, 126, 65_535, 65_536, 300_000)]
    refused = asyncio.Event()
    async with serving_texts(texts, refused) as url:
        async with connect(url, proxy=None) as client:
            assert [await client.recv() for _ in texts] == [text.decode() for text in texts]
        await refused.wait()


# Frame boundaries.


def random_frame(rng: random.Random) -> bytes:
    """Returns a frame of a random kind and length. Sometimes encodes the length in more bytes than necessary."""
    payload = rng.randbytes(rng.choice((0, 1, 125, 126, 127, 300, 65_535, 65_536)))
    lengths = [b"\x7f" + len(payload).to_bytes(8)]
    if len(payload) <= 0xFFFF:
        lengths.append(b"\x7e" + len(payload).to_bytes(2))
    if len(payload) <= 125:
        lengths.append(bytes([len(payload)]))
    length = rng.choice(lengths)
    return rng.randbytes(1) + bytes([length[0] | 0x80]) + length[1:] + rng.randbytes(4) + payload


def test_frame_boundaries_are_found_however_the_bytes_are_split() -> None:
    rng = random.Random(5)
    for _ in range(200):
        frames = [random_frame(rng) for _ in range(rng.randint(1, 6))]
        data = b"".join(frames)
        ends = {0} | {sum(map(len, frames[: count + 1])) for count in range(len(frames))}
        near = [min(len(data), max(0, end + rng.randint(-3, 16))) for end in ends]
        cuts = sorted({0, len(data), *near, *(rng.randint(0, len(data)) for _ in range(5))})
        boundary = FrameBoundary()
        for begin, end in pairwise(cuts):
            boundary.feed(data[begin:end])
            assert boundary.is_within_frame == (end not in ends)
