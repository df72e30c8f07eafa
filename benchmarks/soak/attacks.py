"""The attacks of hostile clients, and the accepted answers to each.

For each of its requests, in order, an attack yields the actual answer and the accepted answers. An answer is a status,
`closed`, or `no answer`. An actual answer that is not accepted is an error.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.soak.raw import CLOSED, SILENT, authorization, connected, frame, head, request, upgrade

HELD_S = 4.0  # seconds for which silent and slow connections stay open
DRIPS = 8
UNREAD = 300  # number of steps that are sent to a WebSocket whose answers are never read
GENERATED = 2000
FLOOD = 5
BUSY = "429"


@dataclass(frozen=True, slots=True)
class Target:
    """The attacked server. `key` is the hostile client's key. `victims` returns the ids of other clients' sessions."""

    port: int
    key: str | None
    max_body_bytes: int
    vocabulary: int
    victims: Callable[[], list[str]]


class Told(NamedTuple):
    """The actual answer to a request, and the accepted answers."""

    answer: str
    right: tuple[str, ...]


Attack = Callable[[Target], AsyncIterator[Told]]


async def ask(target: Target, data: bytes, *right: str) -> Told:
    """Sends the bytes of one request on a new connection. `right` are the accepted answers."""
    async with connected(target.port) as raw:
        await raw.send(data)
        return Told(await raw.status(), right)


async def wrong_keys(target: Target) -> AsyncIterator[Told]:
    """Sends requests without a key, with wrong keys, and with another authentication scheme."""
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
        yield await ask(target, head("GET", path, headers), "401")


async def strangers(target: Target) -> AsyncIterator[Told]:
    """Tries to read, step, rewind and delete other clients' sessions, and to predict from them."""
    for session in random.sample(victims := target.victims(), min(2, len(victims))):
        path = f"/v1/sessions/{session}"
        yield await ask(target, request("GET", path, target.key), "404")
        yield await ask(target, request("POST", f"{path}/tokens", target.key, {"tokens": [5]}), "404")
        yield await ask(target, request("POST", f"{path}/rewind", target.key, {"position": 0}), "404")
        yield await ask(target, request("DELETE", path, target.key), "404")
        yield await ask(target, request("POST", "/v1/predict", target.key, {"session": session}), "404")


async def above_its_station(target: Target) -> AsyncIterator[Told]:
    """Tries the operations that need an admin key: loading models, unloading models, and reading metrics."""
    for path in ("gated-stable/unload", "..%2f..%2fetc/load", "gated-stable/load"):
        yield await ask(target, request("POST", f"/v2/repository/models/{path}", target.key, {}), "403")
    yield await ask(target, request("GET", "/metrics", target.key), "403")


async def oversized(target: Target) -> AsyncIterator[Told]:
    """Sends a body over the byte limit, first with a content-length, then in chunks."""
    more = target.max_body_bytes + 1
    headers = {"content-type": "application/json", **authorization(target.key)}
    async with connected(target.port) as raw:
        await raw.send(head("POST", "/v1/score", headers | {"content-length": str(more)}))
        yield Told(await raw.status(), ("413",))
    async with connected(target.port) as raw:
        await raw.send(head("POST", "/v1/score", headers | {"transfer-encoding": "chunked"}))
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(more // 65536 + 1):
            await raw.send(piece)
        # The server may close the connection before it has received the whole body.
        yield Told(await raw.status(), ("413", CLOSED))


async def drips(target: Target) -> AsyncIterator[Told]:
    """Sends a body byte by byte on one connection, and a head byte by byte on another. Closes each connection before
    the body or the head is complete."""
    headers = {"content-type": "application/json", "content-length": "1000", **authorization(target.key)}
    for data in (head("POST", "/v1/score", headers), b"GET /v1/models HTTP/1.1\r\nx-slow: "):
        async with connected(target.port) as raw:
            await raw.send(data)
            for _ in range(DRIPS):
                await raw.send(b"x")
                await asyncio.sleep(HELD_S / DRIPS)
            yield Told(await raw.status(within_s=0.1), ("408", CLOSED, SILENT))


async def half_open(target: Target) -> AsyncIterator[Told]:
    """Opens a connection, sends nothing, and resets it."""
    async with connected(target.port) as raw:
        await asyncio.sleep(HELD_S)
        yield Told(await raw.status(within_s=0.1), (CLOSED, SILENT))
        raw.reset()


async def garbage(target: Target) -> AsyncIterator[Told]:
    """Sends bytes that are not HTTP, and HTTP that the server does not support."""
    for data, right in (
        (random.randbytes(200) + b"\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(80), "400"),
        # This is a request of HTTP 0.9. The server's parser (llhttp) accepts it.
        (b"GET /v1/models\r\n\r\n", "200" if target.key is None else "401"),
        (b"GET /v1/models HTTP/1.1\r\nhost localhost\r\n\r\n", "400"),
        (b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", "400"),
        (
            b"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "400",
        ),
        (b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n", "431"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
    ):
        yield await ask(target, data, right)


async def paths(target: Target) -> AsyncIterator[Told]:
    """Sends names of models and sessions that contain path traversals, control bytes or too many characters."""
    for name in (
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/pyproject.toml",
        "a%00b",
        "%ff%fe",
        "x" * 5000,
        "%252e%252e",
    ):
        yield await ask(target, request("GET", f"/v1/models/{name}", target.key), "404")
        yield await ask(target, request("GET", f"/v2/models/{name}/versions/..%2f1", target.key), "404")
    for model, right in (
        ("../../../etc/passwd", "404"),
        ("gated-stable/../lstm", "404"),
        ("a\0b", "404"),
        ("", "404"),
        ("é" * 400, "422"),
    ):
        body = {"model": model, "tokens": [5, 6]}
        yield await ask(target, request("POST", "/v1/predict", target.key, body), right)
    for session, right in (("..%2f..", "404"), ("%00", "404"), ("y" * 3000, "422")):
        yield await ask(target, request("GET", f"/v1/sessions/{session}", target.key), right)


async def malformed(target: Target) -> AsyncIterator[Told]:
    """Sends bodies that are not JSON, or whose values are invalid."""
    for body, right in (
        (b'{"tokens": [1, 2', "400"),
        (b"[" * 10_000, "400"),
        (b'{"tokens": [NaN]}', "422"),
        (b'{"tokens": [1e400]}', "422"),
        (b'{"tokens": [99999999999999999999999999]}', "422"),
        (b'{"tokens": "many"}', "422"),
        (b'{"tokens": [-1]}', "422"),
        (b'{"tokens": [1], "tolerance": "x"}', "422"),
        (b'{"tokens": []}', "422"),
        (b'{"input": "\\ud800"}', "400"),
        (b"\xff\xfe\x00", "400"),
        (b'{"tokens": [1], "surprise": 1}', "422"),
        (b"null", "422"),
        (b"", "400"),
    ):
        path = random.choice(("/v1/predict", "/v1/generate", "/v1/score"))
        yield await ask(target, request("POST", path, target.key, body), right)


class Bomb(NamedTuple):
    """A request that the server must refuse.

    right: the only accepted status. of: a text that the answer must contain.
    """

    path: str
    body: dict[str, object]
    right: str
    of: str


def bombs_of(vocabulary: int) -> Iterator[Bomb]:
    """Yields small requests that ask for too much work or have an invalid value. `vocabulary`: the number of tokens in
    the vocabulary of the server's model."""
    some: dict[str, object] = {"tokens": [5, 6, 7]}
    yield Bomb("/v1/predict", {"inputs": [[5, 6, 7]] * 3000}, "422", "inputs asks for 3000 rows")
    yield Bomb("/v1/predict", {"tokens": [5] * 70_000}, "413", "70000")
    yield Bomb("/v1/predict", {**some, "top_k": 10**9}, "422", "top_k is 1000000000")
    yield Bomb("/v1/predict", {**some, "mode": "window", "window": 10**9}, "422", "window is 1000000000")
    yield Bomb("/v1/predict", {"tokens": [vocabulary + 1]}, "422", "tokens[0]")
    yield Bomb("/v1/compare", {**some, "windows": [64] * 1000, "repeat": 10**6}, "422", "windows holds 1000")
    yield Bomb("/v1/generate", {**some, "max_tokens": 10**9}, "422", "max_tokens is 1000000000")
    yield Bomb("/v1/generate", {**some, "temperature": -1.0, "max_tokens": 5}, "422", "temperature is -1.0")
    yield Bomb("/v1/score", {"tokens": [5] * 300_000}, "413", "max_scored_tokens is 262144")
    steps = [{"session": "a", "tokens": [5]}] * 3000
    yield Bomb("/v1/sessions/tokens", {"steps": steps}, "422", "steps asks for 3000 rows")


async def bombs(target: Target) -> AsyncIterator[Told]:
    """Sends every request of `bombs_of`."""
    for bomb in bombs_of(target.vocabulary):
        yield await ask(target, request("POST", bomb.path, target.key, bomb.body), bomb.right)


async def leavers(target: Target) -> AsyncIterator[Told]:
    """Hangs up during a stream of tokens, and while a long sequence is scored."""
    body = {"tokens": [5, 6], "max_tokens": GENERATED, "stream": True, "temperature": 1.0}
    async with connected(target.port) as raw:
        await raw.send(request("POST", "/v1/generate", target.key, body))
        yield Told(await raw.status(), ("200", BUSY))
        await raw.read(500)
        raw.reset()
    async with connected(target.port) as raw:
        await raw.send(request("POST", "/v1/score", target.key, {"tokens": [5] * 20_000}))
        await asyncio.sleep(0.05)
        raw.reset()


async def flood(target: Target) -> AsyncIterator[Told]:
    """Creates FLOOD sessions and never uses them. Repeated runs of this attack exceed the quota of sessions."""
    for _ in range(FLOOD):
        yield await ask(target, request("POST", "/v1/sessions", target.key, {}), "201", BUSY)


async def never_reads(target: Target) -> AsyncIterator[Told]:
    """Sends steps to a WebSocket without reading from it."""
    async with connected(target.port) as raw:
        name = f"never-reads-{random.randrange(8)}"
        # This answer is not checked: the session may exist already, or the quota may be used up.
        await ask(target, request("POST", "/v1/sessions", target.key, {"session": name}))
        await raw.send(upgrade(f"/v1/sessions/{name}/stream", target.key))
        yield Told(await raw.status(), ("101",))
        step = frame(json.dumps({"tokens": [random.randrange(2, target.vocabulary)], "top_k": 100}))
        try:
            async with asyncio.timeout(HELD_S):
                for _ in range(UNREAD):
                    await raw.send(step)
        except TimeoutError:
            pass
        await asyncio.sleep(HELD_S / 2)
        raw.reset()


async def babbling(target: Target) -> AsyncIterator[Told]:
    """Sends only invalid messages to a WebSocket."""
    async with connected(target.port) as raw:
        name = f"babbling-{random.randrange(8)}"
        # This answer is not checked: the session may exist already, or the quota may be used up.
        await ask(target, request("POST", "/v1/sessions", target.key, {"session": name}))
        await raw.send(upgrade(f"/v1/sessions/{name}/stream", target.key))
        yield Told(await raw.status(), ("101",))
        for text in ("{", '{"tokens": "x"}', '{"rewind": -5}', "x" * 3000, '{"tokens": []}'):
            await raw.send(frame(text))
        no_text = b"\x81\x82" + bytes(4) + b"\xff\xfe"
        wrong = (b"\xff" * 200, no_text, frame("x", announced=2**30), frame("x", announced=2**63 - 1))
        await raw.send(random.choice(wrong))
        await raw.read(4096, within_s=1.0)
        raw.reset()


ATTACKS: tuple[Attack, ...] = (
    wrong_keys,
    strangers,
    above_its_station,
    oversized,
    drips,
    half_open,
    garbage,
    paths,
    malformed,
    bombs,
    leavers,
    flood,
    never_reads,
    babbling,
)

WITH_KEYS = frozenset({wrong_keys, strangers, above_its_station})
"""The attacks that are run only if the server requires keys."""
