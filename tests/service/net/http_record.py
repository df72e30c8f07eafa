"""Answers the cases of `http_cases`, and compares the answers with recorded answers.

    python -m tests.service.net.http_record --write FILE --cases 20000     records the answers of this checkout
    python -m tests.service.net.http_record --compare FILE                 compares this checkout with a record

A record has one line of JSON for each case: its number, the responses, whether the server closed the connection, and
the requests that reached the engine. `http_record.jsonl.gz` is the sample that the tests compare.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import math
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from tests.service.conftest import never
from tests.service.fake_engine import FakeRegistry
from tests.service.net.http_cases import Case, make_case
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.settings import Settings

SEED = 1
RECORD = Path(__file__).with_name("http_record.jsonl.gz")
# `max_body_bytes` is larger than the body of every case, so the server reads every body to its end.
LIMITS = {"max_body_bytes": 2048, "max_header_bytes": 4096}
QUIET_TURNS = 40  # a client waits at least this many event loop iterations for another byte
SURE_S = 0.3  # the time that a client waits for another byte if its answers seem to differ
CLOSED_S = 10.0  # the longest time, in seconds, that the server may need to clean up a closed connection
UNSTEADY = frozenset({b"date", b"server"})
RELATIVE = 1e-5  # the largest relative difference of two equal numbers
NUMBER = re.compile(r"-?[0-9]+\.[0-9]+(?:e-?[0-9]+)?")
SWITCHING = 101
SHORT_BYTES = 125  # the longest payload, in bytes, whose length fits in the second byte of a frame
CONTROL = 0x08  # the bit of a frame's first byte that is set in control frames

Answered = dict[str, Any]
"""What the client of one case saw: see the module's docstring."""


class EngineDelay:
    """Replaces the event for which the fake engine waits. The wait ends after `turns` event loop iterations."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def wait(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)


class Endpoint:
    """A server with a fake engine and without a listening socket. `answer` makes the connections."""

    def __init__(self) -> None:
        self.registry = FakeRegistry()
        settings = Settings.model_validate(LIMITS)
        app = create_app(settings, cast(ModelRegistry, self.registry), Metrics(), on_load_failure=never)
        self.config = self.configured(app)
        self.state = ServerState()

    def configured(self, app: Any) -> uvicorn.Config:
        from wane.service.server import configured

        return configured(app, lifespan="off")

    def protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.state, app_state={})

    async def answer(self, number: int, case: Case, quiet_s: float = 0.0) -> Answered:
        """Carries out the client's actions of a case on a new connection. Ignores the responses if the client resets
        the connection."""
        engine = self.registry.engine
        engine.asked.clear()
        engine.wait = cast(asyncio.Event, EngineDelay(case.wait_turns)) if case.wait_turns else None
        here, there = socket.socketpair()
        here.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self.protocol, there)
        client = Client(here, quiet_s)
        for stage in case.stages:
            for part in stage:
                await client.send(part, case.turns)
            if case.leaves != "resets":
                await client.read_until_quiet()
        if case.leaves == "half-closes":
            with suppress(OSError):
                here.shutdown(socket.SHUT_WR)
            await client.read_until_quiet()
        received, closed = bytes(client.received), client.closed
        here.close()
        async with asyncio.timeout(CLOSED_S):
            while self.state.connections or self.state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)
        if case.leaves == "resets":
            return {"case": number, "responses": [], "closed": True, "asked": []}
        # the order in which the steps of different sessions of one call begin has no meaning
        asked = sorted(without_deadline(one) for one in engine.asked)
        return {"case": number, "responses": [*responses(received)], "closed": closed, "asked": asked}


def without_deadline(asked: object) -> str:
    return re.sub(r"deadline=[^,)]*", "deadline=...", repr(asked))


class Client:
    """The client's end of a connection. The client stops waiting when no byte has arrived for QUIET_TURNS event loop
    iterations and for `quiet_s` seconds."""

    def __init__(self, connection: socket.socket, quiet_s: float) -> None:
        self.connection = connection
        self.quiet_s = quiet_s
        self.received = bytearray()
        self.closed = False

    async def send(self, data: bytes, turns: int) -> None:
        """Sends the data, and reads for `turns` event loop iterations."""
        with suppress(ConnectionError):
            self.connection.send(data)
        for _ in range(turns):
            await asyncio.sleep(0)
            self.read()

    def read(self) -> bool:
        """Reads the bytes that are available. Returns whether it has read any."""
        try:
            some = self.connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            some = b""
        self.closed = not some
        self.received += some
        return bool(some)

    async def read_until_quiet(self) -> None:
        """Reads until the connection is closed, or until no byte has arrived for QUIET_TURNS event loop iterations and
        for `quiet_s` seconds."""
        loop = asyncio.get_running_loop()
        silent_turns, since_s = 0, loop.time()
        while not self.closed and (silent_turns < QUIET_TURNS or loop.time() - since_s < self.quiet_s):
            await asyncio.sleep(0.001 if silent_turns > QUIET_TURNS else 0)
            silent_turns += 1
            if self.read():
                silent_turns, since_s = 0, loop.time()


def responses(received: bytes) -> Iterator[list[Any]]:
    """Yields the status, the sorted headers and the body of each response. Leaves out headers that differ
    for every request, and replaces random ids. The body of the response to a handshake has the WebSocket's frames.
    Fails if the bytes are not a sequence of complete responses."""
    received = re.sub(rb"[0-9a-f]{32}", b"I" * 32, received)
    while received:
        head, end, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert end and re.match(rb"HTTP/1\.1 \d{3} ", first), received
        fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        status, headers = int(first[9:12]), dict(fields)
        if status == SWITCHING:
            body, received = data_first(rest), b""
        elif rest.startswith(b"HTTP/1.1 ") or status < SWITCHING:  # a response to HEAD has a content-length but no body
            body, received = b"", rest
        elif headers.get(b"transfer-encoding") == b"chunked":
            body, received = dechunked(rest)
        else:
            size = int(headers.get(b"content-length", b"0"))
            body, received = rest[:size], rest[size:]
        kept = sorted(b": ".join(field).decode("latin-1") for field in fields if field[0] not in UNSTEADY)
        yield [status, kept, body.decode("latin-1")]


def dechunked(data: bytes) -> tuple[bytes, bytes]:
    """Returns a decoded chunked body, and the bytes after the body."""
    body, size = b"", -1
    while size:
        line, end, data = data.partition(b"\r\n")
        if not end:
            return body + b"(cut off)", b""
        size = int(line, 16)
        body, data = body + data[:size], data[size + 2 :]
    return body, data


def data_first(frames: bytes) -> bytes:
    """Returns a WebSocket's frames with all data frames before all control frames. A server may send a control frame
    between any two data frames, so the comparison ignores the positions of control frames."""
    data, control = b"", b""
    while len(frames) > 1:
        length, begin = frames[1], 2
        if length > SHORT_BYTES:
            begin += 2
            length = int.from_bytes(frames[2:begin])
        size = begin + length
        if frames[0] & CONTROL:
            control += frames[:size]
        else:
            data += frames[:size]
        frames = frames[size:]
    return data + control + frames


def is_same(one: object, other: object) -> bool:
    """Whether two results are equal. Numbers may differ by RELATIVE."""
    first, second = json.dumps(one), json.dumps(other)
    if first == second:
        return True
    numbers = zip(NUMBER.findall(first), NUMBER.findall(second), strict=False)
    return NUMBER.sub("#", first) == NUMBER.sub("#", second) and all(
        math.isclose(float(a), float(b), rel_tol=RELATIVE) for a, b in numbers
    )


async def answers(numbers: Iterable[int], endpoint: Endpoint | None = None) -> list[Answered]:
    """Returns the answers to the cases with these numbers."""
    endpoint = endpoint or Endpoint()
    return [await endpoint.answer(number, make_case(SEED, number)) for number in numbers]


async def differences(recorded: Iterable[Answered]) -> list[tuple[Answered, Answered]]:
    """Returns the records from which the answers of this checkout differ, with these answers. A case whose answers
    differ is run again with a client that waits longer for more bytes."""
    endpoint = Endpoint()
    found = []
    for record in recorded:
        number = record["case"]
        case = make_case(SEED, number)
        if is_same(await endpoint.answer(number, case), record):
            continue
        again = await endpoint.answer(number, case, SURE_S)
        if not is_same(again, record):
            found.append((record, again))
    return found


def read(path: Path) -> list[Answered]:
    """Returns the answers in a file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, recorded: Iterable[Answered]) -> None:
    """Writes answers to a file."""
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        for one in recorded:
            file.write(json.dumps(one, separators=(",", ":")).encode() + b"\n")


def main() -> int:
    """Returns 1 if an answer differs from the record."""
    parser = argparse.ArgumentParser(prog="python -m tests.service.net.http_record", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE", default=RECORD)
    parser.add_argument("--cases", type=int, default=2000)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.write:
        write(options.write, asyncio.run(answers(range(options.cases))))
        return 0
    found = asyncio.run(differences(read(options.compare)))
    for record, now in found:
        print(f"case {record['case']}: {make_case(SEED, record['case'])}\n  record: {record}\n  now:    {now}")  # noqa: T201
    print(f"{len(found)} differences")  # noqa: T201
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
