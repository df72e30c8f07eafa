"""Measures how long one request delays other requests, with the most expensive bodies within the byte limit.

    python -m benchmarks.stall [--repeat N] [--only NAME ...] [--json FILE]

One server runs with default settings and one model. A separate process measures the latencies of two requests in turn:
a one-token step of a session, and /healthz, which needs only the event loop. Meanwhile each kind of body is sent
several times, one request after another. Before each kind of body, no body is sent for QUIET_S seconds. The latencies
during this time are the baseline.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bench.contenders import Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.summary import provenance, write_json

BUNDLE = Path("models/bundles/gated-stable")
LIMIT = 4 * 2**20  # the server's max_body_bytes
QUIET_S = 1.0
SETTLE_S = 0.2
SCORED = 262_144
VOCABULARY = 2048
PREDICT, COMPARE, SCORE, GENERATE = "/v1/predict", "/v1/compare", "/v1/score", "/v1/generate"
SESSIONS, STEPS, INDEX = "/v1/sessions", "/v1/sessions/tokens", "/v2/repository/index"
STREAM = "/v1/sessions/streamed/stream"

Body = Callable[[], bytes]


def filled(before: bytes, item: bytes, after: bytes, size: int = LIMIT) -> bytes:
    """Returns a body of at most `size` bytes: `before`, copies of `item` separated by commas, and `after`."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


def text(piece: bytes) -> bytes:
    """Returns a body whose `input` is one string, which repeats `piece` up to the byte limit."""
    return b'{"input":"' + piece * ((LIMIT - 12) // len(piece)) + b'"}'


def ids(count: int) -> str:
    generator = random.Random(7)
    return ",".join(str(generator.randrange(VOCABULARY)) for _ in range(count))


def batch(count: int, tokens: int) -> bytes:
    return ('{"inputs":[' + ",".join(f"[{ids(tokens)}]" for _ in range(count)) + "]}").encode()


def steps(count: int, rest: str) -> bytes:
    return ('{"steps":[' + ",".join(f'{{"session":"s{one}",{rest}}}' for one in range(count)) + "]}").encode()


BODIES: dict[str, tuple[str, Body]] = {
    "steps": (STEPS, lambda: filled(b'{"steps":[', b'{"session":"s","tokens":[1]}', b"]}")),
    "steps, empty": (STEPS, lambda: filled(b'{"steps":[', b"{}", b"]}")),
    "inputs, texts": (PREDICT, lambda: filled(b'{"inputs":[', b'"a"', b"]}")),
    "inputs, empty lists": (PREDICT, lambda: filled(b'{"inputs":[', b"[]", b"]}")),
    "tokens, ints": (PREDICT, lambda: filled(b'{"tokens":[', b"5", b"]}")),
    "tokens, floats": (PREDICT, lambda: filled(b'{"tokens":[', b"0.5", b"]}")),
    "tokens, lists": (PREDICT, lambda: filled(b'{"tokens":[', b"[]", b"]}")),
    "tokens, objects": (PREDICT, lambda: filled(b'{"tokens":[', b"{}", b"]}")),
    "tokens, strings": (PREDICT, lambda: filled(b'{"tokens":[', b'"0123456789"', b"]}")),
    "tokens, 4,000 digits each": (PREDICT, lambda: filled(b'{"tokens":[', b"9" * 4000, b"]}")),
    "one long number": (PREDICT, lambda: b'{"tokens":[1],"top_k":' + b"9" * (LIMIT - 30) + b"}"),
    "nested 150 deep": (PREDICT, lambda: filled(b'{"tokens":[', b"[" * 150 + b"]" * 150, b"]}")),
    "nested without end": (PREDICT, lambda: b"[" * LIMIT),
    "unknown fields": (PREDICT, lambda: b"{" + b",".join(b'"%d":1' % one for one in range(380_000)) + b"}"),
    "one field, repeated": (PREDICT, lambda: filled(b'{"tokens":[1],', b'"top_k":1', b"}")),
    "blanks": (PREDICT, lambda: b" " * LIMIT),
    "windows": (COMPARE, lambda: filled(b'{"tokens":[1],"windows":[', b"1", b"]}")),
    "models": (COMPARE, lambda: filled(b'{"tokens":[1],"models":[', b'"a"', b"]}")),
    "stop": (GENERATE, lambda: filled(b'{"tokens":[1],"stop":[', b'"a"', b"]}")),
    "creation of a session, one field repeated": (SESSIONS, lambda: filled(b"{", b'"mode":null', b"}")),
    "index of models, one field repeated": (INDEX, lambda: filled(b"{", b'"ready":true', b"}")),
    "unloading a model, unknown parameters": (
        "/v2/repository/models/gated-stable/unload",
        lambda: b'{"parameters":{' + b",".join(b'"%d":1' % one for one in range(380_000)) + b"}}",
    ),
    "text, letters": (PREDICT, lambda: text(b"a quick brown fox ")),
    "text, one word": (PREDICT, lambda: text(b"q")),
    "text, emoji": (PREDICT, lambda: text("\U0001f9ea".encode())),
    "text, line breaks": (PREDICT, lambda: text(b"\\n")),
    "text, quotes": (PREDICT, lambda: text(b'\\"')),
    "text of square brackets, to be scored": (SCORE, lambda: text(b"[a],{:} ")),
    "text of 2 MB, to be scored": (SCORE, lambda: b'{"input":"' + b"q" * 2_000_000 + b'"}'),
    "text of 500 KB": (PREDICT, lambda: b'{"input":"' + b"q" * 500_000 + b'"}'),
    "message: numbers": (STREAM, lambda: filled(b'{"tokens":[', b"5", b"]}")),
    "message: lists": (STREAM, lambda: filled(b'{"tokens":[', b"[]", b"]}")),
    "valid: 256 texts": (PREDICT, lambda: filled(b'{"inputs":[', b'"%s"' % (b"the history of " * 10), b"]}", 39_000)),
    "valid: 256 inputs of 1,000": (PREDICT, lambda: batch(256, 1000)),
    "valid: 256 steps, top_k 100": (STEPS, lambda: steps(256, '"tokens":[5],"top_k":100')),
    "valid: 65,536 tokens": (PREDICT, lambda: f'{{"tokens":[{ids(65_536)}]}}'.encode()),
    "valid: 262,144 to score": (SCORE, lambda: f'{{"tokens":[{ids(SCORED)}]}}'.encode()),
}


class Connected:
    """A keep-alive connection to the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> int:
        """Reads one complete answer and returns its status."""
        status = int(self._file.readline().split()[1])
        length = 0
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self._file.read(length)
        return status

    def ask(self, request: bytes) -> int:
        self.send(request)
        return self.answer()

    def message(self, data: bytes) -> str:
        """Sends a message on a WebSocket. Returns the status of the error in the answer, or `closed` and the close
        code."""
        self.send(b"\x81\xff" + len(data).to_bytes(8, "big") + bytes(4) + data)
        first, second = self._file.read(2)
        length = second & 0x7F
        if length > 125:
            length = int.from_bytes(self._file.read(2 if length == 126 else 8), "big")
        said = self._file.read(length)
        if first & 0x0F == 8:
            return f"closed {int.from_bytes(said[:2], 'big')}"
        return str(json.loads(said)["error"]["status"])


def post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: wane\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def handshake(path: str) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nhost: wane\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n"
    ).encode()


def probe(port: int, results: Connection) -> None:
    """Sends a step and a request to /healthz in turn, until `results` has a message. Then sends a list to `results`.
    For each pair of a step and a request to /healthz, the list has the start time of the step and the latencies of the
    two requests, in seconds."""
    connection = Connected(port)
    step = post("/v1/sessions/probed/tokens", b'{"tokens":[5]}')
    health = b"GET /healthz HTTP/1.1\r\nhost: wane\r\n\r\n"
    taken: list[tuple[float, float, float]] = []
    while not results.poll():
        begun = time.monotonic()
        connection.ask(step)
        between = time.monotonic()
        connection.ask(health)
        taken.append((begun, between - begun, time.monotonic() - between))
        time.sleep(0.001)
    results.send(taken)


@dataclass(frozen=True)
class Found:
    """The figures of one kind of body, in milliseconds. answered: the answers to the body. answer_ms: the median time
    until the answer. quiet_p50_ms, quiet_max_ms: the latencies of steps while no body was sent. step_p50_ms,
    step_max_ms: the latencies of steps while this body was sent. loop_max_ms: the longest latency of /healthz while
    this body was sent.
    """

    body: str
    answered: str
    answer_ms: float
    quiet_p50_ms: float
    quiet_max_ms: float
    step_p50_ms: float
    step_max_ms: float
    loop_max_ms: float


def once(port: int, path: str, body: bytes) -> str:
    """Sends a body on a new connection. Returns the status of the answer, or the result of `message` for a WebSocket.
    Returns `cut off` if the server closes the connection without an answer."""
    connection = Connected(port)
    try:
        if path != STREAM:
            return str(connection.ask(post(path, body)))
        assert connection.ask(handshake(path)) == 101
        return connection.message(body)
    except (ConnectionError, IndexError):
        return "cut off"
    finally:
        connection.close()


def measure(server: ServerProcess, wanted: list[str], repeat: int) -> Iterator[Found]:
    client = Connected(server.port)
    for session in ("probed", "streamed", *(f"s{one}" for one in range(256))):
        client.ask(post(SESSIONS, json.dumps({"session": session}).encode()))
    client.close()
    for name in wanted:
        path, make = BODIES[name]
        body = make()
        ours, theirs = multiprocessing.Pipe()
        prober = multiprocessing.Process(target=probe, args=(server.port, theirs))
        prober.start()
        time.sleep(QUIET_S + SETTLE_S)
        spans: list[tuple[float, float]] = []
        answers: set[str] = set()
        begun = time.monotonic()
        for _ in range(repeat):
            asked = time.monotonic()
            answers.add(once(server.port, path, body))
            spans.append((asked, time.monotonic()))
            time.sleep(SETTLE_S)
        ours.send(None)
        taken = ours.recv()
        prober.join()
        quiet = [step for at, step, _ in taken if begun - QUIET_S < at and at + step < begun]
        busy = [one for one in taken if any(one[0] <= end and sum(one) >= start for start, end in spans)]
        yield Found(
            name,
            " ".join(sorted(answers)),
            1e3 * statistics.median(end - start for start, end in spans),
            1e3 * statistics.median(quiet),
            1e3 * max(quiet),
            1e3 * statistics.median(step for _, step, _ in busy),
            1e3 * max(step for _, step, _ in busy),
            1e3 * max(loop for _, _, loop in busy),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="number of times that each body is sent")
    parser.add_argument("--only", nargs="+", default=list(BODIES), choices=list(BODIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="output file for the figures")
    given = parser.parse_args()
    table = Table(title="All times in milliseconds. quiet: latency of steps while no body is sent")
    for heading in ("body", "answered", "after", "quiet p50", "max", "step p50", "max", "/healthz max"):
        table.add_column(heading, justify="left" if heading == "body" else "right")
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as scratch:
        command = (
            "{bin}/wane",
            "serve",
            "--bundles={bundle}",
            "--port={ports[0]}",
            "--log-level=warning",
        )
        with ServerProcess(Contender("wane", "Wane", "wane", command), BUNDLE, Path(scratch) / "server.log") as server:
            server.wait_ready(PREDICT, '{"tokens":[5]}')
            for one in measure(server, given.only, given.repeat):
                found.append(one)
                _, answered, *figures = asdict(one).values()
                table.add_row(one.body, answered, *(f"{figure:.1f}" for figure in figures))
    Console(width=140).print(table)
    if given.json is not None:
        write_json(given.json, {**provenance("benchmarks.stall"), "bodies": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()
