"""What hostile clients do, one thing at a time, and how each is to be answered.

An attack yields what it was told, in the order of its requests: statuses, `closed`, or `no answer` where that is what
it wanted. Whatever is not in its list is wrong, and so is every answer of 500 or more.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from benchmarks.soak.raw import CLOSED, SILENT, authorization, connected, frame, head, request, upgrade

HELD_S = 4.0  # for how long a connection is kept that says nothing, or too little
DRIPS = 8
UNREAD = 300  # steps that are sent to a WebSocket of which nothing is read
GENERATED = 2000
FLOOD = 5


@dataclass(frozen=True, slots=True)
class Target:
    """Where, with which key, at most how large a body; `victims` gives the sessions of somebody else."""

    port: int
    key: str | None
    max_body_bytes: int
    vocabulary: int
    victims: Callable[[], list[str]]


Attack = Callable[[Target], AsyncIterator[str]]


async def ask(target: Target, data: bytes) -> str:
    """One request on a connection of its own."""
    async with connected(target.port) as raw:
        await raw.send(data)
        return await raw.status()


async def wrong_keys(target: Target) -> AsyncIterator[str]:
    """No key, one that nobody has, parts of a good one, another scheme."""
    assert target.key is not None
    for headers in (
        {},
        authorization("wane_" + "x" * 43),
        authorization(target.key[:-1]),
        authorization(target.key + "x"),
        {"authorization": f"Basic {target.key}"},
        {"authorization": "Bearer " + "k" * 2000},
    ):
        path = random.choice(("/v1/models", "/v1/report", "/metrics", "/v1/sessions/soak-1", "/v2", "/nowhere"))
        yield await ask(target, head("GET", path, headers))


async def strangers(target: Target) -> AsyncIterator[str]:
    """Sessions of somebody else: to look at, step, rewind, end, and to go on from."""
    for session in random.sample(victims := target.victims(), min(2, len(victims))):
        path = f"/v1/sessions/{session}"
        yield await ask(target, request("GET", path, target.key))
        yield await ask(target, request("POST", f"{path}/tokens", target.key, {"tokens": [5]}))
        yield await ask(target, request("POST", f"{path}/rewind", target.key, {"position": 0}))
        yield await ask(target, request("DELETE", path, target.key))
        yield await ask(target, request("POST", "/v1/predict", target.key, {"session": session}))


async def above_its_station(target: Target) -> AsyncIterator[str]:
    """What takes another key: loading, unloading, metrics."""
    for path in ("gated-stable/unload", "..%2f..%2fetc/load", "gated-stable/load"):
        yield await ask(target, request("POST", f"/v2/repository/models/{path}", target.key, {}))
    yield await ask(target, request("GET", "/metrics", target.key))


async def oversized(target: Target) -> AsyncIterator[str]:
    """More than a body may have: said beforehand, and not."""
    more = target.max_body_bytes + 1
    headers = {"content-type": "application/json", **authorization(target.key)}
    async with connected(target.port) as raw:
        await raw.send(head("POST", "/v1/score", headers | {"content-length": str(more)}))
        yield await raw.status()
    async with connected(target.port) as raw:
        await raw.send(head("POST", "/v1/score", headers | {"transfer-encoding": "chunked"}))
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(more // 65536 + 1):
            await raw.send(piece)
        yield await raw.status()


async def drips(target: Target) -> AsyncIterator[str]:
    """A body, and a head, of which a byte comes now and then; left before the end."""
    headers = {"content-type": "application/json", "content-length": "1000", **authorization(target.key)}
    for data in (head("POST", "/v1/score", headers), b"GET /v1/models HTTP/1.1\r\nx-slow: "):
        async with connected(target.port) as raw:
            await raw.send(data)
            for _ in range(DRIPS):
                await raw.send(b"x")
                await asyncio.sleep(HELD_S / DRIPS)
            yield await raw.status(within_s=0.1)


async def half_open(target: Target) -> AsyncIterator[str]:
    """Connections on which nothing is said, and that are gone without a word."""
    async with connected(target.port) as raw:
        await asyncio.sleep(HELD_S)
        yield await raw.status(within_s=0.1)
        raw.reset()


async def garbage(target: Target) -> AsyncIterator[str]:
    """What is no HTTP."""
    for data in (
        random.randbytes(200) + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(80),
        b"GET /v1/models\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost localhost\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        async with connected(target.port) as raw:
            await raw.send(data)
            yield await raw.status(within_s=1.0)


async def paths(target: Target) -> AsyncIterator[str]:
    """Names that would lead out of the folder of models, or nowhere."""
    for name in (
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/pyproject.toml",
        "a%00b",
        "%ff%fe",
        "x" * 5000,
        "%252e%252e",
    ):
        yield await ask(target, request("GET", f"/v1/models/{name}", target.key))
        yield await ask(target, request("GET", f"/v2/models/{name}/versions/..%2f1", target.key))
    for model in ("../../../etc/passwd", "gated-stable/../lstm", "a\0b", "", "é" * 400):
        body = {"model": model, "tokens": [5, 6]}
        yield await ask(target, request("POST", "/v1/predict", target.key, body))
    for session in ("..%2f..", "%00", "y" * 3000):
        yield await ask(target, request("GET", f"/v1/sessions/{session}", target.key))


async def malformed(target: Target) -> AsyncIterator[str]:
    """What is no JSON, or not what was asked for."""
    for body in (
        b'{"tokens": [1, 2',
        b"[" * 100_000,
        b'{"tokens": [NaN]}',
        b'{"tokens": [1e400]}',
        b'{"tokens": [99999999999999999999999999]}',
        b'{"tokens": "many"}',
        b'{"tokens": [-1]}',
        b'{"tokens": [1], "tolerance": "x"}',
        b'{"tokens": []}',
        b'{"input": "\\ud800"}',
        b"\xff\xfe\x00",
        b'{"tokens": [1], "surprise": 1}',
        b"null",
        b"",
    ):
        path = random.choice(("/v1/predict", "/v1/generate", "/v1/score"))
        yield await ask(target, request("POST", path, target.key, body))


async def bombs(target: Target) -> AsyncIterator[str]:
    """Much work by few bytes."""
    some = {"tokens": [5, 6, 7]}
    for path, body in (
        ("/v1/predict", {"inputs": [some] * 3000}),
        ("/v1/predict", {"tokens": [5] * 70_000}),
        ("/v1/predict", {**some, "top_k": 10**9}),
        ("/v1/predict", {**some, "mode": "window", "window": 10**9}),
        ("/v1/predict", {"tokens": [target.vocabulary + 1]}),
        ("/v1/compare", {**some, "windows": [64] * 1000, "repeat": 10**6}),
        ("/v1/generate", {**some, "max_tokens": 10**9}),
        ("/v1/generate", {**some, "temperature": -1.0, "max_tokens": 5}),
        ("/v1/score", {"tokens": [5] * 300_000}),
        ("/v1/sessions/tokens", {"steps": [{"session": "a", "tokens": [5]}] * 3000}),
    ):
        yield await ask(target, request("POST", path, target.key, body))


async def leavers(target: Target) -> AsyncIterator[str]:
    """Clients that go while they are answered: from a stream of tokens, and from one long answer."""
    body = {"tokens": [5, 6], "max_tokens": GENERATED, "stream": True, "temperature": 1.0}
    async with connected(target.port) as raw:
        await raw.send(request("POST", "/v1/generate", target.key, body))
        yield await raw.status()
        await raw.read(500)
        raw.reset()
    async with connected(target.port) as raw:
        await raw.send(request("POST", "/v1/score", target.key, {"tokens": [5] * 20_000}))
        await asyncio.sleep(0.05)
        raw.reset()
    yield CLOSED


async def flood(target: Target) -> AsyncIterator[str]:
    """More sessions than one may have, which nobody ever uses."""
    for _ in range(FLOOD):
        yield await ask(target, request("POST", "/v1/sessions", target.key, {}))


async def deaf(target: Target) -> AsyncIterator[str]:
    """A WebSocket to which steps are sent, and from which nothing is read."""
    async with connected(target.port) as raw:
        name = f"deaf-{random.randrange(8)}"
        await ask(target, request("POST", "/v1/sessions", target.key, {"session": name}))
        await raw.send(upgrade(f"/v1/sessions/{name}/stream", target.key))
        yield await raw.status()
        step = frame(json.dumps({"tokens": [random.randrange(2, target.vocabulary)], "top_k": 100}))
        try:
            async with asyncio.timeout(HELD_S):
                for _ in range(UNREAD):
                    await raw.send(step)
        except TimeoutError:
            pass
        await asyncio.sleep(HELD_S / 2)
        raw.reset()


async def babbling(target: Target) -> AsyncIterator[str]:
    """A WebSocket on which nothing right is said."""
    async with connected(target.port) as raw:
        name = f"babbling-{random.randrange(8)}"
        await ask(target, request("POST", "/v1/sessions", target.key, {"session": name}))
        await raw.send(upgrade(f"/v1/sessions/{name}/stream", target.key))
        yield await raw.status()
        for text in ("{", '{"tokens": "x"}', '{"rewind": -5}', "x" * 3000, '{"tokens": []}'):
            await raw.send(frame(text))
        no_text = b"\x81\x82" + bytes(4) + b"\xff\xfe"
        wrong = (b"\xff" * 200, no_text, frame("x", announced=2**30), frame("x", announced=2**63 - 1))
        await raw.send(random.choice(wrong))
        await raw.read(4096, within_s=1.0)
        raw.reset()


REFUSED = frozenset({"400", "401", "403", "404", "405", "413", "414", "422", "431", CLOSED})
BUSY = frozenset({"429"})
ATTACKS: Mapping[Attack, frozenset[str]] = {
    wrong_keys: frozenset({"401", "431"}),
    strangers: frozenset({"404"}),
    above_its_station: frozenset({"403"}),
    oversized: frozenset({"413", CLOSED}),
    drips: frozenset({"400", "408", CLOSED, SILENT}),
    half_open: frozenset({CLOSED, SILENT}),
    garbage: REFUSED | {SILENT},
    paths: REFUSED,
    malformed: REFUSED,
    bombs: REFUSED,
    leavers: BUSY | {"200", CLOSED},
    flood: BUSY | {"201"},
    deaf: BUSY | {"101", "403"},
    babbling: BUSY | {"101", "403"},
}
"""Each with what it may be told."""

WITH_KEYS = frozenset({wrong_keys, strangers, above_its_station})
"""Those that mean nothing where everybody may ask."""
