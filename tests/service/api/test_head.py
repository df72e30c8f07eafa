"""Tests that the answer to HEAD has the headers of GET and no body."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

from tests.service.conftest import SocketServer
from tests.service.live_server import TIMEOUT_S
from tests.service.table import every_route

VARIABLE = {"date", "x-request-id"}


async def test_head_has_the_headers_of_get(app: FastAPI, server: SocketServer) -> None:
    paths = [path for method, path in every_route(app) if method == "GET"]
    assert {"/v1/models", "/v1/models/fake", "/v1/report", "/v1/sessions/s", "/metrics"} <= set(paths)
    paths += ["/v1/sessions/unknown", "/v1/models/unknown", "/nowhere"]
    async with httpx.AsyncClient(
        base_url=server.url, headers={"accept-encoding": "identity"}, timeout=TIMEOUT_S
    ) as client:
        for path in paths:
            read, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (read.status_code, b""), path
            assert head.headers.keys() == read.headers.keys()
            if path != "/metrics":  # the values in /metrics change with each of these requests
                for name in head.headers.keys() - VARIABLE:
                    assert head.headers[name] == read.headers[name], (path, name)


async def test_an_answer_to_head_has_no_body_before_the_next_answer(server: SocketServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for method in ("HEAD", "GET"):
        close = "close" if method == "GET" else "keep-alive"
        writer.write(f"{method} /v1/models HTTP/1.1\r\nhost: wane\r\nconnection: {close}\r\n\r\n".encode())
    said = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    first, second, body = said.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200") and second.startswith(b"HTTP/1.1 200")
    assert f"content-length: {len(body)}".encode() in first and body.startswith(b'{"object":"list"')
