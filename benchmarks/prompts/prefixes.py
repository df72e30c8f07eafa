"""Measures generations with and without kept states of prompts (WANE_PREFIX_STATES), side by side.

    python -m benchmarks.prompts.prefixes docs/figures/prefixes.json [--rounds N] [--bundle FOLDER]
    python -m benchmarks.prompts.prefixes docs/figures/prefix_hits.json --workers 2

Two servers of the same bundle run: one keeps the states, one does not. They get the same requests, the first by turns.
In a *conversation*, each prompt is the one before it with 32 more tokens, from 64 to 4,096. The time at a length is the
median of the NEAR prompts up to this length; the server without states is asked only these. The load of *single*
prompts has random prompts of 64 to 2,048 tokens without a common beginning. Each request generates one token. There are
three times of each request, on one connection: `http`, as the client sees it; `engine`, the `total_ms` of its answer,
without HTTP and JSON; and `processor`, the processor time of all threads of the server, which other work on the machine
changes least. Linux only.

With `--workers N`, measures only which share of a conversation's tokens need not run, with one worker and with N: if
all turns use one connection, which stays with its worker, and if each turn uses a new one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.bench.contenders import Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.summary import Spread, provenance, ratios, write_json

BUNDLE = Path("models/bundles/gated-stable")
STATES = ("on", "off")
FIRST, APPENDED, LAST = 64, 32, 4096
SHOWN = (512, 1024, 2048, 4096)
HITS_LAST = 2048
NEAR = 5
SINGLE = (64, 256, 512, 1024, 2048)
SINGLES = 8
"""Prompts of each length in a round of single prompts."""
VOCABULARY = 1000


class Subject:
    """A running server."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self._model = model
        self._threads = Path(f"/proc/{server.pid}/task")
        server.wait_ready("/v1/predict", '{"tokens": [5]}')
        self._client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)

    def processor_ms(self) -> float:
        """Returns the processor time of the server's threads so far."""
        return sum(int((one / "schedstat").read_text().split()[0]) for one in self._threads.iterdir()) / 1e6

    def ask(self, tokens: list[int]) -> tuple[float, dict[str, Any]]:
        """Generates one token after a prompt. Returns the milliseconds of the request, and the answer."""
        body = {"model": self._model, "tokens": tokens, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        answer = self._client.post("/v1/generate", json=body)
        took_ms = 1e3 * (time.perf_counter() - began)
        found: dict[str, Any] = answer.raise_for_status().json()
        return took_ms, found


def hit_share(server: ServerProcess, model: str, seed: int, *, reconnects: bool) -> float:
    """Has a conversation of up to HITS_LAST tokens. Returns the share of its prompts' tokens that did not run."""
    draw, tokens, cached, total = random.Random(seed), list[int](), 0, 0
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, trust_env=False))
        for length in range(FIRST, HITS_LAST + 1, APPENDED):
            tokens += [draw.randrange(2, VOCABULARY) for _ in range(length - len(tokens))]
            body = {"model": model, "tokens": tokens, "max_tokens": 1, "temperature": 0}
            if reconnects:
                client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, trust_env=False))
            answer = client.post("/v1/generate", json=body).raise_for_status().json()
            cached, total = cached + answer.get("cached_tokens", 0), total + length
    return cached / total


def hits(options: argparse.Namespace) -> dict[str, Spread]:
    """Returns the share of tokens that did not run, by the number of workers and the kind of the connections."""
    found: dict[str, Spread] = {}
    for workers in (1, options.workers):
        command = ("{bin}/wane", "serve", "--port={ports[0]}", "--bundles={bundle}", f"--workers={workers}")
        wane = Contender("wane", "Wane", "wane", (*command, "--log-level=warning"))
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(wane, options.bundle.resolve(), Path(folder) / "log") as server,
        ):
            server.wait_ready("/v1/predict", '{"tokens": [5]}')
            for reconnects in (False, True):
                name = f"workers {workers}, {'a new connection each turn' if reconnects else 'one connection'}"
                first = options.rounds * (2 * workers + reconnects)
                seeds = range(first, first + options.rounds)
                shares = [hit_share(server, options.bundle.name, seed, reconnects=reconnects) for seed in seeds]
                found[name] = Spread.of(shares)
    return found


def side_by_side(subjects: dict[str, Subject], tokens: list[int], turn: int) -> dict[str, float]:
    """Asks both servers, the first by turns. Returns the milliseconds of each, by time and server. Raises SystemExit if
    they answer different tokens."""
    took: dict[str, float] = {}
    answers: list[dict[str, Any]] = []
    for states in STATES if turn % 2 else STATES[::-1]:
        before_ms = subjects[states].processor_ms()
        took[f"http {states}"], answer = subjects[states].ask(tokens)
        took[f"processor {states}"] = subjects[states].processor_ms() - before_ms
        took[f"engine {states}"] = answer["latency"]["total_ms"]
        answers.append(answer)
    if len({(*answer["tokens"], *answer["logprobs"]) for answer in answers}) > 1:
        raise SystemExit(f"the servers' answers to {len(tokens)} tokens differ")
    return took


def conversation(subjects: dict[str, Subject], seed: int) -> dict[int, dict[str, float]]:
    """Returns the milliseconds of each server, by the length of the prompt."""
    draw, tokens = random.Random(seed), list[int]()
    near: dict[int, list[dict[str, float]]] = {length: [] for length in SHOWN}
    for turn, length in enumerate(range(FIRST, LAST + 1, APPENDED)):
        tokens += [draw.randrange(2, VOCABULARY) for _ in range(length - len(tokens))]
        shown = [one for one in SHOWN if one - NEAR * APPENDED < length <= one]
        if shown:
            near[shown[0]].append(side_by_side(subjects, tokens, turn))
        else:
            subjects["on"].ask(tokens)
    return {length: medians(taken) for length, taken in near.items()}


def medians(taken: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each server's times."""
    return {name: statistics.median(one[name] for one in taken) for name in taken[0]}


def singles(subjects: dict[str, Subject], seed: int) -> dict[int, dict[str, float]]:
    """Returns the median milliseconds of each server, by the length of the prompt."""
    draw = random.Random(seed)
    found: dict[int, dict[str, float]] = {}
    for length in SINGLE:
        taken = [
            side_by_side(subjects, [draw.randrange(2, VOCABULARY) for _ in range(length)], turn)
            for turn in range(SINGLES)
        ]
        found[length] = medians(taken)
    return found


def summary(rounds: list[dict[int, dict[str, float]]], lengths: tuple[int, ...]) -> dict[str, dict[str, Spread]]:
    """Returns, for each length and time, the milliseconds of each server, and the time without states divided by that
    with them."""
    found: dict[str, dict[str, Spread]] = {}
    for length in lengths:
        for kind in ("http", "engine", "processor"):
            on, off = [[one[length][f"{kind} {states}"] for one in rounds] for states in STATES]
            spreads = {"on_ms": Spread.of(on), "off_ms": Spread.of(off), "off_over_on": ratios(off, on)}
            found[f"{length} {kind}"] = spreads
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    parser.add_argument("--workers", type=int, help="measure only the share of tokens that did not run")
    options = parser.parse_args()
    if options.workers is not None:
        shares = hits(options)
        facts = provenance("benchmarks.prompts.prefixes", "onnxruntime", bundles=[options.bundle.name])
        write_json(options.output, {**facts, "rounds": options.rounds, "cached_share": shares})
        for name, one in shares.items():
            print(f"{name}: {one:.3f} of the tokens did not run")
        return
    command = ("{bin}/wane", "serve", "--port={ports[0]}", "--bundles={bundle}", "--log-level=warning")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subjects: dict[str, Subject] = {}
        for states in STATES:
            wane = Contender("wane", "Wane", "wane", (*command, f"--prefix-states={states}"))
            server = ServerProcess(wane, options.bundle.resolve(), folder / f"{states}.log")
            subjects[states] = Subject(stack.enter_context(server), options.bundle.name)
        talked, alone = [], []
        singles(subjects, -1)  # warms up
        for seed in track(range(options.rounds), "measuring", console=Console(stderr=True)):
            talked.append(conversation(subjects, seed))
            alone.append(singles(subjects, 1000 + seed))
    document = {
        **provenance("benchmarks.prompts.prefixes", "onnxruntime", bundles=[options.bundle.name]),
        "rounds": options.rounds,
        "conversation": summary(talked, SHOWN),
        "single": summary(alone, SINGLE),
    }
    write_json(options.output, document)
    for load in ("conversation", "single"):
        for name, one in document[load].items():
            print(
                f"{load}, {name}: on {one['on_ms']:.2f} ms, off {one['off_ms']:.2f} ms, off/on {one['off_over_on']:.2f}"
            )


if __name__ == "__main__":
    main()
