"""Tests that the server answers the requests of a connection in order, even if it refuses one of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.service.conftest import SocketServer
from tests.service.fake_engine import FakeEngine
from tests.service.net.test_rejected_connections import counted
from tests.service.slow_client import (
    CHUNKED,
    GET,
    HANDSHAKE,
    MALFORMED,
    SOON_S,
    SlowClient,
    dialogue,
    frame,
    serving,
    statuses,
    until,
)

CLOSE = b"connection: close\r\nhost"


def post(path: bytes, body: object) -> bytes:
    """Returns the bytes of a whole POST request."""
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: wane\r\ncontent-length: %d\r\n\r\n%s" % (path, len(content), content)


PREDICT = post(b"/v1/predict", {"tokens": [1]})
OLD = PREDICT.replace(b"HTTP/1.1", b"HTTP/1.0")
STREAM = post(b"/v1/generate", {"tokens": [1], "max_tokens": 3, "stream": True})
LONG = b"GET / HTTP/1.1\r\nx: " + b"y" * 3000


def engine_of(server: SlowClient) -> FakeEngine:
    engine: FakeEngine = server.app.state.registry.engine
    return engine


@asynccontextmanager
async def held(server: SlowClient) -> AsyncIterator[tuple[FakeEngine, asyncio.Event]]:
    """Makes the engine wait before each answer until the test sets the yielded event, or until the end of the block."""
    engine = engine_of(server)
    engine.wait = wait = asyncio.Event()
    try:
        yield engine, wait
    finally:
        wait.set()


async def until_waiting(server: SlowClient) -> None:
    """Waits until bytes of a later request wait on every connection of the server."""
    await until(lambda: all(connection.waiting for connection in server.open))


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("goods", [0, 1, 3])
async def test_a_malformed_request_is_answered_after_earlier_requests_of_its_packet(bad: bytes, goods: int) -> None:
    async with serving() as server:
        assert statuses(await dialogue(server, PREDICT * goods + bad)) == [200] * goods + [400]
        assert len(engine_of(server).asked) == goods
        assert counted(server) == {"malformed": 1}


@pytest.mark.parametrize(
    ("reason", "status", "bad"),
    [
        ("malformed", 400, [MALFORMED["request line"]]),
        ("malformed", 400, [MALFORMED["chunk"]]),
        ("malformed", 400, [CHUNKED % b"POST /v1/sessions", b"zz\r\n"]),
        ("long_head", 431, [LONG]),
        ("long_head", 431, [LONG[:1500], LONG[1500:]]),
        ("long_trailers", 431, [CHUNKED % b"POST /v1/sessions" + b"2;x=" + b"y" * 100, b"y" * 3000]),
        ("slow_head", 408, [b"GET / HT"]),
    ],
    ids=["line", "chunk", "chunk later", "long", "long in two", "extension", "slow head"],
)
async def test_a_refusal_is_sent_after_the_answer_to_the_previous_request(
    reason: str, status: int, bad: list[bytes]
) -> None:
    connection_limits = {"header_timeout_s": SOON_S, "body_timeout_s": SOON_S, "max_header_bytes": 2048}
    async with serving(**connection_limits) as server, held(server) as (engine, wait):
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(PREDICT)
        await engine.waiting.wait()
        for part in bad:
            writer.write(part)
            await asyncio.sleep(0.01)
        await until_waiting(server)
        wait.set()
        assert statuses(await reader.read()) == [200, status]
        assert counted(server) == {reason: 1}
        assert len(engine.asked) == 1
        writer.close()


async def test_a_malformed_request_after_a_stream_of_events_is_answered_after_it() -> None:
    async with serving() as server:
        engine = engine_of(server)
        engine.wait_after_first_token = asyncio.Event()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(STREAM)
        said = await reader.readuntil(b"event: token")
        writer.write(MALFORMED["request line"])
        await until_waiting(server)
        engine.wait_after_first_token.set()
        said += await reader.read()
        assert statuses(said) == [200, 400]
        stream = said.partition(b"HTTP/1.1 400")[0]
        assert (stream.count(b"event: token"), stream.count(b"event: finish")) == (3, 1)
        writer.close()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (MALFORMED["chunk"], b"Invalid character in chunk size"),
        (MALFORMED["URL"], b"the request target cannot be read"),
        (b"GET http://wane HTTP/1.1\r\n\r\n", b"the request target cannot be read"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"this is HTTP/2, and the server speaks HTTP/1.1"),
    ],
    ids=["chunk", "URL", "URL without a path", "HTTP/2"],
)
async def test_the_response_to_a_malformed_request_has_the_reason(bad: bytes, said: bytes) -> None:
    async with serving() as server:
        assert (await dialogue(server, bad)).endswith(b"\r\n\r\nmalformed HTTP request: " + said)


@pytest.mark.parametrize(
    "first",
    [PREDICT.replace(b"host", CLOSE), OLD, OLD.replace(b"host", b"connection: keep-alive\r\nhost")],
    ids=["close", "HTTP/1.0", "HTTP/1.0 kept alive"],
)
@pytest.mark.parametrize(
    "more",
    [PREDICT, PREDICT + PREDICT[:-5], MALFORMED["request line"], HANDSHAKE, LONG, GET + CHUNKED % b"POST /v1/predict"],
    ids=["whole", "and a part", "malformed", "upgrade", "long", "chunked"],
)
async def test_nothing_is_answered_after_the_last_request_of_a_connection(first: bytes, more: bytes) -> None:
    async with serving() as server:
        assert statuses(await dialogue(server, first + more)) == [200]
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        assert len(engine_of(server).asked) == 1


async def test_a_disconnection_cancels_the_running_request_while_another_waits() -> None:
    async with serving() as server, held(server) as (engine, _):
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(PREDICT + PREDICT)
        await engine.waiting.wait()
        writer.close()
        await engine.cancelled.wait()
        assert len(engine.asked) == 1


async def send_step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads the response to the WebSocket's handshake, sends a step, and reads the answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    writer.write(frame(0x81, b'{"tokens": [1]}'))
    assert (await reader.readexactly(2))[0] == 0x81
    await reader.readuntil(b'"replayed":false}')


@pytest.mark.parametrize("requests", [[PREDICT + HANDSHAKE], [PREDICT * 3 + HANDSHAKE], [PREDICT, HANDSHAKE]])
async def test_a_websocket_starts_after_the_answers_to_earlier_requests(requests: list[bytes]) -> None:
    async with serving() as server, held(server) as (engine, wait):
        reader, writer = await asyncio.open_connection(*server.address)
        for one in requests:
            writer.write(one)
            await engine.waiting.wait()
        await until_waiting(server)
        wait.set()
        for _ in range(requests[0].count(b"POST")):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        await send_step(reader, writer)
        writer.close()


async def test_a_websocket_after_a_stream_of_events_has_no_keep_alive_timeout() -> None:
    async with serving() as server:
        server.config.timeout_keep_alive = SOON_S  # type: ignore[assignment]
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(STREAM + HANDSHAKE)
        stream = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert statuses(stream) == [200] and b"event: finish" in stream
        await asyncio.sleep(2 * SOON_S)
        await send_step(reader, writer)
        writer.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_websocket_that_sends_before_its_handshake_is_answered_is_refused(at_once: bool) -> None:
    early = frame(0x81, b'{"tokens": [1]}')
    async with serving() as server, held(server) as (engine, wait):
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(PREDICT + HANDSHAKE + early * at_once)
        await engine.waiting.wait()
        await until_waiting(server)
        await server.send_packets(writer, early)
        wait.set()
        assert statuses(await reader.read()) == [200, 400]
        assert counted(server) == {"handshake": 1} and len(engine.asked) == 1
        writer.close()


async def test_an_upgrade_to_another_protocol_is_refused() -> None:
    upgrade = GET.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost")
    async with serving() as server:
        said = await dialogue(server, PREDICT + upgrade + GET)
        assert statuses(said) == [200, 400] and b"\r\nconnection: close\r\n" in said
        assert said.endswith(b"the only accepted upgrade is websocket, and CONNECT is not accepted")
        assert counted(server) == {"malformed": 1}


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
SMUGGLED = b"DELETE /v1/sessions/victim HTTP/1.1\r\nhost: wane\r\n\r\n"


def with_upgrade(request: bytes) -> bytes:
    """Returns the request with headers that offer an upgrade to HTTP/2. A client that supports HTTP/1.1 and HTTP/2
    sends such headers."""
    return request.replace(b"host", H2C + b"host", 1)


def in_chunks(request: bytes) -> bytes:
    """Returns the request with its body in two chunks."""
    head, _, body = request.partition(b"\r\n\r\n")
    first = head.partition(b"\r\n")[0]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:4], body[4:]))
    return first + b"\r\nhost: wane\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def in_two(server: SlowClient, request: bytes, at: int) -> bytes:
    """Sends a request in two packets. The first packet has the first `at` bytes. Sends the second packet after the
    server has read the first packet. Returns the response."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request[:at])
    await until(lambda: bool(counted(server)) or server.read_bytes >= at)
    writer.write(request[at:])
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("digit", "reason"), [(b"9", b"Content-Length overflow"), (b"0", b"not_json")])
async def test_a_content_length_of_thousands_of_digits_is_answered(
    server: SocketServer, digit: bytes, reason: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    head = b"POST /v1/predict HTTP/1.1\r\nhost: wane\r\nconnection: close\r\ncontent-length: %s\r\n\r\n"
    writer.write(head % (digit * 5000))
    received = await reader.read()
    assert received.startswith(b"HTTP/1.1 400 ") and reason in received
    writer.close()


@pytest.mark.parametrize("framed", [bytes, in_chunks], ids=["content-length", "chunked"])
@pytest.mark.parametrize("packets", [1, 2])
async def test_a_request_in_the_body_of_an_upgrade_is_not_run(framed: Callable[[bytes], bytes], packets: int) -> None:
    outer = b"POST /v1/sessions HTTP/1.1\r\nhost: wane\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED)
    request = with_upgrade(framed(outer + SMUGGLED)) + GET.replace(b"host", CLOSE)
    async with serving() as server:
        if packets == 1:
            said = await dialogue(server, request)
        else:
            said = await in_two(server, request, request.index(b"\r\n\r\n") + 4)
        assert statuses(said) == [400]
        assert engine_of(server).asked == []


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT / HTTP/1.1\r\nhost: wane\r\n",
        b"CONNECT / HTTP/1.1\r\nhost: wane\r\nconnection: upgrade\r\nupgrade: h2c\r\n",
        HANDSHAKE.removesuffix(b"\r\n"),
    ],
    ids=["CONNECT", "CONNECT with an upgrade", "handshake"],
)
@pytest.mark.parametrize(
    "framed",
    [
        b"content-length: %d\r\n\r\n%s" % (len(SMUGGLED), SMUGGLED),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED),
    ],
    ids=["content-length", "chunked"],
)
@pytest.mark.parametrize("packets", [1, 2])
async def test_a_body_of_connect_or_a_handshake_is_refused(head: bytes, framed: bytes, packets: int) -> None:
    request = head + framed
    async with serving() as server:
        if packets == 1:
            said = await dialogue(server, PREDICT + request)
        else:
            said = await in_two(server, PREDICT + request, len(PREDICT) + request.index(b"\r\n\r\n") + 4)
        assert statuses(said) == [200, 400]
        assert len(engine_of(server).asked) == 1


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t \t"], ids=["space", "tab", "both"])
async def test_white_space_around_a_header_value_is_ignored(space: bytes) -> None:
    async with serving(api_keys="alice:alice-0123456789abcdefgh") as server:
        engine = engine_of(server)
        headers = [b"authorization: Bearer alice-0123456789abcdefgh", b"idempotency-key: k", b"x-wane-position: 0"]
        lines = b"".join(line.replace(b": ", b":" + space, 1) + space + b"\r\n" for line in headers)
        step = post(b"/v1/sessions/s/tokens", {"tokens": [1]}).replace(b"host", lines + b"connection: close\r\nhost")
        for request in (step, step.replace(space + b"\r\n", b"\r\n")):
            assert statuses(await dialogue(server, request)) == [200]
        first, second = engine.asked
        assert (first.expected_position, first.idempotency_key) == (0, "k")  # type: ignore[attr-defined]
        assert (second.expected_position, second.idempotency_key) == (0, "k")  # type: ignore[attr-defined]


async def test_white_space_around_a_handshake_s_header_values_is_ignored() -> None:
    handshake = (
        HANDSHAKE.replace(b"\r\n", b" \t\r\n").replace(b"HTTP/1.1 \t", b"HTTP/1.1").replace(b" \t\r\n \t", b" \t\r\n")
    )
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(handshake)
        await send_step(reader, writer)
        writer.close()


@pytest.mark.parametrize("session", [b".", b"..", b"%2e", b"%2E%2e"])
async def test_a_session_id_of_dots_is_refused_on_every_route(session: bytes) -> None:
    path = b"/v1/sessions/" + session
    requests = [post(path + b"/tokens", {"tokens": [1]}), post(path + b"/rewind", {"position": 0})]
    requests += [b"%s %s HTTP/1.1\r\nhost: wane\r\n\r\n" % (method, path) for method in (b"GET", b"DELETE")]
    async with serving() as server:
        for request in requests:
            said = await dialogue(server, request.replace(b"host", CLOSE))
            assert statuses(said) == [422] and b'and not \\".\\" or \\"..\\"' in said
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(HANDSHAKE.replace(b"/s/", b"/%s/" % session))
        said = await reader.readuntil(b'"status":422')
        assert b"101 Switching" in said
        writer.close()
        assert engine_of(server).asked == []


async def test_a_slow_answer_to_a_request_with_a_useless_upgrade_field_is_sent() -> None:
    """uvicorn ignores the field, because the request has no Connection field with the token `upgrade`."""
    async with serving(header_timeout_s=SOON_S) as server, held(server) as (engine, wait):
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /v1/sessions/s HTTP/1.1\r\nhost: wane\r\nupgrade: websocket\r\n\r\n")
        await engine.waiting.wait()
        await asyncio.sleep(2 * SOON_S)
        wait.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
