"""The server's own WebSockets: however a message comes in it is taken for what it is, and whatever is said is heard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from tests.service.slow_client import HANDSHAKE, frame, serving
from wane.service.errors import Abandoned
from wane.service.net.receive_queue import CHANNEL, ClientDisconnected, ReceiveQueue
from wane.service.net.websocket_protocol import short_text
from wane.service.observability.metrics import Metrics
from wane.service.server import protocols
from wane.service.settings import Settings

FIRST, SECOND, THIRD = (json.dumps({"tokens": [1] * count}).encode() for count in (1, 2, 3))


def masked(text: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    """A frame as clients send it, with a mask of its own."""
    return Frame(opcode, text, fin).serialize(mask=True)


def fragmented(text: bytes) -> bytes:
    """A message of two frames, and a ping between them."""
    return masked(text[:5], fin=False) + masked(b"", Opcode.PING) + masked(text[5:], Opcode.CONT)


async def positions(pieces: list[bytes], count: int) -> list[int]:
    """Where the steps end that are sent in these pieces, each in a turn of its own."""
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
        "torn behind the first byte",
        "torn behind a header",
        "torn within one",
        "fragments",
        "torn fragments",
        "bytes",
        "long",
        "pings",
        "a mask of zeros",
    ],
)
async def test_messages_are_the_same_however_they_come(pieces: list[bytes]) -> None:
    assert await positions(pieces, 3) == [1, 2, 3]


async def test_a_frame_that_looks_like_a_message_within_another_message_is_an_error() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        for piece in (masked(FIRST), masked(b"{", fin=False), masked(FIRST)):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        said = await reader.read()  # until it is closed
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
def test_what_is_not_one_short_text_is_left_to_the_library(data: bytes) -> None:
    assert short_text(data) is None


@pytest.mark.parametrize("size", [0, 1, 125])
def test_a_short_text_is_read(size: int) -> None:
    assert short_text(masked(b"a" * size)) == b"a" * size


@asynccontextmanager
async def saying(texts: list[bytes], heard: asyncio.Event) -> AsyncIterator[str]:
    """A server that says these texts on every WebSocket, and notes that a client that has left can be told nothing."""

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
        await channel.send_close(1000, "late")  # changes nothing
        heard.set()

    named = protocols(Settings(), Metrics())
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, **named))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"ws://{host}:{port}/"
    server.should_exit = True
    await task


async def test_texts_of_every_length_are_heard_as_they_were_said() -> None:
    texts = [b"x" * size for size in (0, 1, 125, 126, 65_535, 65_536, 300_000)]
    heard = asyncio.Event()
    async with saying(texts, heard) as url:
        async with connect(url, proxy=None) as client:
            assert [await client.recv() for _ in texts] == [text.decode() for text in texts]
        await heard.wait()


# What a channel's route waits in.


async def test_work_for_a_client_that_leaves_is_given_up() -> None:
    receive_queue = ReceiveQueue(asyncio.get_running_loop())
    with pytest.raises(Abandoned), receive_queue:
        receive_queue.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_work_for_a_client_that_has_left_already_has_its_time_and_is_given_up_then() -> None:
    receive_queue = ReceiveQueue(asyncio.get_running_loop())
    receive_queue.put_nowait({"type": "websocket.receive", "text": "{}"})
    receive_queue.put_nowait({"type": "websocket.disconnect", "code": 1000})
    assert (await receive_queue.get())["type"] == "websocket.receive"
    with receive_queue:
        await asyncio.sleep(0)
    with pytest.raises(Abandoned), receive_queue:
        await asyncio.Event().wait()
    assert (await receive_queue.get())["type"] == "websocket.disconnect"


async def test_a_cancellation_from_elsewhere_is_no_hang_up() -> None:
    receive_queue = ReceiveQueue(asyncio.get_running_loop())

    async def waits() -> None:
        with receive_queue:
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_comes_is_taken_in_its_order_by_one_who_waited_for_it() -> None:
    receive_queue = ReceiveQueue(asyncio.get_running_loop())
    waiting = asyncio.create_task(receive_queue.get())
    await asyncio.sleep(0)
    for code in (1, 2):
        receive_queue.put_nowait({"type": "websocket.receive", "code": code})
    assert (await waiting)["code"] == 1
    assert len(receive_queue) == 1 and (await receive_queue.get())["code"] == 2 and receive_queue.empty()
