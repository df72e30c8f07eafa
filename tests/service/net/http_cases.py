"""Generates the cases of `http_record`. A case has the requests and WebSocket messages of one connection. Some of the
bytes are mutated. The client sends the bytes whole, split or truncated."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

HOT = (
    "/v1/predict",
    "/v1/sessions/a/tokens",
    "/v1/sessions/tokens",
    "/v1/sessions/unknown/tokens",
    "/v1/sessions/%61/tokens",
)
"""The paths of routes that are called before the framework's routing."""

OTHERS = (
    "/v1/score",
    "/v1/generate",
    "/v1/sessions",
    "/v1/sessions/a",
    "/v1/sessions/a/rewind",
    "/v1/models",
    "/healthz",
    "/readyz",
    "/nowhere",
    "/v1/predict/",
    "/v1/predict?x=1",
    "/v1/sessions/../tokens",
    "*",
)
METHODS = ("GET", "GET", "DELETE", "HEAD", "OPTIONS", "PUT", "CONNECT")
HEADERS = (
    b"connection: close",
    b"connection: keep-alive",
    b"Connection: Keep-Alive, Upgrade",
    b"expect: 100-continue",
    b"x-request-id: mine",
    b"x-request-id:  mine ",
    b"x-request-id: \xe9",
    b"x-request-timeout-ms: 5000",
    b"x-request-timeout-ms: 0",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"idempotency-key: k",
    b"idempotency-key:   k  ",
    b"x-wane-position: 0",
    b"x-wane-position: x",
    b"content-type: text/plain",
    b"content-type: application/json",
    b"accept: text/event-stream",
    b"x-long: " + b"y" * 300,
    b"x-too-long: " + b"y" * 5000,
    b"host: twice",
    b"x-empty:",
    b"upgrade: h2c",
    b"connection: upgrade\r\nupgrade: h2c",
)
NO_STEPS = (b"", b"{", b"[]", b"null", b'{"tokens": [1]} x', b"\xff\xfe", b"{" * 40, b" " * 3000)
TOKENS = (0, 255, 256, -1, 10**12, "1", None)
FIELDS: dict[str, tuple[object, ...]] = {
    "top_k": (1, 5, 50, 0, "x"),
    "mode": ("auto", "both", "recurrent", "nonsense"),
    "nonsense": (1,),
    "expected_position": (0, 3),
    "idempotency_key": ("k", ""),
}
HANDSHAKE = (
    b"GET /v1/sessions/%s/stream HTTP/1.1\r\nhost: wane\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TEXT, BYTES, FIRST, LAST, CLOSE, PING, PONG = 0x81, 0x82, 0x01, 0x80, 0x88, 0x89, 0x8A

Leaves = Literal["waits", "half-closes", "resets"]


@dataclass(frozen=True, slots=True)
class Case:
    """The actions of a client on one connection.

    `stages` has the stages in order. A stage is a tuple of parts, which are byte strings that the client sends one by
    one. After each part the client lets the event loop run `turns` iterations. After each stage the client waits for
    the answers. `wait_turns` is the number of event loop iterations until the engine answers. `leaves` is the client's
    last action.
    """

    stages: tuple[tuple[bytes, ...], ...]
    turns: int
    wait_turns: int
    leaves: Leaves = "waits"


def make_case(seed: int, number: int) -> Case:
    """Makes a random case. The same seed and number always give the same case."""
    rng = random.Random(f"{seed}/{number}")
    turns, wait_turns = rng.choice((0, 3, 10)), rng.choice((0, 0, 1, 5))
    if rng.random() < 0.2:
        before = make_request(rng) if rng.random() < 0.2 else b""
        handshake = HANDSHAKE % rng.choice((b"a", b"a", b"unknown", b".."))
        if rng.random() < 0.15:
            handshake = mutate(rng, handshake)
        frames = make_frames(rng)
        if rng.random() < 0.3:
            frames = mutate(rng, frames)
        stages = (split(rng, before + handshake), split(rng, frames))
        return Case(stages, turns, wait_turns)
    data = b"".join(make_request(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))))
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = mutate(rng, data)
    if rng.random() < 0.2:
        data = data[: rng.randint(1, len(data))]
    leaves: tuple[Leaves, ...] = ("waits", "waits", "half-closes", "resets")
    return Case((split(rng, data),), turns, wait_turns, leaves=rng.choice(leaves))


def split(rng: random.Random, data: bytes) -> tuple[bytes, ...]:
    """Splits the data into one part, several parts, or single bytes."""
    if len(data) < 2 or rng.random() < 0.4:
        return (data,)
    if len(data) < 200 and rng.random() < 0.1:
        return tuple(data[at : at + 1] for at in range(len(data)))
    cuts = {rng.randrange(len(data)) for _ in range(rng.randint(1, 6))}
    return tuple(data[begin:end] for begin, end in pairwise(sorted({0, len(data), *cuts})))


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Returns the data with one random change."""
    if not data:
        return data
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice((1, 1, 2, 8)))
    some = rng.choice((b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\xff", b"x", b"0"))
    version = rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1"))
    more = rng.choice((-2, -1, 1, 3))
    match rng.randrange(8):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + some + data[at:]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * 2 + data[end:]
        case 4:
            return data.replace(b"\r\n", b"\n", rng.choice((1, 1, -1)))
        case 5:
            return re.sub(rb"(?<=content-length: )\d+", lambda found: b"%d" % (int(found[0]) + more), data, count=1)
        case 6:
            return re.sub(rb"HTTP/1\.1", version, data, count=1)
        case _:
            return rng.choice((b"\r\n", b"\n", b"\r\n\r\n", b" ")) + data


def make_request(rng: random.Random) -> bytes:
    """Returns a request for a route, or for an unknown path."""
    path = rng.choice(HOT if rng.random() < 0.7 else OTHERS)
    method = "POST" if rng.random() < (0.95 if path in HOT else 0.6) else rng.choice(METHODS)
    body = make_body(rng, path) if method not in ("GET", "HEAD") or rng.random() < 0.05 else b""
    lines = rng.sample(HEADERS, rng.choice((0, 0, 0, 0, 1, 1, 2, 3)))
    framing = rng.random()
    if framing < 0.75:
        lines.append(b"content-length: %d" % len(body))
    elif framing < 0.92:
        lines.append(b"transfer-encoding: chunked")
        body = in_chunks(rng, body)
    elif framing < 0.95:
        lines.append(b"content-length: %d" % max(0, len(body) + rng.choice((-3, -1, 1, 7, 5000))))
    rng.shuffle(lines)
    version = "1.0" if rng.random() < 0.07 else "1.1"
    first = f"{method} {path} HTTP/{version}\r\nhost: wane".encode()
    return b"\r\n".join((first, *lines)) + b"\r\n\r\n" + body


def make_body(rng: random.Random, path: str) -> bytes:
    """Returns a body for the route at this path. Sometimes returns a body that every route refuses."""
    if rng.random() < 0.05:
        return rng.choice(NO_STEPS)
    documents: dict[str, dict[str, object]] = {
        "/v1/sessions/tokens": {
            "steps": [
                {"session": rng.choice(("a", "b", "unknown")), **make_step(rng)}
                for _ in range(rng.choice((1, 2, 3, 0)))
            ]
        },
        "/v1/sessions/a/rewind": {"position": rng.choice((0, 1, -1))},
        "/v1/generate": {"tokens": [1], "max_tokens": rng.randrange(4), "stream": rng.random() < 0.6},
        "/v1/sessions": {"session": rng.choice(("a", "new", "", "a/b"))},
        "/v1/score": {"tokens": [1, 2, 3]},
    }
    return json.dumps(documents.get(path, make_step(rng)), separators=rng.choice([(",", ":"), (", ", ": ")])).encode()


def make_step(rng: random.Random) -> dict[str, object]:
    """Returns a step, mostly with valid fields."""
    step: dict[str, object] = {"input": "a\u00e9b"}
    if rng.random() < 0.7:
        count = rng.choice((1, 1, 1, 1, 2, 5, 5, 0))
        step = {"tokens": [rng.choice(TOKENS) if rng.random() < 0.02 else rng.randrange(256) for _ in range(count)]}
    return step | {name: rng.choice(values) for name, values in FIELDS.items() if rng.random() < 0.05}


def in_chunks(rng: random.Random, body: bytes) -> bytes:
    """Returns the body in chunks, sometimes with an extension or a trailer."""
    parts = []
    while body:
        size = rng.randint(1, len(body))
        extension = b";x=y" if rng.random() < 0.1 else b""
        parts.append(b"%x%s\r\n%s\r\n" % (size, extension, body[:size]))
        body = body[size:]
    trailer = b"x-trailer: y\r\n" if rng.random() < 0.1 else b""
    return b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


def make_frames(rng: random.Random) -> bytes:
    """Returns a client's frames: steps (whole or in fragments), pings, pongs, and sometimes a close frame."""
    frames = []
    for _ in range(rng.randrange(5)):
        text = make_body(rng, "/v1/sessions/a/tokens")
        at = rng.randint(0, len(text))
        ping = [(PING, b"p")] if rng.random() < 0.3 else []
        frames += rng.choices(
            (
                [(TEXT, text)],
                [(FIRST, text[:at]), *ping, (LAST, text[at:])],
                [(PING, rng.randbytes(rng.randrange(10)))],
                [(PONG, b"")],
                [(BYTES, text)],
                [(CLOSE, (1000).to_bytes(2))],
            ),
            (60, 15, 10, 5, 5, 5),
        )[0]
    return b"".join(frame(rng.randbytes(4), first, payload) for first, payload in frames)


def frame(mask: bytes, first: int, payload: bytes) -> bytes:
    """Returns a masked frame with this first byte."""
    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2)
    return bytes([first]) + size + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
