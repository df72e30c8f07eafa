"""Tests of the whole topology with hostile clients. The tests check the answers to their requests, the memory that the
requests use, and that no log contains a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from deploy.stack.process import Process
from deploy.stack.stack import Stack
from tests.stack.conftest import MODEL, Figures, MakeStack
from tests.stack.harness.connection import Broken, Connection
from tests.stack.harness.load_generator import WAIT_S, until_true
from wane.service.auth.keys import Key, make_key

pytestmark = [pytest.mark.stack, pytest.mark.slow]

QUOTA = 1000
SESSIONS = 10_000
AT_ONCE = 32
MOST_BODY_BYTES = 2**20
BODY_TIMEOUT_S = 10
GROWTH_BYTES = 64 * 2**20
"""The number of bytes that a replica may use during the attacks, in addition to the memory of a ready replica. This is
enough for a thousand sessions and their states, the bodies of a few dozen concurrent requests, and the free memory that
the allocator keeps."""

TRICKS = [
    "..", "../..", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f" + MODEL, f"{MODEL}%00", f"{MODEL}%2f..%2f{MODEL}", "%00", ".",
    "%2fetc%2fpasswd", "C:%5cwindows", "....//", f"{MODEL}/../{MODEL}", "%c0%ae%c0%ae", "%ef%bc%8e%ef%bc%8e", "~root",
    "a" * 4000, "%25", "$(id)", f"{MODEL}%0d%0ax-injected:1", "manifest.json", f"{MODEL}%2fmanifest.json",
]  # fmt: skip

Statuses = Counter[object]


class Keys:
    """A key file, and the keys in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, Key] = {}
        self.made: list[str] = []

    def make(self, name: str, *words: str) -> str:
        """Makes a new key for the client `name`, with the options `words` of the key file. The next call of `write`
        adds the key to the file."""
        made, kept = make_key(name, words)
        self.made.append(made)
        self.kept[made] = kept
        return made

    def write(self) -> None:
        """Replaces the key file atomically."""
        part = self.path.with_name("part")
        part.write_text("".join(f"{key.line()}\n" for key in self.kept.values()))
        part.replace(self.path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def many(port: int, ask: Callable[[Connection, int], Awaitable[object]], count: int) -> Statuses:
    """Sends `count` requests over a few connections. Returns the number of answers by status."""
    numbers = iter(range(count))
    statuses: Statuses = Counter()

    async def go_on() -> None:
        connection = Connection(port)
        for number in numbers:
            try:
                statuses[await ask(connection, number)] += 1
            except Broken:
                statuses["broken"] += 1
        connection.close()

    await asyncio.gather(*(go_on() for _ in range(min(AT_ONCE, count))))
    return statuses


async def said(port: int, chunks: Sequence[bytes], every_s: float = 0.0) -> int:
    """Sends the chunks over a new connection, with a pause of `every_s` seconds after each. Returns the status of the
    answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def say() -> None:
        with contextlib.suppress(OSError):
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(every_s)

    saying = asyncio.create_task(say())
    try:
        return int((await reader.readline()).split()[1])
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        writer.close()


def reset_peak(pid: int) -> None:
    """Resets the process's peak memory to its current memory. Before this, the peak is that of loading the model, which
    needs more memory than serving it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of a process."""
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def secrets_in(stack: Stack, secrets: Sequence[str]) -> list[str]:
    """Returns the secrets found in a log of the stack."""
    texts = [path.read_text(errors="replace") for path in stack.logs.iterdir()]
    assert all(texts[:1]), "a log is empty, so this check cannot find secrets in it"
    return [secret for secret in secrets for text in texts if secret in text]


async def answers_for_another_owner(port: int, session: str, key: str) -> Statuses:
    """Sends requests for `session` to several routes, with `key`, which is the key of another client. Returns the
    number of answers by status."""
    path, step, headers = f"/v1/sessions/{session}", {"tokens": [1]}, bearer(key)
    asked: list[tuple[str, str, object]] = [
        ("GET", path, None),
        ("DELETE", path, None),
        ("POST", f"{path}/tokens", step),
        ("POST", f"{path}/rewind", {"position": 0}),
        ("POST", "/v1/predict", {"session": session}),
        ("POST", "/v1/sessions/tokens", {"steps": [{"session": session, **step}]}),
    ]
    connection = Connection(port)
    statuses: Statuses = Counter()
    for method, where, body in asked:
        reply = await connection.ask(method, where, body, headers)
        found = reply.document.get("results", [{"error": reply.document}])[0]["error"]
        nowhere = await connection.ask("GET", "/v1/sessions/nowhere", None, headers)
        assert found["detail"].replace(session, "nowhere") == nowhere.document["detail"]
        statuses[found["status"]] += 1
    connection.close()
    async with connect(f"ws://127.0.0.1:{port}{path}/stream", additional_headers=headers) as socket:
        await socket.send(json.dumps(step))
        assert json.loads(await socket.recv())["error"]["status"] == 404
        with pytest.raises(ConnectionClosed) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None
        statuses[caught.value.rcvd.code] += 1
    return statuses


async def test_attacks_are_rejected_without_using_memory_or_leaking_secrets(
    make_stack: MakeStack, keys: Keys, figures: Figures
) -> None:
    alice, ops = keys.make("alice"), keys.make("ops", "scope=admin")
    mallory = keys.make("mallory", f"sessions={QUOTA}")
    keys.write()
    settings = {
        "WANE_API_KEYS_FILE": str(keys.path),
        "WANE_API_KEYS": "carol:the-environment-has-this-one",
        "WANE_MAX_BODY_BYTES": str(MOST_BODY_BYTES),
        "WANE_BODY_TIMEOUT_S": str(BODY_TIMEOUT_S),
        "WANE_LOG_LEVEL": "debug",
    }
    with make_stack(settings) as stack:
        port = stack.port
        for replica in stack.replicas:
            reset_peak(replica.pid)
        before = {replica.name: peak_bytes(replica.pid) for replica in stack.replicas}
        client = Connection(port)
        own = await client.ask("POST", "/v1/sessions", {"session": "mine"}, bearer(alice))
        drawn = await client.ask("POST", "/v1/sessions", {}, bearer(alice))
        assert own.status == drawn.status == 201
        first = await client.ask("POST", "/v1/sessions/mine/tokens", {"tokens": [5]}, bearer(alice))
        assert first.document["position"] == 1

        async def wrong_key(connection: Connection, number: int) -> int:
            wrong = [f"wane_{number:043}", alice[:-1], f"{alice}x", alice.swapcase(), keys.kept[alice].digest.hex()]
            where = ["/v1/models", "/v1/sessions/mine", "/metrics", "/docs", "/v2/repository/models/x/load"]
            named = bearer(wrong[number % 5]) if number % 7 else {"x-api-key": alice}
            return (await connection.ask("GET", where[number // 5 % 5], None, named)).status

        async def new_session(connection: Connection, number: int) -> int:
            body = {"session": f"m-{number}"}
            return (await connection.ask("POST", "/v1/sessions", body, bearer(mallory))).status

        async def large(_: Connection, number: int) -> int:
            head = b"POST /v1/predict HTTP/1.1\r\nhost: wane\r\nauthorization: Bearer %s\r\n" % mallory.encode()
            if number % 2:
                return await said(port, [head + b"content-length: %d\r\n\r\n" % (2**40)])
            chunk = b"%x\r\n%s\r\n" % (2**16, b" " * 2**16)
            return await said(port, [head + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 64])

        async def drip(_: Connection, number: int) -> int:
            head = b"POST /v1/sessions/m-%d/tokens HTTP/1.1\r\nhost: wane\r\ncontent-length: 999\r\n" % number
            return await said(
                port, [head + b"authorization: Bearer %s\r\n\r\n{" % mallory.encode(), *[b" "] * 999], 0.1
            )

        async def trick(connection: Connection, number: int) -> object:
            name = TRICKS[number // 3]
            where, method = [("/v2/repository/models/{}/load", "POST"), ("/v2/repository/models/{}/unload", "POST"),
                             ("/v1/models/{}", "GET")][number % 3]  # fmt: skip
            reply = await connection.ask(method, where.format(name), None, bearer(ops))
            assert "x-injected" not in reply.headers
            return reply.status

        async def not_admin(connection: Connection, number: int) -> int:
            path = f"/v2/repository/models/{MODEL}/{['load', 'unload'][number % 2]}"
            return (await connection.ask("POST", path, None, bearer(mallory))).status

        attacks = {
            "wrong keys": many(port, wrong_key, 700),
            "others' sessions": answers_for_another_owner(port, "mine", mallory),
            "others' drawn ids": answers_for_another_owner(port, drawn.document["session"], mallory),
            "open sessions": many(port, new_session, SESSIONS),
            "large bodies": many(port, large, 24),
            "slow bodies": many(port, drip, 24),
            "path tricks": many(port, trick, 3 * len(TRICKS)),
            "not admin": many(port, not_admin, 50),
        }
        found = dict(zip(attacks, await asyncio.gather(*attacks.values()), strict=True))
        assert found["wrong keys"] == {401: 700}
        assert found["others' sessions"] == found["others' drawn ids"] == {404: 6, 4404: 1}
        assert found["open sessions"] == {201: QUOTA, 429: SESSIONS - QUOTA}
        assert found["large bodies"] == {413: 24}
        assert found["slow bodies"] == {408: 24}
        assert set(found["path tricks"]) <= {400, 404}, found["path tricks"]
        assert found["not admin"] == {403: 50}

        step = {"tokens": [6], "expected_position": 1}
        after = await client.ask("POST", "/v1/sessions/mine/tokens", step, bearer(alice))
        assert (after.status, after.document["position"]) == (200, 2)
        client.close()
        growth = {replica.name: peak_bytes(replica.pid) - before[replica.name] for replica in stack.replicas}
        figures(peak=max(before.values()) >> 20, growth_mib=max(growth.values()) >> 20)
        assert max(growth.values()) <= GROWTH_BYTES
    hashes = [key.digest.hex() for key in keys.kept.values()]
    assert secrets_in(stack, [*keys.made, *hashes, "the-environment-has-this-one"]) == []


async def asked(port: int, key: str) -> int:
    """Returns the status of a request with a key."""
    connection = Connection(port)
    try:
        return (await connection.ask("GET", "/v1/models", None, bearer(key))).status
    finally:
        connection.close()


async def test_keys_are_rotated_under_load_without_a_failed_request(make_stack: MakeStack, keys: Keys) -> None:
    old, bob = keys.make("alice"), keys.make("bob")
    keys.write()
    with make_stack({"WANE_API_KEYS_FILE": str(keys.path)}) as stack:
        current = old
        failed: list[object] = []
        steps = Counter[str]()
        over = asyncio.Event()

        async def step_on(owner: str, session: str) -> None:
            connection = Connection(stack.port)

            def headers() -> dict[str, str]:
                return bearer(current if owner == "alice" else bob)

            assert (await connection.ask("POST", "/v1/sessions", {"session": session}, headers())).status == 201
            while not over.is_set():
                body = {"tokens": [5], "expected_position": steps[f"{owner}/{session}"]}
                reply = await connection.ask("POST", f"/v1/sessions/{session}/tokens", body, headers())
                steps[f"{owner}/{session}"] += 1
                if reply.status != 200 or reply.document["position"] != steps[f"{owner}/{session}"]:
                    failed.append((owner, session, reply))
            connection.close()

        async def until_all(condition: Callable[[Process], Awaitable[bool]]) -> None:
            """Waits until the condition holds for every replica."""
            async with asyncio.timeout(WAIT_S):
                for replica in stack.replicas:
                    while not await condition(replica):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

        def answers(key: str, status: int) -> Callable[[Process], Awaitable[bool]]:
            async def answered(replica: Process) -> bool:
                return await asked(replica.port, key) == status

            return answered

        async def has_kept_its_keys(replica: Process) -> bool:
            return "the keys stay as they are" in (stack.logs / f"{replica.name}.log").read_text()

        async with asyncio.TaskGroup() as clients:
            for number in range(6):
                clients.create_task(step_on("alice", f"s-{number}"))
            clients.create_task(step_on("bob", "s-0"))  # alice has a session with the same id
            new = keys.make("alice")
            keys.write()
            await until_all(answers(new, 200))
            await until_all(answers(old, 200))
            current = new  # both keys of alice give access to the same sessions
            del keys.kept[old]
            keys.write()
            await until_all(answers(old, 401))
            keys.path.write_text("half of a li")
            await until_all(has_kept_its_keys)
            await until_all(answers(new, 200))
            soon = keys.make("carol")
            keys.write()
            for replica in stack.replicas:
                os.kill(replica.pid, signal.SIGHUP)
            await until_all(answers(soon, 200))
            await until_true(lambda: len(steps) == 7 and min(steps.values()) > 20)
            over.set()
        assert failed == []
    assert secrets_in(stack, keys.made) == []
