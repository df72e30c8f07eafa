"""Measures the memory that a server keeps after expensive requests.

    python -m benchmarks.stall.memory

Each attack is sent three times to one server with the models of `__main__.py`, and with default settings but a longer
timeout. Prints the server's resident memory before the first time and after each time.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.contenders import Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.events.__main__ import export, item
from benchmarks.stall.__main__ import (
    CACHE,
    HIDDEN,
    ITEMS,
    PREDICT,
    SCORE,
    SCORED,
    SESSIONS,
    SHIPPED,
    SHOP,
    STEPS,
    STREAM,
    TEXT,
    Connected,
    handshake,
    http,
)

TIMES, PARALLEL, LOADS, SETTLE_S, TIMEOUT_S = 3, 4, 4, 2.0, 600
LOADED = [f"{TEXT}-{index}" for index in range(TIMES * LOADS)]
NAMES = [item(index) for index in range(9_999)]
LISTED: dict[str, Any] = {"model": TEXT, "prompt": [7] * 2600, "max_tokens": 0, "echo": True, "logprobs": 100}
STEPPED: list[dict[str, Any]] = [{"session": f"s{index}", "tokens": [5], "create": True} for index in range(256)]
TENSOR: dict[str, Any] = {"name": "tokens", "shape": [32, 1], "datatype": "INT64", "data": [[5]] * 32}


def post(port: int, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)
    assert answer.status_code in (200, 201, 413), f"{path} is answered {answer.status_code}: {answer.text[:500]}"


def together(send: Callable[[int], None], port: int) -> None:
    """Sends the same request on PARALLEL connections."""
    with ThreadPoolExecutor(PARALLEL) as threads:
        for sent in [threads.submit(send, port) for _ in range(PARALLEL)]:
            sent.result()


def failing_messages(port: int) -> None:
    connection = Connected(port)
    connection.ask(handshake(STREAM))
    for _ in range(2000):
        connection.message(b"{}}")
    connection.close()


def pipelined(port: int) -> None:
    connection, count = Connected(port), 20_000
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(connection.send, http("GET", "/n", b"") * count)
        for _ in range(count):
            connection.answer()
        sent.result()
    connection.close()


def loads(port: int, names: Iterator[str]) -> None:
    for name in islice(names, LOADS):
        for change in ("load", "unload"):
            post(port, f"/v2/repository/models/{name}/{change}", {})


def scrapes(port: int) -> None:
    connection = Connected(port)
    for _ in range(20):
        connection.ask(http("GET", "/metrics", b""))
    connection.close()


ATTACKS: dict[str, Callable[[int], None]] = {
    "completion that lists 100 tokens for 2,600 of its prompt": lambda port: post(port, "/v1/completions", LISTED),
    "256 such samples (refused)": lambda port: post(port, "/v1/completions", {**LISTED, "n": 256}),
    "text of 4 MB to tokenise (refused)": lambda port: post(port, "/tokenize", {"prompt": "a b " * 1_000_000}),
    "failing messages on 4 WebSockets": lambda port: together(failing_messages, port),
    "20,000 requests at once on one connection": pipelined,
    "completion of 64 samples, 100,000 events": lambda port: post(
        port, "/v1/completions", {"model": SHOP, "prompt": [5], "n": 64, "max_tokens": 1, "logprobs": 5}
    ),
    "256 inputs with 9,999 candidates and excluded events": lambda port: post(
        port, PREDICT, {"model": SHOP, "inputs": [[5]] * 256, "candidates": NAMES, "exclude": NAMES}
    ),
    "logits of 32 rows as JSON, 100,000 events": lambda port: post(
        port, f"/v2/models/{SHOP}/infer", {"inputs": [TENSOR], "outputs": [{"name": "logits"}]}
    ),
    "4 calls of 256 steps": lambda port: together(lambda port: post(port, STEPS, {"steps": STEPPED}), port),
    "4 pollers of the metrics": lambda port: together(scrapes, port),
    "4 scores of 262,144 tokens": lambda port: together(lambda port: post(port, SCORE, {"tokens": [5] * SCORED}), port),
}


def resident_mb(pid: int) -> float:
    time.sleep(SETTLE_S)
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024 / 1e6  # it has KiB


def main() -> None:
    print("Resident memory of the server in MB: before each attack, after it was sent 1, 2 and 3 times, last / before")
    with tempfile.TemporaryDirectory() as scratch:
        bundles = Path(scratch) / "bundles"
        shutil.copytree(SHIPPED, bundles / TEXT)
        export(bundles, ITEMS, HIDDEN, SHOP, "float32", cache=CACHE)
        options = ("--bundles={bundle}", "--port={ports[0]}", "--log-level=warning")
        # On a slow machine, the default timeout would refuse some of the scores.
        environment = {"WANE_DEFAULT_MODEL": TEXT, "WANE_REQUEST_TIMEOUT_MS": str(1000 * TIMEOUT_S)}
        contender = Contender("wane", "Wane", "wane", ("{bin}/wane", "serve", *options), environment=environment)
        with ServerProcess(contender, bundles, Path(scratch) / "server.log") as server:
            server.wait_ready(PREDICT, json.dumps({"model": SHOP, "tokens": [5]}))
            post(server.port, SESSIONS, {"session": "streamed"})
            for name in LOADED:  # after the start, because the server loads all models of the folder then
                shutil.copytree(SHIPPED, bundles / name)
                manifest = bundles / name / "manifest.json"
                manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "name": name}))
            names = iter(LOADED)

            def load(port: int) -> None:
                loads(port, names)

            attacks = {**ATTACKS, f"{LOADS} models loaded and unloaded": load}
            for name, attack in attacks.items():
                found = [resident_mb(server.pid)]
                for _ in range(TIMES):
                    attack(server.port)
                    found.append(resident_mb(server.pid))
                figures = [f"{one:.0f}" for one in found] + [f"{found[-1] / found[0]:.2f}"]
                print(f"{name:60}", *(f"{one:>6}" for one in figures), flush=True)


if __name__ == "__main__":
    main()
