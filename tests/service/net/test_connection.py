"""Tests of the limits and timeouts of connections on real sockets: slow clients, too many connections, too long
requests."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack
from typing import cast

import httpx
import pytest
from starlette.types import Scope
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.service.live_server import BUNDLE, live_server
from tests.service.slow_client import (
    CHUNKED,
    ENOUGH_S,
    GET,
    HANDSHAKE,
    POST,
    SOON_S,
    WAIT_S,
    dialogue,
    flood,
    frame,
    serving,
    statuses,
    unread_socket,
    until,
)
from wane.service.api.problem import Failure, described
from wane.service.api.routes import stream
from wane.service.net.connection import HEAD_END, Connection
from wane.service.settings import Settings


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with serving(header_timeout_s=SOON_S) as server:
        assert await dialogue(server, b"") == b""


@pytest.mark.parametrize("first", [b"\r\n", b"\n", GET + b"\r\n"], ids=["crlf", "lf", "second"])
async def test_a_connection_with_only_empty_lines_is_closed(first: bytes) -> None:
    async with serving(header_timeout_s=ENOUGH_S) as server:
        server.config.timeout_keep_alive = 1
        assert (await dialogue(server, first)).count(b"HTTP/1.1 200") == first.count(b"GET")


async def test_an_empty_line_between_requests_starts_the_header_timeout() -> None:
    async with serving(header_timeout_s=ENOUGH_S) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for _ in range(2):
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            (length,) = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(length)
            writer.write(b"\r\n")
        # The server closes the connection at the header timeout, which is shorter than the keep-alive timeout.
        assert b" 200 OK" not in await reader.read()
        writer.close()


async def test_a_head_that_begins_before_the_keep_alive_timeout_and_ends_after_it_is_answered() -> None:
    async with serving() as server:
        server.config.timeout_keep_alive = SOON_S  # type: ignore[assignment]  # seconds may be a fraction
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET + GET[:10])
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(2 * SOON_S)
        writer.write(GET[10:])
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""  # the keep-alive timeout runs again
        writer.close()


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", GET + b"GET /hea"], ids=["first", "second"])
async def test_a_slow_head_is_timed_out(first: bytes) -> None:
    async with serving(header_timeout_s=ENOUGH_S) as server:
        said = await dialogue(server, first, b"x: y\r\n" if first.endswith(b"\r\n") else b"l")
    assert b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n" in said
    assert said.startswith(b"HTTP/1.1 200 OK") == (first != b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_answered_413_before_its_end(declared: bool) -> None:
    length = b"content-length: 99999999" if declared else b"transfer-encoding: chunked"
    head = POST.partition(b"content-length")[0] + length + b"\r\n\r\n"
    body = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    async with serving(max_body_bytes=2048) as server:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(head + body * 4)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            assert (await reader.read()).endswith(b"}")
            writer.transport.abort()


async def test_a_deadline_that_ends_before_the_body_timeout_is_answered_504() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(POST.replace(b"host", b"x-request-timeout-ms: 100\r\nhost"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
        writer.close()


async def test_a_connection_that_sends_occasional_requests_stays_open() -> None:
    async with serving(header_timeout_s=ENOUGH_S, body_timeout_s=ENOUGH_S) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for _ in range(2):
            writer.write(GET)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            await dialogue(server, b"")  # another connection sends nothing; waits until the server closes it
        writer.write(GET)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize(
    "chunks",
    [
        [b"GET / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n"],
        [b"GET / HTTP/1.1\r\n", *[b"x: " + b"y" * 500 + b"\r\n"] * 5],
        [b"GET / HTTP/1.1\r\nx: " + b"y" * 1500, b"y" * 1500 + b"\r\n\r\n"],
        [b"GET /" + b"y" * 5000],
    ],
    ids=["at once", "bit by bit", "in two", "path"],
)
async def test_a_long_head_is_refused(chunks: list[bytes]) -> None:
    async with serving(max_header_bytes=2048) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        await server.send_packets(writer, *chunks)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize("split", range(-5, 2))
async def test_a_split_head_has_the_same_limit_as_a_whole_head(split: int) -> None:
    body = json.dumps({"tokens": [1] * 5000}).encode()
    head = b"POST /v1/predict HTTP/1.1\r\ncontent-length: %d\r\nx: " % len(body)
    head += b"y" * (2040 - len(head)) + HEAD_END
    at = len(head) + split
    async with serving(max_header_bytes=2048) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        await server.send_packets(writer, (head + body)[:at], (head + body)[at:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_pipelined_requests_and_long_bodies_are_not_long_heads() -> None:
    body = json.dumps({"tokens": [1] * 5000}).encode()
    post = b"POST /v1/predict HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with serving(max_header_bytes=2048) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET * 200 + post * 5 + GET)
        said = b""
        while said.count(b"HTTP/1.1 200 ") < 206:
            said += await reader.read(2**16)
        assert b"HTTP/1.1 4" not in said
        writer.close()


@pytest.mark.parametrize("path", [b"/n", b"/healthz"])
async def test_the_bytes_of_pipelined_requests_are_limited(path: bytes) -> None:
    requests = 50_000
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET.replace(b"/healthz", path) * requests)
        await until(lambda: bool(server.server_state.connections))
        (uvicorn_protocol,) = server.server_state.connections
        waiting = []
        for _ in range(100):
            await reader.readuntil(b"}")
            waiting.append(len(cast(Connection, uvicorn_protocol.transport).waiting))
        writer.transport.abort()
    # asyncio reads up to 256 KiB at once.
    assert max(waiting) <= Settings().max_header_bytes + 2**18 < len(GET) * requests


async def test_a_connection_over_the_limit_is_answered_503_until_another_closes() -> None:
    async with serving(max_connections=2) as server:
        kept = [await asyncio.open_connection(*server.address) for _ in range(2)]
        for reader, writer in kept:
            writer.write(GET)
            await reader.readuntil(b"}")
        assert (await dialogue(server, b"")).startswith(b"HTTP/1.1 503 ")
        kept[0][1].close()
        await kept[0][1].wait_closed()
        await until(lambda: len(server.server_state.connections) == 1)
        said = await dialogue(server, GET.replace(b"host", b"connection: close\r\nhost"))
        assert said.startswith(b"HTTP/1.1 200 ")
        kept[1][1].close()


async def test_an_unread_stream_of_events_is_closed_with_its_generation() -> None:
    body = json.dumps({"tokens": [1], "max_tokens": 4096, "stream": True}).encode()
    loop = asyncio.get_running_loop()
    async with serving(send_timeout_s=SOON_S) as server:
        with unread_socket(server) as connection:
            await loop.sock_connect(connection, server.address)
            await loop.sock_sendall(
                connection, b"POST /v1/generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            await server.app.state.registry.engine.closed.wait()
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)


async def test_a_client_that_reads_slowly_stays_connected() -> None:
    loop = asyncio.get_running_loop()
    async with serving(send_timeout_s=2) as server:
        with unread_socket(server) as connection:
            await loop.sock_connect(connection, server.address)
            asking = asyncio.create_task(loop.sock_sendall(connection, b"GET /openapi.json HTTP/1.1\r\n\r\n" * 100))
            for _ in range(100):  # during this loop the server has unsent answers for longer than send_timeout_s
                assert await loop.sock_recv(connection, 2048)
                await asyncio.sleep(0.03)
            assert len(server.server_state.connections) == 1
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("kind", ["events", "websocket"])
def test_a_hundred_clients_that_read_nothing_are_disconnected_by_a_real_server(kind: str) -> None:
    """The answer to each client has some tens of KB, so the kernel's buffers can hold the whole answer. The server must
    still notice that the client reads nothing."""
    with live_server(WANE_BUNDLES=BUNDLE, WANE_SEND_TIMEOUT_S="1") as server, ExitStack() as stack:
        url = httpx.URL(server.url)
        body = json.dumps({"input": "The", "max_tokens": 100, "stream": True}).encode()
        stream = b"POST /v1/generate HTTP/1.1\r\nhost: wane\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        for number in range(100):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(WAIT_S)
            connection.connect((url.host, url.port))
            if kind == "events":
                connection.sendall(stream)
            else:
                httpx.post(f"{server.url}/v1/sessions", json={"session": f"s{number}"}).raise_for_status()
                connection.sendall(HANDSHAKE.replace(b"/s/", b"/s%d/" % number))
                assert connection.recv(100).startswith(b"HTTP/1.1 101 ")
                connection.sendall(frame(0x81, b'{"tokens": [5], "top_k": 50}') * 16)
        for _ in range(100):
            server.read_until("refused", reason="unread")
        if kind == "websocket":
            assert "wane_websockets 0.0" in httpx.get(f"{server.url}/metrics").text


FIELDS = b"x: y\r\n" * 10_000


@pytest.mark.parametrize(
    ("first", "more"),
    [(b"2\r\n{}\r\n0\r\n", FIELDS), (b"0\r\nx: ", b"y" * 50_000), (b"2;x=", b"y" * 50_000)],
    ids=["trailers", "one trailer", "chunk extension"],
)
async def test_trailers_and_chunk_extensions_are_limited(first: bytes, more: bytes) -> None:
    async with serving() as server:
        said = await flood(server, CHUNKED % b"POST /v1/sessions" + first, more, 2**26)
    assert said.startswith(b"HTTP/1.1 431 ") and said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("line", [b"GET /healthz", b"POST /healthz"])
async def test_an_answer_sent_before_the_end_of_the_body_closes_the_connection(line: bytes) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(CHUNKED % line + b"0\r\n" + FIELDS)
        said = await reader.read()
        writer.transport.abort()
    assert b"connection: close\r\n" in said and said.count(b"HTTP/1.1 ") == 1


async def test_a_body_in_many_chunks_leaves_the_connection_open() -> None:
    body = json.dumps({"tokens": [1] * 2000}).encode()
    bits = [b"%x;%s\r\n%s\r\n" % (1, b"x" * 20, body[at : at + 1]) for at in range(len(body))]
    async with serving(max_header_bytes=2048) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for _ in range(2):
            writer.write(CHUNKED % b"POST /v1/predict")
            for at in range(0, len(bits), 50):
                await asyncio.sleep(0)
                writer.write(b"".join(bits[at : at + 50]))
            writer.write(b"0\r\nx: y\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in head
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(int(length.partition(b" ")[2]))
        writer.close()


async def test_trailers_are_ignored() -> None:
    async with serving() as server:
        server.config.timeout_keep_alive = 1
        trailer = b"2\r\n{}\r\n0\r\nx-request-id: smuggled\r\nconnection: close\r\n\r\n"
        said = await dialogue(server, CHUNKED % b"POST /v1/sessions" + trailer)
    assert statuses(said) == [201] and b"smuggled" not in said


@pytest.mark.parametrize("begun", [b"\x81", b"\x81\x8f", frame(0x81, b"{}")[:-1]], ids=["opcode", "head", "text"])
async def test_an_incomplete_message_after_a_whole_message_is_timed_out(begun: bytes) -> None:
    async with serving(body_timeout_s=ENOUGH_S) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(0x81, b'{"tokens": [1]}') + begun)
        assert b'"predictions"' in await reader.readuntil(b"a message was not complete")
        writer.close()
        await writer.wait_closed()


async def test_the_server_reads_no_more_messages_of_a_closed_websocket() -> None:
    async with serving(api_keys="alice:alice-0123456789abcdefgh") as server:
        said = await flood(server, HANDSHAKE, frame(0x81) * 5000, 2**26)
        assert b"unauthorized" in said
        async with connect(f"ws://{server.address[0]}:{server.address[1]}/v1/sessions/s/stream") as client:
            assert "unauthorized" in str(await client.recv())
            with pytest.raises(ConnectionClosed) as caught:
                await client.recv()
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1008


async def test_messages_that_fail_at_once_are_answered_in_many_turns_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages, failures, in_a_turn = 500, 0, []

    def counted(scope: Scope, error: Exception) -> Failure:
        nonlocal failures
        failures += 1
        return described(scope, error)

    monkeypatch.setattr(stream, "described", counted)
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(0x81, b"x") * messages)
        async with asyncio.timeout(WAIT_S):
            while failures < messages:
                before = failures
                await asyncio.sleep(0)
                in_a_turn.append(failures - before)
        writer.close()
    assert max(in_a_turn) == 1


async def test_a_client_that_answers_no_ping_is_no_failure_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        server.config.ws_ping_interval = server.config.ws_ping_timeout = SOON_S
        engine = server.registry.engine
        engine.wait = asyncio.Event()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(0x81, b'{"tokens": [1]}'))
        await reader.readuntil(b"keepalive ping timeout")
        engine.wait.set()
        await asyncio.gather(*server.server_state.tasks)
        writer.close()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_many_messages_in_one_packet_are_answered_in_order() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        steps = [frame(0x81, b'{"expected_position": %d, "tokens": [1]}' % at) for at in range(600)]
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(steps))
        said = b""
        while said.count(b'"predictions"') < 600:
            said += await reader.read(2**16)
        writer.close()
    assert b'"error"' not in said
