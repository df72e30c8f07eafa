"""Tests that the server counts the rejected connections by reason, and logs each rejected connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from tests.service.slow_client import (
    CHUNKED,
    ENOUGH_S,
    GET,
    HANDSHAKE,
    LATE_S,
    POST,
    SOON_S,
    SlowClient,
    conversation,
    dialogue,
    flood,
    frame,
    serving,
    unread_socket,
    until,
)
from wane.service.api.exchange import HUNG_UP
from wane.service.net.limits import RejectReason
from wane.service.observability.logs import ACCESS

Fields = dict[str, object]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[Fields]]:
    """The lines of the access log."""
    said: list[Fields] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append({"message": record.getMessage(), **record.__dict__["fields"]})

    listener = Listener()
    ACCESS.addHandler(listener)
    with caplog.at_level(logging.INFO, logger=ACCESS.name):
        yield said
    ACCESS.removeHandler(listener)


def counted(server: SlowClient) -> dict[str, float]:
    """Returns the number of rejected connections for each reason."""
    (metric,) = server.metrics.connections_rejected.collect()
    samples = [one for one in metric.samples if one.name == "wane_connections_rejected_total"]
    assert {one.labels["reason"] for one in samples} == {reason.value for reason in RejectReason}
    return {one.labels["reason"]: one.value for one in samples if one.value}


def line(reason: str, status: int | None) -> Fields:
    return {"message": "refused", "client": "127.0.0.1", "status": status, "reason": reason}


def status_of(said: bytes) -> int:
    return int(said.split(b" ")[1])


def closed_with(said: bytes) -> int:
    """Returns the close code of the server's last frame."""
    first, length, *rest = said[said.rindex(b"\x88") :]
    assert first == 0x88 and length == len(rest)
    return int.from_bytes(rest[:2])


LONG = b"x: " + b"y" * 9000 + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("reason", "first", "status"),
    [
        ("slow_head", b"GET / HTTP/1.1\r\n", 408),
        ("long_head", GET.replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 20_000 + b"\r\n\r\n"), 431),
        ("long_trailers", CHUNKED % b"POST /v1/sessions" + b"2\r\n{}\r\n0\r\nx: ", 431),
        ("malformed", b"GET / HTTP/9.9\r\n\r\n", 400),
        ("handshake", HANDSHAKE.replace(b"version: 13", b"version: 12"), 400),
        ("handshake", HANDSHAKE.replace(b"\r\n\r\n", b"\r\n" + LONG), 431),
        ("handshake", HANDSHAKE.replace(b"\r\n\r\n", b"\r\n" + b"x: y\r\n" * 200 + b"\r\n"), 431),
        ("handshake", HANDSHAKE.replace(b"stream HTTP", b"y" * 9000 + b" HTTP"), 414),
        ("handshake", HANDSHAKE.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n{}"), 400),
    ],
    ids=["slow", "long", "trailers", "malformed", "version", "long line", "many lines", "long path", "body"],
)
async def test_a_rejected_connection_is_answered_counted_and_logged(
    reason: str, first: bytes, status: int, lines: list[Fields]
) -> None:
    is_long = reason == "long_trailers"
    async with serving(
        header_timeout_s=ENOUGH_S if reason == "slow_head" else LATE_S, max_header_bytes=16384
    ) as server:
        said = await (flood(server, first, b"y" * 10_000, 2**26) if is_long else dialogue(server, first))
        assert status_of(said) == status and said.count(b"HTTP/1.1 ") == 1
        assert counted(server) == {reason: 1}
    assert [one for one in lines if one["message"] == "refused"] == [line(reason, status)]
    assert [one["status"] for one in lines if one["message"] == "request"] == [HUNG_UP] * is_long


async def test_a_connection_over_the_limit_is_counted_and_logged(lines: list[Fields]) -> None:
    async with serving(max_connections=1) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(GET)
        await reader.readuntil(b"}")
        for _ in range(2):
            assert status_of(await dialogue(server, b"")) == 503
        assert counted(server) == {"too_many": 2}
        writer.close()
    assert [one for one in lines if one["message"] == "refused"] == [line("too_many", 503)] * 2


async def test_a_slow_body_that_is_already_answered_closes_the_connection_without_another_answer(
    lines: list[Fields],
) -> None:
    async with serving(header_timeout_s=SOON_S, body_timeout_s=SOON_S) as server:
        said = await dialogue(server, POST.replace(b"/v1/predict", b"/nowhere"), b" ")
        assert status_of(said) == 404 and counted(server) == {"slow_body": 1}
    assert [one["message"] for one in lines] == ["request", "refused"]
    assert lines[1] == line("slow_body", None)


async def test_a_slow_body_that_a_route_reads_is_counted_as_a_request(lines: list[Fields]) -> None:
    async with serving(body_timeout_s=SOON_S) as server:
        assert status_of(await dialogue(server, POST, b" ")) == 408
        assert counted(server) == {}
    assert [(one["message"], one["status"]) for one in lines] == [("request", 408)]


async def test_clients_that_read_nothing_are_counted_and_logged(lines: list[Fields]) -> None:
    loop = asyncio.get_running_loop()
    async with serving(send_timeout_s=SOON_S) as server:
        with unread_socket(server) as connection:
            await loop.sock_connect(connection, server.address)
            asking = asyncio.create_task(loop.sock_sendall(connection, b"GET /openapi.json HTTP/1.1\r\n\r\n" * 1000))
            await until(lambda: counted(server) == {"unread": 1})
            await asyncio.gather(asking, return_exceptions=True)
    assert line("unread", None) in lines


@pytest.mark.parametrize(
    "frames",
    [frame(0x01) + frame(0x00) * 5000, frame(0x89) * 5000, frame(0x8A) * 5000],
    ids=["fragments", "pings", "pongs"],
)
async def test_frames_without_a_message_are_counted_and_logged(frames: bytes, lines: list[Fields]) -> None:
    async with serving() as server:
        assert b"too many frames" in await flood(server, HANDSHAKE, frames, 2**26)
        assert counted(server) == {"frames": 1}
    assert line("frames", None) in lines and "socket" in {one["message"] for one in lines}


@pytest.mark.parametrize(
    ("code", "frames"),
    [(1002, b"\xf1\x80" + bytes(4)), (1002, frame(0x80)), (1007, frame(0x81, b"\xff\xfe"))],
    ids=["bits", "continuation", "text"],
)
async def test_an_invalid_frame_is_answered_counted_and_logged_without_a_traceback(
    code: int, frames: bytes, lines: list[Fields], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        assert closed_with(await conversation(server, frames * 1000)) == code
        assert counted(server) == {"malformed": 1}
    assert lines == [line("malformed", None), {**lines[-1], "message": "socket", "code": code}]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "first",
    [frame(0x01, b"{"), frame(0x81, b"{}")[:7], frame(0x89) + b"\x81", frame(0x81, b"{}") + frame(0x81, b"{}")[:7]],
    ids=["fragment", "frame", "after a ping", "after a message"],
)
async def test_a_slow_message_is_timed_out_counted_and_logged(first: bytes, lines: list[Fields]) -> None:
    async with serving(body_timeout_s=SOON_S) as server:
        assert closed_with(await conversation(server, first)) == 1008
        assert counted(server) == {"slow_body": 1}
    assert line("slow_body", None) in lines


async def test_pings_do_not_extend_the_time_of_a_message() -> None:
    async with serving(body_timeout_s=SOON_S) as server:
        assert closed_with(await conversation(server, frame(0x01, b"{"), frame(0x89))) == 1008


async def test_valid_requests_and_silent_connections_are_not_counted(lines: list[Fields]) -> None:
    body = json.dumps({"tokens": [1]}).encode()
    async with serving(header_timeout_s=ENOUGH_S) as server:
        post = b"POST /v1/predict HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert status_of(await dialogue(server, post + body)) == 200
        assert await dialogue(server, b"") == b""
        assert counted(server) == {}
    assert [one["message"] for one in lines] == ["request"]
