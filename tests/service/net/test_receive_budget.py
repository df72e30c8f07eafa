"""Tests of the receive budget, which limits the unanswered bytes of all connections together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.service.net.test_rejected_connections import closed_with, counted, status_of
from tests.service.slow_client import CHUNKED, HANDSHAKE, SlowClient, conversation, dialogue, frame, serving, until
from wane.service.net.limits import SMALL_BYTES, Limits, ReceiveShare
from wane.service.observability.metrics import Metrics
from wane.service.settings import Settings

BODY_BYTES = 2**19
BUDGET = {"max_body_bytes": BODY_BYTES, "receive_budget_bytes": 2 * BODY_BYTES}
SMALL = json.dumps({"tokens": [1]}).encode()
LARGE = SMALL + b" " * (BODY_BYTES // 2)
MOST = SMALL + b" " * (BODY_BYTES - len(SMALL))
LINE = b"POST /v1/predict"


def post(body: bytes, length: int | None = None) -> bytes:
    """Returns a POST request with the content-length `length`, by default the length of the body. The request asks the
    server to close the connection after the answer."""
    head = LINE + b" HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (len(body) if length is None else length) + body


def chunked(body: bytes) -> bytes:
    return CHUNKED % LINE + b"%x\r\n%s\r\n" % (len(body), body)


@asynccontextmanager
async def connected(server: SlowClient, first: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Opens a connection, and sends `first`."""
    reader, writer = await asyncio.open_connection(*server.address)
    if first.startswith(HANDSHAKE):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
    writer.write(first.removeprefix(HANDSHAKE))
    yield reader
    writer.close()


@asynccontextmanager
async def filled(server: SlowClient) -> AsyncIterator[None]:
    """Opens two connections. Sends a body of the largest allowed size without its last 100 bytes on each connection.
    These bytes use most of the receive budget."""
    almost = post(MOST[:-100], len(MOST))
    async with connected(server, almost), connected(server, almost):
        await until(lambda: server.limits.taken_bytes >= 2 * (len(MOST) - 100))
        yield


HELD = [
    post(LARGE[:-1], len(LARGE)),
    chunked(LARGE),
    HANDSHAKE + frame(0x81, LARGE)[:-1],
    HANDSHAKE + frame(0x01, LARGE),
]


@pytest.mark.parametrize("first", HELD, ids=["declared", "chunked", "frame", "fragment"])
async def test_received_bytes_are_counted_until_the_client_disconnects(first: bytes) -> None:
    async with serving(**BUDGET) as server:
        async with connected(server, first):
            await until(lambda: server.limits.taken_bytes >= len(LARGE) - 1)
        await until(lambda: server.limits.taken_bytes == 0)


async def test_received_bytes_are_counted_until_they_are_answered() -> None:
    async with serving(**BUDGET) as server:
        for body in (LARGE, MOST, LARGE):
            async with connected(server, post(body).replace(b"connection: close\r\n", b"")) as reader:
                assert (await reader.readline()).endswith(b" 200 OK\r\n")
                await until(lambda: server.limits.taken_bytes == 0)  # the connection is still open here
        async with connected(server, HANDSHAKE + frame(0x81, LARGE) * 10) as reader:
            for _ in range(10):
                await reader.readuntil(b'"predictions"')
            await until(lambda: server.limits.taken_bytes == 0)


@pytest.mark.parametrize(
    "first",
    [post(MOST), post(LARGE)[:1000], post(LARGE[:30_000]), chunked(LARGE)],
    ids=["all", "head", "one", "chunked"],
)
async def test_only_large_requests_over_the_budget_are_refused(first: bytes) -> None:
    async with serving(**BUDGET) as server, filled(server):
        said = await dialogue(server, first)
        assert status_of(said) == 429 and b"\r\nretry-after: 1\r\n" in said and said.count(b"HTTP/1.1 ") == 1
        assert counted(server) == {"full": 1}
        assert status_of(await dialogue(server, post(SMALL + b" " * 2000))) == 200


async def test_only_large_messages_over_the_budget_close_their_websocket() -> None:
    async with serving(**BUDGET) as server, filled(server):
        assert closed_with(await conversation(server, frame(0x81, LARGE))) == 1013
        assert counted(server) == {"full": 1}
        async with connected(server, HANDSHAKE + frame(0x81, SMALL)) as reader:
            await reader.readuntil(b'"predictions"')


async def test_disconnected_clients_free_their_share_of_the_budget() -> None:
    async with serving(**BUDGET) as server:
        for _ in range(3):
            async with filled(server):
                assert status_of(await dialogue(server, post(LARGE))) == 429
            await until(lambda: server.limits.taken_bytes == 0)
            assert status_of(await dialogue(server, post(LARGE))) == 200


def test_connections_use_one_budget_and_small_amounts_are_not_counted() -> None:
    limits = Limits(Settings(receive_budget_bytes=3 * SMALL_BYTES, max_body_bytes=SMALL_BYTES), Metrics())
    one, other = ReceiveShare(limits), ReceiveShare(limits)
    assert one.resize(2 * SMALL_BYTES) and other.resize(SMALL_BYTES) and limits.taken_bytes == 2 * SMALL_BYTES
    assert not other.resize(SMALL_BYTES + 1) and limits.taken_bytes == 2 * SMALL_BYTES
    assert one.resize(SMALL_BYTES + 1) and other.resize(SMALL_BYTES + 1) and limits.taken_bytes == 2 * SMALL_BYTES + 2
    assert one.resize(0) and other.resize(1) and limits.taken_bytes == 0
