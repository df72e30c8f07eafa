"""The loads of each contender. Tokens are random, so that answers cannot come from a cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bench import bare, in_process, open_loop, scan, socket_loop, wrk
from benchmarks.bench.connections import http_request, text_frame
from benchmarks.bench.contenders import LSTM, STEP_PATH, Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.results import Figure, Timed
from benchmarks.bench.wire import Ranked, WrongAnswer, check_ranked, window_answer, window_body
from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary

CONNECTIONS = 64
WINDOW = 64
INPUTS = 64
BATCHED_CONNECTIONS = 4
EVENTS_A_SECOND = 1000
REQUESTS = 4096
"""Number of different requests of one load. The load sends them in order. After the last request, it starts again with
the first."""
BULK_PATH = "/v1/sessions/tokens"
JSON = {"content-type": "application/json"}

Drive = Callable[[float], Timed]


class NotUnderstood(Exception):
    """A server does not support a load's requests. The message contains the server's answer."""


@dataclass(frozen=True)
class Stage:
    """The objects that a load uses: the bundle, the server (None for a contender that is not a server), and a stack
    that releases resources after the contender has been measured."""

    contender: Contender
    bundle: Path
    manifest: Manifest
    seed: int
    stack: ExitStack
    server: ServerProcess | None = None

    @property
    def running(self) -> ServerProcess:
        assert self.server is not None, "the contender has no server: this is a bug"
        return self.server

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        return self.manifest.vocabulary.size

    @cached_property
    def names(self) -> Vocabulary:
        return Vocabulary.read(self.manifest.vocabulary.kind, self.bundle / "tokenizer.json")

    def check(self, answer: Ranked, ranked: Ranked) -> None:
        """Raises WrongAnswer unless `answer` lists the tokens that the model ranks highest. Wane lists other tokens in
        place of the unknown word and the reserved tokens."""
        unlisted = self.names.unlisted if self.contender.kind == "wane" else ()
        listed = [(token, probability) for token, probability in ranked if token not in unlisted]
        check_ranked(answer[: len(answer) + len(listed) - len(ranked)], listed)

    @cached_property
    def words(self) -> list[tuple[int, str]]:
        """Pairs of a token and the token's text. Leaves out each token whose text the tokenizer does not encode to
        exactly this token."""
        texts = [(token, self.names.token(token)) for token in range(self.vocabulary)]
        return [(token, text) for token, text in texts if self.names.encode(text) == [token]]

    def tokens(self, *shape: int) -> list[list[int]]:
        """Returns random tokens in nested lists of the given shape."""
        drawn: list[list[int]] = np.random.default_rng(self.seed).integers(self.vocabulary, size=shape).tolist()
        return drawn

    def text(self, count: int) -> list[tuple[int, str]]:
        """Returns `count` random pairs from `words`."""
        drawn = np.random.default_rng(self.seed).integers(len(self.words), size=count)
        return [self.words[index] for index in drawn]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.running.url, timeout=30, trust_env=False)

    def sessions(self, prefix: str, count: int) -> list[str]:
        """Creates sessions and returns their ids. A peer creates a session at the session's first step, so this method
        sends nothing to a peer."""
        names = [f"{prefix}-{index}" for index in range(count)]
        if self.contender.kind == "sessions":
            return names
        with self.client() as client:
            for name in names:
                client.post("/v1/sessions", json={"session": name}).raise_for_status()
        return names


@dataclass(frozen=True)
class Load:
    """One load.

    items: the number of tokens or windows per request.
    prepare: a function that builds the requests. It returns a function that applies the load for a given number of
        seconds. `prepare` raises NotUnderstood if the server does not support the requests.
    figure: the figure by which two servers are compared under this load.
    """

    name: str
    title: str
    unit: str
    items: int
    prepare: Callable[[Stage], Drive]
    figure: Figure = "rate"


def step_body(token: int) -> str:
    return compact({"tokens": [token]})


def compact(document: object) -> str:
    """Returns JSON without spaces."""
    return json.dumps(document, separators=(",", ":"))


def step_request(path: str, session: str, sequence: dict[str, Any]) -> tuple[str, str]:
    """Returns the path and the body of one step. The body contains the session's id if the path does not contain it."""
    if "{session}" in path:
        return path.format(session=session), compact(sequence)
    return path, compact({"session": session, **sequence})


def step_load(connections: int) -> Load:
    """Builds a load of session steps with one token each. There are four times as many sessions as connections, so that
    concurrent requests use different sessions."""

    def prepare(stage: Stage) -> Drive:
        walked = itertools.cycle(stage.sessions(f"steps{connections}", 4 * max(16, connections)))
        path = stage.contender.step_path
        requests = [step_request(path, next(walked), {"tokens": row}) for row in stage.tokens(REQUESTS, 1)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    title = f"session step, {plural(connections)}"
    return Load(f"session-{connections}", title, "tokens/s", 1, prepare, figure_at(connections))


def text_load() -> Load:
    """Builds a load of session steps with one token each. The token is sent as text."""

    def prepare(stage: Stage) -> Drive:
        walked = itertools.cycle(stage.sessions("texts", 4 * CONNECTIONS))
        path = stage.contender.step_path
        requests = [step_request(path, next(walked), {"input": text}) for _, text in stage.text(REQUESTS)]
        return lambda seconds: wrk.drive(stage.running.url, requests, CONNECTIONS, seconds)

    return Load(f"text-{CONNECTIONS}", f"session step by text, {plural(CONNECTIONS)}", "tokens/s", 1, prepare)


def window_load(connections: int) -> Load:
    """Builds a load of one window per request."""

    def prepare(stage: Stage) -> Drive:
        contender = stage.contender
        requests = [(contender.path, window_body(contender.wire, row)) for row in stage.tokens(REQUESTS // 4, WINDOW)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    title = f"window of {WINDOW}, {plural(connections)}"
    return Load(f"window-{connections}", title, "windows/s", 1, prepare, figure_at(connections))


def handler_load(connections: int) -> Load:
    """Builds a load of one token per request for the trivial FastAPI handler, which ignores the token."""

    def prepare(stage: Stage) -> Drive:
        requests = [(stage.contender.path, step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    return Load(f"handler-{connections}", f"trivial handler, {plural(connections)}", "requests/s", 1, prepare)


def websocket_load() -> Load:
    """Builds a load of one token per message, with one WebSocket per session."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions("sockets", CONNECTIONS)
        frames = itertools.cycle([text_frame(step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)])
        paths = [f"/v1/sessions/{session}/stream" for session in sessions]
        return lambda seconds: socket_loop.drive(stage.running.port, paths, frames, b'"predictions"', seconds)

    return Load(f"websocket-{CONNECTIONS}", f"session step, {CONNECTIONS} WebSockets", "tokens/s", 1, prepare)


def batched_load() -> Load:
    """Builds a load of batched requests. Each request steps INPUTS sessions by one token each."""
    title = f"session steps, {INPUTS} in each call, {plural(BATCHED_CONNECTIONS)}"
    return Load(f"batched-{INPUTS}", title, "tokens/s", INPUTS, lambda stage: prepare_bulk(stage, "batched", {}))


def columns_load() -> Load:
    """Builds the load of `batched_load`, but with answers in the columns format."""

    def prepare(stage: Stage) -> Drive:
        return prepare_bulk(stage, "columns", {"format": "columns"})

    title = f"session steps, {INPUTS} in each call, answers in columns, {plural(BATCHED_CONNECTIONS)}"
    return Load(f"columns-{INPUTS}", title, "tokens/s", INPUTS, prepare)


def prepare_bulk(stage: Stage, prefix: str, options: dict[str, str]) -> Drive:
    """Prepares batched requests, each of which steps INPUTS sessions. There are eight times as many sessions as steps
    in flight.

    Raises NotUnderstood if the server answers the first call with 422.
    """
    walked = itertools.cycle(stage.sessions(prefix, 8 * BATCHED_CONNECTIONS * INPUTS))
    rows = stage.tokens(REQUESTS // 16, INPUTS)
    requests = [(BULK_PATH, bulk_body(walked, row, options)) for row in rows]
    with stage.client() as client:
        answer = client.post(BULK_PATH, content=requests[0][1], headers=JSON)
    if answer.status_code == HTTPStatus.UNPROCESSABLE_ENTITY:
        raise NotUnderstood(f"answered 422: {answer.json()['detail']}")
    return lambda seconds: wrk.drive(stage.running.url, requests, BATCHED_CONNECTIONS, seconds)


def bulk_body(sessions: Iterator[str], tokens: Sequence[int], options: dict[str, str]) -> str:
    steps = [{"session": next(sessions), "tokens": [token]} for token in tokens]
    return compact({"steps": steps, **options})


def open_load() -> Load:
    """Builds a load of session steps in an open loop: steps are sent at random times, even while earlier steps are in
    flight."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions("events", EVENTS_A_SECOND)
        walked = itertools.cycle(sessions)
        paths = (STEP_PATH.format(session=session) for session in walked)
        made = [http_request(next(paths), step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)]
        requests = itertools.cycle(made)

        def drive(seconds: float) -> Timed:
            due = open_loop.poisson(EVENTS_A_SECOND, seconds, stage.seed)
            return open_loop.drive(stage.running.port, requests, due)

        return drive

    title = f"session step, open loop, {EVENTS_A_SECOND:,} a second"
    return Load(f"open-{EVENTS_A_SECOND}", title, "tokens/s", 1, prepare, "p99_ms")


def bare_load(role: str, batch: int) -> Load:
    """Builds a load that runs onnxruntime in a loop, without a server."""

    def prepare(stage: Stage) -> Drive:
        if role == "step":
            return bare.prepare_step(stage.bundle, stage.vocabulary, batch, stage.seed)
        return bare.prepare_window(stage.bundle, stage.vocabulary, WINDOW, batch, stage.seed)

    step = role == "step"
    title = f"bare loop, {'step' if step else f'window of {WINDOW}'}, batch {batch}"
    return Load(f"{role}-{batch}", title, "tokens/s" if step else "windows/s", batch, prepare)


def engine_load(way: str) -> Load:
    """Builds a load of Wane's batcher or engine, without HTTP."""

    def prepare(stage: Stage) -> Drive:
        return in_process.prepare_engine(stage.bundle, way, stage.stack)

    return Load(f"{way}-{CONNECTIONS}", f"Wane's {way}, steps, {2 * CONNECTIONS} clients", "tokens/s", 1, prepare)


def scan_loads(model: str) -> list[Load]:
    """Builds one load for each method and each result. The result is the last state of a long sequence, or the
    log-probability of every token in it. For an LSTM, one of the methods is ONNX's LSTM operator."""

    def prepare(kind: str, way: str) -> Callable[[Stage], Drive]:
        if way == scan.NATIVE:
            return lambda stage: scan.prepare_native(stage.bundle, kind, stage.vocabulary, stage.seed)
        return lambda stage: scan.prepare_way(stage.bundle, kind, way, stage.stack)

    ways = (scan.NATIVE, *scan.WAYS) if model == LSTM else scan.WAYS
    return [
        Load(f"{kind}-{way}", f"{kind}, {way}", "tokens/s", scan.TOKENS, prepare(kind, way))
        for kind in scan.KINDS
        for way in ways
    ]


def figure_at(connections: int) -> Figure:
    """Returns the name of the figure by which servers are compared: the latency if there is one connection, the rate if
    there are several."""
    return "rate" if connections > 1 else "p50_ms"


def plural(connections: int) -> str:
    return f"{connections} connection{'s' if connections > 1 else ''}"


def loads_of(contender: Contender, model: str) -> list[Load]:
    """Returns the loads that measure a contender with a model, in the order of measurement."""
    steps = [step_load(CONNECTIONS), step_load(1)]
    windows = [window_load(CONNECTIONS), window_load(1)]
    match contender.kind:
        case "wane" if contender.services:
            return steps[:1]
        case "wane":
            bulk = [batched_load(), columns_load()]
            return [*steps, text_load(), *windows, websocket_load(), *bulk, open_load()]
        case "windows":
            return windows
        case "sessions":
            return steps
        case "handler":
            return [handler_load(CONNECTIONS), handler_load(1)]
        case "onnxruntime":
            loops = [bare_load(role, batch) for role in ("step", "window") for batch in (CONNECTIONS, 1)]
            return [loops[0], engine_load("batcher"), engine_load("engine"), *loops[1:]]
        case "scan":
            return scan_loads(model)


def check(stage: Stage, expected: Callable[[list[list[int]]], list[Ranked]]) -> None:
    """Compares the server's answers to windows and to every kind of step with the model's predictions, which `expected`
    computes. Raises WrongAnswer if an answer differs."""
    contender = stage.contender
    if contender.kind not in ("wane", "windows", "sessions"):
        return
    with stage.client() as client:
        if contender.path:
            windows = stage.tokens(8, WINDOW)
            for tokens, ranked in zip(windows, expected(windows), strict=True):
                body = window_body(contender.wire, tokens)
                answer = client.post(contender.path, content=body, headers=JSON)
                stage.check(window_answer(contender.wire, answer.raise_for_status().content), ranked)
        if contender.step_path:
            _check_steps(stage, client, expected)


def _check_steps(stage: Stage, client: httpx.Client, expected: Callable[[list[list[int]]], list[Ranked]]) -> None:
    """Compares the answers to every kind of step with the model's predictions. Wane itself feeds the start token to a
    new session. A peer does not, so this function sends the start token to the peer as the session's first step."""
    start, words = stage.manifest.vocabulary.eos_id, stage.text(8)
    (ranked,) = expected([[start, *(token for token, _ in words)]])
    by_token, by_text, together = stage.sessions("check", 3)

    def step(session: str, sequence: dict[str, Any]) -> Ranked:
        path, body = step_request(stage.contender.step_path, session, sequence)
        return window_answer("tokens", client.post(path, content=body, headers=JSON).raise_for_status().content)

    if stage.contender.kind == "sessions":
        step(by_token, {"tokens": [start]})
    for token, _ in words:
        answer = step(by_token, {"tokens": [token]})
    stage.check(answer, ranked)
    if stage.contender.kind == "sessions":
        return
    for token, text in words:
        answer = step(by_text, {"input": text})
        bulk = client.post(BULK_PATH, content=bulk_body(iter([together]), [token], {}), headers=JSON)
    stage.check(answer, ranked)
    (result,) = bulk.raise_for_status().json()["results"]
    if "predictions" not in result:
        raise WrongAnswer(f"a step's result in a batched call has no predictions: {result}")
    stage.check(window_answer("tokens", json.dumps(result).encode()), ranked)
