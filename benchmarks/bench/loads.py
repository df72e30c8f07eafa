"""What each contender is put under. Tokens are random, so that no answer can be had from a cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.bench import bare, in_process, open_loop, scan, socket_loop, wrk
from benchmarks.bench.connections import http_request, text_frame
from benchmarks.bench.contenders import BARE, HANDLER, LSTM, SCAN, WANE, Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.results import Timed
from benchmarks.bench.wire import WrongAnswer, check_ranked, window_answer, window_body

CONNECTIONS = 64
WINDOW = 64
INPUTS = 64
BATCHED_CONNECTIONS = 4
EVENTS_A_SECOND = 1000
REQUESTS = 4096
"""Different requests of one load; they come round again after that."""

Drive = Callable[[float], Timed]


@dataclass(frozen=True)
class Stage:
    """Where a load is run: a bundle, the server that has it, if it is a server, and what ends with the visit."""

    contender: Contender
    bundle: Path
    vocabulary: int
    seed: int
    stack: ExitStack
    server: ServerProcess | None = None

    @property
    def running(self) -> ServerProcess:
        assert self.server is not None, "this is a bug"
        return self.server

    def tokens(self, *shape: int) -> list[list[int]]:
        """Random tokens, rows of them."""
        drawn: list[list[int]] = np.random.default_rng(self.seed).integers(self.vocabulary, size=shape).tolist()
        return drawn

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.running.url, timeout=30, trust_env=False)

    def sessions(self, prefix: str, count: int) -> list[str]:
        """New sessions' ids."""
        names = [f"{prefix}-{index}" for index in range(count)]
        with self.client() as client:
            for name in names:
                client.post("/v1/sessions", json={"session": name}).raise_for_status()
        return names


@dataclass(frozen=True)
class Load:
    """One load. items: tokens or windows that one request has answered; prepare: what can be made before."""

    name: str
    title: str
    unit: str
    items: int
    prepare: Callable[[Stage], Drive]


def step_body(token: int) -> str:
    return json.dumps({"tokens": [token]}, separators=(",", ":"))


def step_path(session: str) -> str:
    return f"/v1/sessions/{session}/tokens"


def step_load(connections: int) -> Load:
    """One token a request. The sessions are four times as many as the connections, so no two requests meet in one."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions(f"steps{connections}", 4 * max(16, connections))
        walked = itertools.cycle(sessions)
        requests = [(step_path(next(walked)), step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    return Load(f"session-{connections}", f"session step, {plural(connections)}", "tokens/s", 1, prepare)


def window_load(connections: int) -> Load:
    """A window a request."""

    def prepare(stage: Stage) -> Drive:
        contender = stage.contender
        requests = [(contender.path, window_body(contender.wire, row)) for row in stage.tokens(REQUESTS // 4, WINDOW)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    return Load(f"window-{connections}", f"window of {WINDOW}, {plural(connections)}", "windows/s", 1, prepare)


def handler_load(connections: int) -> Load:
    """One token a request, to a handler that does nothing with it."""

    def prepare(stage: Stage) -> Drive:
        requests = [(stage.contender.path, step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)]
        return lambda seconds: wrk.drive(stage.running.url, requests, connections, seconds)

    return Load(f"handler-{connections}", f"trivial handler, {plural(connections)}", "requests/s", 1, prepare)


def websocket_load() -> Load:
    """One token a message, one WebSocket a session."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions("sockets", CONNECTIONS)
        frames = itertools.cycle([text_frame(step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)])
        paths = [f"/v1/sessions/{session}/stream" for session in sessions]
        return lambda seconds: socket_loop.drive(stage.running.port, paths, frames, b'"predictions"', seconds)

    return Load(f"websocket-{CONNECTIONS}", f"session step, {CONNECTIONS} WebSockets", "tokens/s", 1, prepare)


def batched_load() -> Load:
    """One token for each of many sessions a request; eight times as many sessions as are in flight."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions("batched", 8 * BATCHED_CONNECTIONS * INPUTS)
        walked = itertools.cycle(sessions)
        rows = stage.tokens(REQUESTS // 16, INPUTS)
        requests = [("/v1/sessions/tokens", batch_body(walked, row)) for row in rows]
        return lambda seconds: wrk.drive(stage.running.url, requests, BATCHED_CONNECTIONS, seconds)

    title = f"session step, {INPUTS} a call, {plural(BATCHED_CONNECTIONS)}"
    return Load(f"batched-{INPUTS}", title, "tokens/s", INPUTS, prepare)


def batch_body(sessions: Iterator[str], tokens: Sequence[int]) -> str:
    steps = [{"session": next(sessions), "tokens": [token]} for token in tokens]
    return json.dumps({"steps": steps}, separators=(",", ":"))


def open_load() -> Load:
    """Session steps that come when they come."""

    def prepare(stage: Stage) -> Drive:
        sessions = stage.sessions("events", EVENTS_A_SECOND)
        walked = itertools.cycle(sessions)
        made = [http_request(step_path(next(walked)), step_body(token)) for (token,) in stage.tokens(REQUESTS, 1)]
        requests = itertools.cycle(made)

        def drive(seconds: float) -> Timed:
            due = open_loop.poisson(EVENTS_A_SECOND, seconds, stage.seed)
            return open_loop.drive(stage.running.port, requests, due)

        return drive

    title = f"session step, open loop, {EVENTS_A_SECOND:,} a second"
    return Load(f"open-{EVENTS_A_SECOND}", title, "tokens/s", 1, prepare)


def bare_load(role: str, batch: int) -> Load:
    """A loop around onnxruntime."""

    def prepare(stage: Stage) -> Drive:
        if role == "step":
            return bare.prepare_step(stage.bundle, stage.vocabulary, batch, stage.seed)
        return bare.prepare_window(stage.bundle, stage.vocabulary, WINDOW, batch, stage.seed)

    step = role == "step"
    title = f"bare loop, {'step' if step else f'window of {WINDOW}'}, batch {batch}"
    return Load(f"{role}-{batch}", title, "tokens/s" if step else "windows/s", batch, prepare)


def engine_load(way: str) -> Load:
    """Wane's own, between the bare loop and HTTP."""

    def prepare(stage: Stage) -> Drive:
        return in_process.prepare_engine(stage.bundle, way, stage.stack)

    return Load(f"{way}-{CONNECTIONS}", f"Wane's {way}, steps, {2 * CONNECTIONS} clients", "tokens/s", 1, prepare)


def scan_loads(model: str) -> list[Load]:
    """A long sequence, for its last state and for its score; ONNX's own operator where it is the model's cell."""

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


def plural(connections: int) -> str:
    return f"{connections} connection{'s' if connections > 1 else ''}"


def loads_of(contender: Contender, model: str) -> list[Load]:
    """What this one is put under with a model, in order."""
    windows = [window_load(CONNECTIONS), window_load(1)]
    if contender.name == WANE:
        steps = [step_load(CONNECTIONS), step_load(1)]
        return [*steps, *windows, websocket_load(), batched_load(), open_load()]
    if contender.name == HANDLER:
        return [handler_load(CONNECTIONS), handler_load(1)]
    if contender.name == SCAN:
        return scan_loads(model)
    if contender.name == BARE:
        loops = [bare_load(role, batch) for role in ("step", "window") for batch in (CONNECTIONS, 1)]
        return [loops[0], engine_load("batcher"), engine_load("engine"), *loops[1:]]
    return windows


def check(stage: Stage, expected: Callable[[list[list[int]]], list[list[tuple[int, float]]]]) -> None:
    """Windows are answered as the model answers them, and of Wane, every way to step as the recurrent mode does.

    Raises WrongAnswer.
    """
    contender = stage.contender
    if contender.name in (HANDLER, BARE, SCAN):
        return
    windows = stage.tokens(8, WINDOW)
    with stage.client() as client:
        for tokens, ranked in zip(windows, expected(windows), strict=True):
            body = window_body(contender.wire, tokens)
            answer = client.post(contender.path, content=body, headers={"content-type": "application/json"})
            check_ranked(window_answer(contender.wire, answer.raise_for_status().content), ranked)
        if contender.name == WANE:
            _check_steps(stage, client, windows[0][:8])


def _check_steps(stage: Stage, client: httpx.Client, tokens: list[int]) -> None:
    recurrent = client.post("/v1/predict", json={"tokens": tokens, "mode": "recurrent"}).raise_for_status().content
    expected = window_answer("wane", recurrent)
    alone, together = stage.sessions("check", 2)
    for token in tokens:
        step = client.post(step_path(alone), content=step_body(token), headers={"content-type": "application/json"})
        batch = client.post("/v1/sessions/tokens", json={"steps": [{"session": together, "tokens": [token]}]})
    check_ranked(window_answer("wane", step.raise_for_status().content), expected)
    (result,) = batch.raise_for_status().json()["results"]
    if "predictions" not in result:
        raise WrongAnswer(f"a batched step was answered {result}")
    check_ranked(window_answer("wane", json.dumps(result).encode()), expected)
