"""Measures the latency of a session's steps with a model of 50,000 items, over one connection.

    python -m benchmarks.events [--items N] [--hidden N] [--rounds N] [--steps N] [--json FILE]

The model is a GRU with the architecture of GRU4Rec and random weights. Its predictions are noise, and a step costs the
same as a step of a trained model. A step appends one event to a session, and its answer lists the most probable next
events. Each request is sent after the answer to the previous request. The baseline runs the same graph once per event
with ONNX Runtime in this process, and finds the largest logits with numpy. It uses no session and no HTTP. Each round
measures the baseline and then each kind of step. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models

from benchmarks.bench.connections import READ_AT_ONCE, BadAnswer, HttpAnswers, connect, http_request
from benchmarks.summary import Spread, provenance, write_json
from tests.service.live_server import LiveServer, live_server
from wane.models.architecture import Architecture
from wane.models.bundle import Bundle
from wane.models.export.export import export_bundle
from wane.models.layer_registry import Gru
from wane.models.manifest import CacheModel, Precision, Provenance
from wane.models.networks import Network
from wane.models.vocabulary import EOS, UNK
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import NEXT

NAME, INT8 = "shop", "shop-int8"
SEED = 0
WINDOW, MAX_WINDOW = 32, 128
SAMPLE_TOKENS = 1024
TARGET_MS = 2.0
"""The largest accepted p50 of a step whose answer lists 20 events, in milliseconds, on a machine with two cores and no
other load."""

WARM_UP = 50  # steps that are not measured, at the beginning of every round
BASELINE = "ONNX Runtime and numpy, top 20"


class Kind(NamedTuple):
    """A measured kind of steps. fields: the fields of the request body in addition to `events`. model: the model that
    answers. threads: the number of threads of the server's graphs."""

    fields: Mapping[str, Any]
    model: str = NAME
    threads: int = 1


STEPS: Mapping[str, Kind] = {
    "top 5": Kind({}),
    "top 20": Kind({"top_k": 20}),
    "top 20, two threads": Kind({"top_k": 20}, threads=2),
    "top 20, int8 weights": Kind({"top_k": 20}, model=INT8),
    "top 20, exclude_seen": Kind({"top_k": 20, "exclude_seen": True}),
    "top 20 of 1,000 candidates": Kind({"top_k": 20, "candidates": range(1000)}),
}
"""The measured kinds of steps by name. The model INT8 has the same weights as NAME, as int8 numbers."""


def export(
    folder: Path, items: int, hidden: int, name: str, precision: Precision, cache: CacheModel | None = None
) -> Path:
    """Writes the bundle `folder`/`name`, which may have a cache, and returns the bundle's path. Raises ExportError if a
    graph does not compute the same values as the network."""
    architecture = Architecture(vocabulary_size=items + 2, embedding=hidden, layers=(Gru(units=hidden),), tied=False)
    torch.manual_seed(SEED)
    network = Network(architecture).eval().requires_grad_(False)
    names = [EOS, UNK, *map(item, range(items))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=UNK))
    export_bundle(
        folder / name,
        architecture=architecture,
        weights={name: tensor.numpy() for name, tensor in network.weights().items()},
        vocabulary_kind="events",
        tokenizer_json=str(tokenizer.to_str()),
        name=name,
        version="1",
        description="A GRU with random weights, for benchmarks",
        window=WINDOW,
        max_window=MAX_WINDOW,
        quality=None,
        provenance=Provenance(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command="python -m benchmarks.events",
            config={"items": items, "hidden": hidden},
            seed=SEED,
            steps=0,
            best_step=0,
            git_commit=None,
            data={},
            versions={"torch": torch.__version__, "numpy": np.__version__},
            hardware="none",
            train_wall_s=0.0,
        ),
        sample_tokens=np.random.default_rng(SEED).integers(items, size=SAMPLE_TOKENS).tolist(),
        torch_network=network,
        precision=precision,
        unknown="skip",
        cache=cache,
    )
    return folder / name


def item(index: int) -> str:
    """Returns the name of an item."""
    return f"item/{index:05}"


def clicked(items: int, count: int, seed: int) -> list[int]:
    """Returns `count` random indexes of items. A few items occur much more often than the others."""
    found: list[int] = (np.random.default_rng(seed).zipf(1.3, count) % items).tolist()
    return found


def bodies(name: str, items: int, count: int, seed: int) -> Iterator[str]:
    """Yields the request bodies of `count` steps of the kind `name`, a key of STEPS."""
    fields = dict(STEPS[name].fields)
    if "candidates" in fields:
        fields["candidates"] = [item(index) for index in fields["candidates"]]
    for index in clicked(items, count, seed):
        yield json.dumps({"events": [item(index)], **fields}, separators=(",", ":"))


def measured_steps(port: int, session: str, requests: Sequence[bytes]) -> list[float]:
    """Sends the requests of one session over one connection. Returns the latency of each request after the first
    WARM_UP requests, in seconds. Raises BadAnswer if a step fails."""
    taken: list[float] = []
    with connect(port) as connection:
        answers = HttpAnswers()
        for number, request in enumerate(requests):
            begun = time.perf_counter()
            connection.sendall(request)
            body: bytes | None = None
            while body is None:
                body = answers.receive(connection.recv(READ_AT_ONCE))
            taken.append(time.perf_counter() - begun)
            if f'"position":{number + 1},'.encode() not in body:
                raise BadAnswer(f"step {number} of session {session} got an unexpected answer: {body[:300]!r}")
    return taken[WARM_UP:]


def measured_runs(runner: OnnxRunner, hidden: int, tokens: Sequence[int], listed: int) -> list[float]:
    """Runs the step graph for each token in this process, and finds the `listed` largest logits. Returns the time of
    each run after the first WARM_UP runs, in seconds."""
    taken: list[float] = []
    state = {"layers.0.h": np.zeros((1, hidden), np.float32)}
    for token in tokens:
        begun = time.perf_counter()
        outputs = runner.run("step", {"tokens": np.array([token]), **state})
        logits = outputs["logits"][0]
        near = np.argpartition(logits, -listed)[-listed:]
        near[np.argsort(-logits[near])]
        taken.append(time.perf_counter() - begun)
        state = {name: outputs[NEXT + name] for name in state}
    return taken[WARM_UP:]


def measure(items: int, hidden: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Returns the p50 and the p99, in milliseconds, of each kind of step and of the baseline."""
    found: dict[str, list[list[float]]] = {name: [] for name in (BASELINE, *STEPS)}
    with tempfile.TemporaryDirectory() as folder:
        path = export(Path(folder), items, hidden, NAME, "float32")
        export(Path(folder), items, hidden, INT8, "int8")
        runner = OnnxRunner(Bundle.read(path), "cpu", 1)
        with ExitStack() as stack:
            ports = dict[int, int]()
            for threads in sorted({kind.threads for kind in STEPS.values()}):
                settings = {"WANE_BUNDLES": folder, "WANE_DEFAULT_MODEL": NAME, "WANE_THREADS": str(threads)}
                ports[threads] = port_of(stack.enter_context(live_server(**settings)))
            for turn in range(rounds):
                tokens = [2 + index for index in clicked(items, steps + WARM_UP, turn)]
                found[BASELINE].append(measured_runs(runner, hidden, tokens, 20))
                for number, (name, kind) in enumerate(STEPS.items()):
                    session, port = f"{turn}-{number}", ports[kind.threads]
                    with connect(port) as connection:
                        creation = {"session": session, "model": kind.model}
                        connection.sendall(http_request("/v1/sessions", json.dumps(creation)))
                        connection.recv(READ_AT_ONCE)
                    path_of_steps = f"/v1/sessions/{session}/tokens"
                    requests = [
                        http_request(path_of_steps, body) for body in bodies(name, items, steps + WARM_UP, turn)
                    ]
                    found[name].append(measured_steps(port, session, requests))
    return [
        {
            "what": name,
            "p50_ms": Spread.of(1e3 * float(np.percentile(taken, 50)) for taken in of_rounds),
            "p99_ms": Spread.of(1e3 * float(np.percentile(taken, 99)) for taken in of_rounds),
        }
        for name, of_rounds in found.items()
    ]


def port_of(server: LiveServer) -> int:
    """Returns the server's port."""
    return int(server.url.rpartition(":")[2])


def table(results: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Returns the table of the results. Each cell has the median, the least and the largest value of the rounds."""
    shown = Table(title=title)
    for column in ("", "p50 ms", "p99 ms"):
        shown.add_column(column, justify="left" if not column else "right")
    for one in results:
        shown.add_row(one["what"], f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}")
    return shown


def main() -> None:
    """Measures the latencies, prints the table, and writes the results to the file of `--json` if it is given."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.events", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="number of measured steps of each kind in each round")
    parser.add_argument("--json", type=Path, help="output file for the figures")
    options = parser.parse_args()
    results = measure(options.items, options.hidden, options.rounds, options.steps)
    met = [one["what"] for one in results if one["what"] in STEPS and one["p50_ms"].median <= TARGET_MS]
    title = f"{options.items:,} items, {options.hidden} units; the target is a p50 of {TARGET_MS:g} ms with top 20"
    Console(width=120).print(table(results, title), f"the target is met by: {'; '.join(met) or 'none'}")
    if options.json is not None:
        sizes = {name: getattr(options, name) for name in ("items", "hidden", "rounds", "steps")}
        origin = provenance("benchmarks.events", "onnxruntime", "numpy", bundles=[])
        write_json(options.json, {**origin, **sizes, "target_ms": TARGET_MS, "results": results})


if __name__ == "__main__":
    main()
