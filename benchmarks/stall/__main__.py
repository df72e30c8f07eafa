"""Measures how long one request holds the event loop, with the largest requests that the limits allow.

    python -m benchmarks.stall [--share F] [--only TEXT] [--most MS] [--json FILE]

One server runs with default settings, a model of text and a model of events with a vocabulary of 100,000 and a cache. A
separate process steps a session, one step after another, and reads for each step the processor time that the thread of
the server's event loop has used (/proc/.../schedstat), which does not depend on how busy the machine is. The server
measures the longest single turn of its loop (`turns.py`). Meanwhile the requests of `largest.py` are sent, which follow
from the server's OpenAPI description, and the bodies below, which are expensive to decode. `--share` sends a part of
them, the same one each time. The exit status is 1 if a turn took more than `--most` milliseconds. Needs the extra
`train`.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from zlib import crc32

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.bench.contenders import Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.events.__main__ import export, item
from benchmarks.stall.largest import SESSION, Case, Subject, cases
from benchmarks.stall.turns import Longest
from benchmarks.summary import provenance, write_json
from tests.models.caches import random_cache

SHIPPED = Path("models/bundles/gated-stable-64")
TEXT, SHOP, ITEMS, HIDDEN = SHIPPED.name, "shop", 100_000, 16
CACHE = random_cache(random.Random(0), 512)
LIMIT = 4 * 2**20  # the server's max_body_bytes
SETTLE_S = 0.02
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
        "/v2/repository/models/absent/unload",
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


def http(method: str, path: str, body: bytes, timeout_ms: int = 60_000) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: wane\r\ncontent-type: application/json\r\n"
        f"x-request-timeout-ms: {timeout_ms}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def handshake(path: str) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nhost: wane\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n"
    ).encode()


def probe(port: int, pid: int, results: Connection) -> None:
    """Steps a session for ever. When `results` has a message, sends a list to `results`: for each step since the last
    message, when it began and ended, and the processor time in seconds that the loop's thread used meanwhile."""
    connection = Connected(port)
    step = http("POST", "/v1/sessions/probed/tokens", b'{"tokens":[5]}')
    spent = Path(f"/proc/{pid}/task/{pid}/schedstat")
    taken: list[tuple[float, float, float]] = []
    before = int(spent.read_text().split()[0])
    while True:
        begun = time.monotonic()
        connection.ask(step)
        after = int(spent.read_text().split()[0])
        taken.append((begun, time.monotonic(), (after - before) / 1e9))
        before = after
        if results.poll():
            results.recv()
            results.send(taken)
            taken = []
        time.sleep(0.001)


@dataclass(frozen=True)
class Found:
    """The figures of one request. answer_ms: the time until the answer. turn_ms: the processor time of the longest turn
    of the event loop. collector_ms: the part of that turn in which garbage was collected. loop_ms: the most processor
    time that the loop's thread used in one step of the other session, in all turns. step_ms: the longest step. rss_mb:
    the server's memory after the answer."""

    route: str
    name: str
    answered: str
    answer_ms: float
    turn_ms: float
    collector_ms: float
    loop_ms: float
    step_ms: float
    rss_mb: float


def once(port: int, case: Case, timeout_ms: int) -> str:
    """Sends a request on a new connection. Returns the status of the answer, or the result of `message` for a
    WebSocket. Returns `cut off` if the server closes the connection without an answer."""
    connection = Connected(port)
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body, separators=(",", ":")).encode()
    try:
        if case.path != STREAM:
            return str(connection.ask(http(case.method, case.path, body, timeout_ms)))
        assert connection.ask(handshake(case.path)) == 101
        return connection.message(body)
    except (ConnectionError, IndexError):
        return "cut off"
    finally:
        connection.close()


def chosen(server: ServerProcess, share: float, only: str) -> list[Case]:
    """Returns the requests to send."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        document = client.get("/openapi.json").json()
        served = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        subjects = [
            Subject(name, served[name]["model_version"], served[name]["parameters"]["vocabulary_size"], names)
            for name, names in ((TEXT, []), (SHOP, [item(index) for index in range(ITEMS)]))
        ]
        for subject in subjects:
            for session in (SESSION, *(f"{SESSION}-{subject.name}-{index}" for index in range(256))):
                client.post(SESSIONS, json={"session": session, "model": subject.name})
            client.post(SESSIONS, json={"session": f"{SESSION}-{subject.name}", "model": subject.name})
        for session in ("probed", "streamed", *(f"s{one}" for one in range(256))):
            client.post(SESSIONS, json={"session": session, "model": TEXT})
    found = [Case(path, f"decoding: {name}", "POST", path, make()) for name, (path, make) in BODIES.items()]
    found += cases(document, subjects)
    found = [one for one in found if only in f"{one.route} {one.name}"]
    whole = {one.route: one for one in found}.values()  # every route has at least one request in every share
    return [one for one in found if one in whole or crc32(f"{one.route} {one.name}".encode()) / 2**32 < share]


def measure(server: ServerProcess, wanted: Sequence[Case], timeout_ms: int, longest: Longest) -> Iterator[Found]:
    pid = server.pid
    ours, theirs = multiprocessing.Pipe()
    prober = multiprocessing.Process(target=probe, args=(server.port, pid, theirs), daemon=True)
    prober.start()
    for case in track(wanted, "requests", console=Console(stderr=True)):
        ours.send(None)
        ours.recv()
        longest.write(0.0, 0.0)
        begun = time.monotonic()
        answered = once(server.port, case, timeout_ms)
        ended = time.monotonic()
        time.sleep(SETTLE_S)
        ours.send(None)
        taken: list[tuple[float, float, float]] = ours.recv()
        turn_s, collector_s = longest.read()
        status = Path(f"/proc/{pid}/status").read_text()
        yield Found(
            case.route,
            case.name,
            answered,
            1e3 * (ended - begun),
            1e3 * turn_s,
            1e3 * collector_s,
            1e3 * max(loop for _, _, loop in taken),
            1e3 * max(end - start for start, end, _ in taken),
            int(status.partition("VmRSS:")[2].split()[0]) / 1e3,
        )
    prober.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="the share of the requests that are sent")
    parser.add_argument("--only", default="", metavar="TEXT", help="send only requests whose name has this text")
    parser.add_argument("--timeout-ms", type=int, default=2000, help="the timeout of each request")
    parser.add_argument("--most", type=float, metavar="MS", help="the longest accepted turn of the loop")
    parser.add_argument("--json", type=Path, help="output file for the figures")
    given = parser.parse_args()
    table = Table(
        title="Milliseconds. turn: the processor time of the loop's longest turn, gc: the garbage collections in it, "
        "loop: the most processor time of the loop's thread in one step of a session"
    )
    for heading in ("route", "requests", "worst request", "answered", "after", "turn", "gc", "loop", "step", "MB"):
        table.add_column(heading, justify="left" if heading in ("route", "worst request") else "right")
    with tempfile.TemporaryDirectory() as scratch:
        bundles = Path(scratch) / "bundles"
        (bundles / TEXT).parent.mkdir(parents=True)
        (bundles / TEXT).symlink_to(SHIPPED.resolve(), target_is_directory=True)
        export(bundles, ITEMS, HIDDEN, SHOP, "float32", cache=CACHE)
        turns = Path(scratch) / "turns"
        longest = Longest(turns)
        options = ("--bundles={bundle}", "--port={ports[0]}", "--log-level=warning")
        command = ("{bin}/python", "-m", "benchmarks.stall.turns", str(turns), "serve", *options)
        contender = Contender("wane", "Wane", "wane", command, environment={"WANE_DEFAULT_MODEL": TEXT})
        with ServerProcess(contender, bundles, Path(scratch) / "server.log") as server:
            server.wait_ready(PREDICT, json.dumps({"model": SHOP, "tokens": [5]}))
            found = [*measure(server, chosen(server, given.share, given.only), given.timeout_ms, longest)]
    routes = sorted({one.route for one in found}, key=lambda route: -max(o.turn_ms for o in found if o.route == route))
    for route in routes:
        all_of = [one for one in found if one.route == route]
        worst = max(all_of, key=lambda one: one.turn_ms)
        loop_ms, step_ms = max(one.loop_ms for one in all_of), max(one.step_ms for one in all_of)
        figures = (worst.answer_ms, worst.turn_ms, worst.collector_ms, loop_ms, step_ms, worst.rss_mb)
        table.add_row(route, str(len(all_of)), worst.name, worst.answered, *(f"{figure:.1f}" for figure in figures))
    Console(width=200).print(table)
    if given.json is not None:
        write_json(given.json, {**provenance("benchmarks.stall"), "requests": [asdict(one) for one in found]})
    if given.most is not None and any(one.turn_ms > given.most for one in found):
        raise SystemExit(f"a turn of the loop took more than {given.most:g} ms of processor time")


if __name__ == "__main__":
    main()
