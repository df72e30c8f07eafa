"""Compares routes of other protocols with Wane's own (native) routes for the same work.

    python -m benchmarks.protocols [--rounds N] [--seconds S] [--only NAME ...] [--json FILE] [--page FILE]

One server serves one model. `PAIRS` lists pairs of a protocol's route and a native route. Each round measures the two
routes of each pair one after the other. The order of the two routes changes from round to round. Each connection sends
its next request after the answer to the last one. Both routes do the same work: the same predictions, or continuations
of the same prompts by the same number of tokens. All processes share the machine.
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
from benchmarks.page import markdown, put
from benchmarks.summary import Spread, cpu, provenance, ratios, write_json
from tests.service.live_server import live_server

MODEL = "gated-stable"
BUNDLE = Path(__file__).parents[1] / "models" / "bundles" / MODEL
PAGE, FIGURES, NAME = Path("docs/benchmarks.md"), Path("docs/figures/protocols.json"), "protocols"
CONNECTIONS = (1, 32)
TOKENS = 64
LISTED = 16
PROMPTS, PROMPT_TOKENS, GENERATED = 32, 32, 64
# The number of different token sequences. Consecutive requests have different sequences, so that their answers differ.
SEQUENCES = 64
TIMEOUT_S = 30.0
COLUMNS = ("what", "connections", "native, a second", "protocol, a second", "protocol / native", "target")


@dataclass(frozen=True)
class Route:
    """A route of a server. `requests` are the requests as bytes. They are sent in order; after the last one, the first
    follows. The body of every valid answer contains `wanted`. `units` is the amount of work of one request, counted in
    the `unit` of the `Pair`. `connections` is the number of connections that the route uses; None for the number that
    the measurement sets."""

    path: str
    requests: Sequence[bytes]
    wanted: bytes
    units: int = 1
    connections: int | None = None


@dataclass(frozen=True)
class Pair:
    """A protocol's route and the native route with which it is compared. `unit` is the name of the unit in which the
    routes' `units` are counted. `target` is the smallest accepted ratio of the protocol's rate to the native rate.
    `connections` are the numbers of connections with which the pair is measured, one after another."""

    unit: str
    native: Route
    protocol: Route
    target: float
    connections: Sequence[int] = CONNECTIONS


def post(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a POST request for a keep-alive connection."""
    fields = {"host": "localhost", "content-type": "application/json", "content-length": len(body), **(headers or {})}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join((*lines, "", "")).encode() + body


def sequences() -> list[list[int]]:
    """Returns the token sequences from which the requests to all routes are made."""
    found: list[list[int]] = np.random.default_rng(0).integers(2, 2000, size=(SEQUENCES, TOKENS)).tolist()
    return found


def predict() -> Route:
    """Returns the native route for predictions, with its requests."""
    path = "/v1/predict"
    bodies = [json.dumps({"tokens": tokens, "top_k": LISTED}, separators=(",", ":")) for tokens in sequences()]
    return Route(path, [post(path, body.encode()) for body in bodies], b'"predictions"')


def infer() -> Route:
    """Returns the Open Inference Protocol's route for predictions. Its requests and answers have binary tensors, as
    with tritonclient."""
    path = f"/v2/models/{MODEL}/infer"
    tensor = {
        "name": "tokens",
        "shape": [1, TOKENS],
        "datatype": "INT64",
        "parameters": {"binary_data_size": 8 * TOKENS},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}
    bodies = [head + np.array(tokens, "<i8").tobytes() for tokens in sequences()]
    return Route(path, [post(path, body, headers) for body in bodies], b'"top_logprobs"')


def prompts() -> list[list[int]]:
    """Returns the prompts of the routes that `generate` and `complete` return."""
    return [sequence[:PROMPT_TOKENS] for sequence in sequences()[:PROMPTS]]


def generate() -> Route:
    """Returns the native route for generation, with one prompt per request."""
    path = "/v1/generate"
    bodies = [
        json.dumps({"tokens": prompt, "max_tokens": GENERATED, "seed": 1}, separators=(",", ":"))
        for prompt in prompts()
    ]
    return Route(path, [post(path, body.encode()) for body in bodies], b'"length"', units=GENERATED)


def complete() -> Route:
    """Returns OpenAI's route for completions, with all prompts in one request on one connection."""
    path = "/v1/completions"
    body = {"model": MODEL, "prompt": prompts(), "max_tokens": GENERATED, "seed": 1}
    request = post(path, json.dumps(body, separators=(",", ":")).encode())
    return Route(path, [request], b'"length"', units=PROMPTS * GENERATED, connections=1)


PAIRS: Mapping[str, Pair] = {
    "`infer` with binary tensors beside `/v1/predict`": Pair("requests", predict(), infer(), target=0.9),
    f"{PROMPTS} prompts in one request of `/v1/completions` beside {PROMPTS} connections of `/v1/generate`": Pair(
        "tokens", generate(), complete(), target=0.9, connections=(PROMPTS,)
    ),
}


def rate(port: int, route: Route, connections: int, seconds: float) -> float:
    """Sends the route's requests for `seconds`. Returns the route's rate in units per second. Raises BadAnswer if an
    answer lacks `route.wanted`, or if no answer arrives on any connection within TIMEOUT_S seconds."""
    connections = route.connections or connections
    opened = [connect(port) for _ in range(connections)]
    total, number = 0, 0
    with selectors.DefaultSelector() as selector:
        try:
            for one in opened:
                selector.register(one, selectors.EVENT_READ, HttpAnswers())
                one.sendall(route.requests[number % len(route.requests)])
                number += 1
            begun = time.perf_counter()
            waiting = connections
            while waiting:
                ready = selector.select(TIMEOUT_S)
                if not ready:
                    raise BadAnswer(f"{route.path} did not answer within {TIMEOUT_S:.0f} s")
                for key, _ in ready:
                    sender: Any = key.fileobj
                    body = key.data.receive(sender.recv(READ_AT_ONCE))
                    if body is None:
                        continue
                    if route.wanted not in body:
                        raise BadAnswer(f"{route.path} gave an unexpected answer: {body[:300]!r}")
                    total += route.units
                    if time.perf_counter() - begun < seconds:
                        sender.sendall(route.requests[number % len(route.requests)])
                        number += 1
                    else:
                        waiting -= 1
            return total / (time.perf_counter() - begun)
        finally:
            for one in opened:
                one.close()


def measure(names: Sequence[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns the figures of each pair at each number of connections."""
    rates: dict[tuple[str, int], dict[str, list[float]]] = {
        (name, connections): {"native": [], "protocol": []} for name in names for connections in PAIRS[name].connections
    }
    with live_server(WANE_BUNDLES=str(BUNDLE)) as server:
        port = int(server.url.rpartition(":")[2])
        for turn in range(rounds + 1):
            for (name, connections), found in rates.items():
                pair = PAIRS[name]
                sides = [("native", pair.native), ("protocol", pair.protocol)]
                for side, route in sides if turn % 2 else reversed(sides):
                    measured = rate(port, route, connections, seconds if turn else seconds / 4)
                    if turn:  # the first round is a warm-up
                        found[side].append(measured)
    return [
        {
            "pair": name,
            "unit": PAIRS[name].unit,
            "connections": connections,
            "native": {"route": PAIRS[name].native.path, "rate": Spread.of(found["native"])},
            "protocol": {"route": PAIRS[name].protocol.path, "rate": Spread.of(found["protocol"])},
            "ratio": ratios(found["protocol"], found["native"]),
            "target": PAIRS[name].target,
        }
        for (name, connections), found in rates.items()
    ]


def lines(document: Mapping[str, Any]) -> list[str]:
    """Returns a description of the measurement and the table, as lines of Markdown."""
    rows = []
    for one in document["pairs"]:
        spreads = [Spread.model_validate(found) for found in (one["native"]["rate"], one["protocol"]["rate"])]
        ratio = Spread.model_validate(one["ratio"])
        rates = [f"{spread:,.0f} {one['unit']}" for spread in spreads]
        rows.append((one["pair"], str(one["connections"]), *rates, f"{ratio:.2f}", f"{one['target']:.2f}"))
    return [f"{document['how']}:", "", *markdown(COLUMNS, rows)]


def main() -> None:
    """Measures all chosen pairs, and writes the requested files."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.protocols", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each route's measurement in each round")
    parser.add_argument("--only", nargs="+", choices=[*PAIRS], default=[*PAIRS], metavar="NAME")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    how = (
        f"{cpu()}, {os.cpu_count()} cores; `python -m benchmarks.protocols`, {options.rounds} rounds of "
        f"{options.seconds:g} s a route; median (least to most); `{MODEL}`; a prediction reads {TOKENS} tokens "
        f"and lists the {LISTED} most probable next tokens; a generation reads a prompt of {PROMPT_TOKENS} tokens and "
        f"generates {GENERATED} tokens"
    )
    found = measure(options.only, options.rounds, options.seconds)
    origin = provenance("benchmarks.protocols", "onnxruntime", "numpy", bundles=[MODEL])
    write_json(options.json, {**origin, "how": how, "pairs": found})
    document = json.loads(options.json.read_text(encoding="utf-8"))
    put(options.page, NAME, lines(document))
    print("\n".join(lines(document)))


if __name__ == "__main__":
    main()
