"""Compares batched completions with `/v1/generate`, in tokens a second.

    python -m benchmarks.completions [--rounds N] [--seconds S] [--json FILE]

One server with one model. Natively each of `PROMPTS` connections asks for one continuation at a time. By OpenAI's
protocol one connection asks for the completions of `PROMPTS` prompts in one request. Both continue the same prompts by
the same number of tokens, drawn with the same seed. In each round the two take turns, in an order that changes with the
round. All processes share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.connections import READ_AT_ONCE, BadAnswer, HttpAnswers, connect
from benchmarks.page import markdown
from benchmarks.summary import Spread, cpu, provenance, ratios, write_json
from tests.service.live_server import live_server

MODEL = "gated-stable"
BUNDLE = Path(__file__).parents[1] / "models" / "bundles" / MODEL
FIGURES = Path("docs/figures/completions.json")
PROMPTS, PROMPT_TOKENS, TOKENS = 32, 32, 64
TARGET = 0.9
TIMEOUT_S = 60.0
COLUMNS = ("what", "/v1/generate, tokens a second", "/v1/completions", "completions / generate", "target")


@dataclass(frozen=True)
class Route:
    """A route, its connections, the requests that they send in turn, and the tokens of one answer."""

    path: str
    connections: int
    requests: Sequence[bytes]
    tokens: int


def post(path: str, document: Mapping[str, object]) -> bytes:
    """Returns a POST over a keep-alive connection."""
    body = json.dumps(document, separators=(",", ":")).encode()
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(body)}", "", "")).encode() + body


def prompts() -> list[list[int]]:
    """Returns the prompts that both routes continue."""
    found: list[list[int]] = np.random.default_rng(0).integers(2, 2000, size=(PROMPTS, PROMPT_TOKENS)).tolist()
    return found


def generate() -> Route:
    """The native route, one prompt a request."""
    bodies = [{"model": MODEL, "tokens": one, "max_tokens": TOKENS, "seed": 1} for one in prompts()]
    return Route("/v1/generate", PROMPTS, [post("/v1/generate", body) for body in bodies], TOKENS)


def complete() -> Route:
    """OpenAI's route, all prompts in one request."""
    body = {"model": MODEL, "prompt": prompts(), "max_tokens": TOKENS, "seed": 1}
    return Route("/v1/completions", 1, [post("/v1/completions", body)], PROMPTS * TOKENS)


def rate(port: int, route: Route, seconds: float) -> float:
    """Returns a route's tokens a second. Raises BadAnswer."""
    opened = [connect(port) for _ in range(route.connections)]
    answers, number = 0, 0
    with selectors.DefaultSelector() as selector:
        try:
            for one in opened:
                selector.register(one, selectors.EVENT_READ, HttpAnswers())
                one.sendall(route.requests[number % len(route.requests)])
                number += 1
            begun, waiting = time.perf_counter(), len(opened)
            while waiting:
                ready = selector.select(TIMEOUT_S)
                if not ready:
                    raise BadAnswer(f"{route.path} did not answer within {TIMEOUT_S:.0f} s")
                for key, _ in ready:
                    connection: Any = key.fileobj
                    body = key.data.receive(connection.recv(READ_AT_ONCE))
                    if body is None:
                        continue
                    if b'"length"' not in body:
                        raise BadAnswer(f"{route.path} answered {body[:200]!r}")
                    answers += 1
                    if time.perf_counter() - begun < seconds:
                        connection.sendall(route.requests[number % len(route.requests)])
                        number += 1
                    else:
                        waiting -= 1
            return answers * route.tokens / (time.perf_counter() - begun)
        finally:
            for one in opened:
                one.close()


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of both routes."""
    routes, rates = (generate(), complete()), dict[str, list[float]]()
    with live_server(WANE_BUNDLES=str(BUNDLE)) as server:
        port = int(server.url.rpartition(":")[2])
        for turn in range(rounds + 1):
            for route in routes if turn % 2 else reversed(routes):
                measured = rate(port, route, seconds if turn else seconds / 4)
                if turn:  # the first is for warming up
                    rates.setdefault(route.path, []).append(measured)
    native, protocol = (rates[route.path] for route in routes)
    return {
        "native": Spread.of(native),
        "protocol": Spread.of(protocol),
        "ratio": ratios(protocol, native),
        "target": TARGET,
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """Returns the table with a description of the measurement."""
    native, protocol, ratio = (Spread.model_validate(document[name]) for name in ("native", "protocol", "ratio"))
    row = (f"{PROMPTS} prompts", f"{native:,.0f}", f"{protocol:,.0f}", f"{ratio:.2f}", f"{document['target']:.2f}")
    return [f"{document['how']}:", "", *markdown(COLUMNS, [row])]


def main() -> None:
    """Measures, and writes the requested file."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.completions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each route's turn")
    parser.add_argument("--json", type=Path, default=FIGURES)
    options = parser.parse_args()
    how = (
        f"{cpu()}, {os.cpu_count()} cores; `python -m benchmarks.completions`, {options.rounds} rounds of "
        f"{options.seconds:g} s a route; median (least to most); `{MODEL}`, {PROMPT_TOKENS} tokens a prompt, {TOKENS} "
        "generated"
    )
    found = measure(options.rounds, options.seconds)
    origin = provenance("benchmarks.completions", "onnxruntime", "numpy", bundles=[MODEL])
    write_json(options.json, {**origin, "how": how, **found})
    print("\n".join(lines(json.loads(options.json.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
