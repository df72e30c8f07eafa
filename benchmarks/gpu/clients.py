"""Clients of a server, in processes of their own: a closed loop of session steps over HTTP, without another program."""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks.bench.connections import HttpConnection, http_request
from benchmarks.bench.contenders import STEP_PATH, Contender, wanes
from benchmarks.bench.process import ServerProcess
from benchmarks.bench.results import Timed
from benchmarks.bench.socket_loop import closed_loop
from benchmarks.gpu.part import Figures

REQUESTS = 2048


class Clients(NamedTuple):
    """The clients of one process. port: the server's. first: the number of the first session. connections: the number
    of connections, each with two sessions. vocabulary: the number of tokens of the model."""

    port: int
    first: int
    connections: int
    vocabulary: int
    seconds: float


def wane(options: list[str]) -> Contender:
    """Returns the service with more options on its command line. It finds the packages of this process, and the CUDA
    libraries that came with torch, because the service itself does not load torch."""
    plain = wanes()[0]
    paths = {
        "PYTHONPATH": os.pathsep.join([str(plain.tree), *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": os.pathsep.join([*cuda_libraries(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
    }
    return replace(plain, command=(*plain.command, *options), environment=paths)


def cuda_libraries() -> list[str]:
    """Returns the folders of the CUDA libraries that torch's wheels install."""
    found = [folder for path in filter(None, sys.path) for folder in sorted(Path(path).glob("nvidia/*/lib"))]
    found += [
        Path(path) / "torch" / "lib" for path in filter(None, sys.path) if (Path(path) / "torch" / "lib").is_dir()
    ]
    return [str(folder) for folder in found]


def create(clients: Clients) -> None:
    """Creates the clients' sessions."""
    with httpx.Client(base_url=f"http://127.0.0.1:{clients.port}", timeout=30, trust_env=False) as client:
        for number in range(2 * clients.connections):
            client.post("/v1/sessions", json={"session": f"s{clients.first + number}"}).raise_for_status()


def drive(clients: Clients) -> Timed:
    """Steps the clients' sessions one token at a time."""
    names = itertools.cycle(f"s{clients.first + number}" for number in range(2 * clients.connections))
    tokens = np.random.default_rng(clients.first).integers(clients.vocabulary, size=REQUESTS).tolist()
    made = [
        http_request(STEP_PATH.format(session=next(names)), f'{{"tokens":[{token}]}}')
        for _, token in zip(range(max(REQUESTS, 2 * clients.connections)), itertools.cycle(tokens), strict=False)
    ]
    connections = [HttpConnection(clients.port) for _ in range(clients.connections)]
    return closed_loop(connections, itertools.cycle(made), b'"predictions"', clients.seconds)


def load(servers: list[ServerProcess], connections: int, processes: int, vocabulary: int, seconds: float) -> Figures:
    """Returns the steps a second of all servers together. connections and processes: those of each server."""
    each = max(1, connections // processes)
    some = [
        Clients(server.port, 2 * each * (index + 1), each, vocabulary, seconds)
        for server in servers
        for index in range(processes)
    ]
    with ProcessPoolExecutor(len(some), mp_context=get_context("spawn")) as pool:
        list(pool.map(create, some))
        found = list(pool.map(drive, some))
    return {
        "connections": each * len(some),
        "client_processes": len(some),
        "steps_per_s": sum(one.requests / one.seconds for one in found),
        "p50_ms": max(one.p50_ms for one in found),
        "p99_ms": max(one.p99_ms for one in found),
    }


def start(stack: ExitStack, contender: Contender, bundle: Path, logs: Path, count: int) -> list[ServerProcess]:
    """Starts `count` servers, waits until each has answered a prediction, and stops them when `stack` is closed."""
    servers = [
        stack.enter_context(ServerProcess(contender, bundle, logs / f"server-{index}.log")) for index in range(count)
    ]
    for server in servers:
        server.wait_ready("/v1/predict", '{"tokens":[2]}')
    return servers
