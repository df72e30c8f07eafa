"""The server's own WebSocket protocol: messages however they come in, texts of every length, and the receive queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from tests.service.slow_client import HANDSHAKE, frame, serving, until
from wane.service.aio.eager import EagerTask
from wane.service.errors import Abandoned
from wane.service.net.websocket_protocol import CHANNEL, ClientDisconnected, ReceiveQueue, short_text
from wane.service.observability.metrics import Metrics
from wane.service.server import WEBSOCKETS, protocols
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
async def saying(texts: list[bytes], refused: asyncio.Event) -> AsyncIterator[str]:
    """A server that sends these texts on every WebSocket. `refused`: it could send none to a client that had left."""

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
        refused.set()

    named = protocols(Settings(), Metrics())
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, **(WEBSOCKETS | named)))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"ws://{host}:{port}/"
    server.should_exit = True
    await task


async def test_texts_of_every_length_are_received_as_they_were_sent() -> None:
    texts = [b"x" * size for size in (0, 1, 125, 126, 65_535, 65_536, 300_000)]
    refused = asyncio.Event()
    async with saying(texts, refused) as url:
        async with connect(url, proxy=None) as client:
            assert [await client.recv() for _ in texts] == [text.decode() for text in texts]
        await refused.wait()


# The receive queue. Its reader, and the body of its `with`, are run by either kind of task.

MESSAGE: dict[str, Any] = {"type": "websocket.receive", "text": "{}"}
DISCONNECT: dict[str, Any] = {"type": "websocket.disconnect", "code": 1000}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=[EagerTask, asyncio.ensure_future], ids=["eager task", "task"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine, for something to be awaited."""
    kind: Run = request.param
    return kind


@pytest.fixture
async def queue() -> ReceiveQueue:
    return ReceiveQueue(asyncio.get_running_loop())


async def test_work_for_a_client_that_leaves_is_cancelled(queue: ReceiveQueue, run: Run) -> None:
    async def work() -> None:
        with queue:
            await asyncio.Event().wait()

    working = run(work())
    await asyncio.sleep(0)
    queue.put_nowait(DISCONNECT)
    with pytest.raises(Abandoned):
        await working


async def test_work_for_a_client_that_has_left_already_has_a_grace_period(queue: ReceiveQueue, run: Run) -> None:
    async def work() -> object:
        assert await queue.get() is MESSAGE
        with queue:
            await asyncio.sleep(0)
        with pytest.raises(Abandoned), queue:
            await asyncio.Event().wait()
        return await queue.get()

    queue.put_nowait(MESSAGE)
    queue.put_nowait(DISCONNECT)
    assert await run(work()) is DISCONNECT


async def test_a_cancellation_by_others_is_no_hang_up(queue: ReceiveQueue) -> None:
    async def work() -> None:
        with queue:
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_messages_are_taken_in_their_order(queue: ReceiveQueue, run: Run) -> None:
    async def take() -> list[object]:
        return [(await queue.get())["number"] for _ in range(4)]

    taking = run(take())
    await asyncio.sleep(0)
    queue.put_nowait({**MESSAGE, "number": 0})
    queue.put_now({**MESSAGE, "number": 1})
    queue.put_nowait({**MESSAGE, "number": 2})
    assert 1 <= len(queue) <= 3
    queue.put_nowait({**MESSAGE, "number": 3})
    assert await taking == [0, 1, 2, 3]
    assert queue.empty()


async def test_a_reader_goes_on_at_once_where_the_protocol_is_at_rest(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_now(MESSAGE)
    assert reading.done and reading.result() is MESSAGE


async def test_a_reader_goes_on_in_the_next_turn_where_it_is_not(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_nowait(MESSAGE)
    assert not reading.done
    await asyncio.sleep(0)
    assert reading.done and reading.result() is MESSAGE


async def test_a_message_is_kept_for_the_next_reader_where_the_first_gave_up(queue: ReceiveQueue) -> None:
    reading = EagerTask(queue.get())
    queue.put_nowait(MESSAGE)
    reading.interrupt()
    await asyncio.sleep(0)
    assert await queue.get() is MESSAGE
