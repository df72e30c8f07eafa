"""Measures the costs of the service's parts on the running stack: CPU time, bytes and disk time.

The stack has three replicas, HAProxy and Redis, as in docker-compose.yml. Twelve connections send one-token steps
through HAProxy. Then three connections, and later 32 connections, send steps directly to one replica. CPU times are
read from the system, network bytes from HAProxy and Redis, and the numbers of batches and of trips to the store (see
`Costs`) from the replicas. From the two loads on one replica, the cost of a step and the cost of a batch are computed.
The cost of a rebuild is the difference between the costs of the first and the second step of sessions that have moved
to another replica.
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

from redis import Redis
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench.connections import READ_AT_ONCE, BadAnswer, HttpAnswers, connect, http_request
from benchmarks.routing import BUNDLE, VOCABULARY, begin, drive
from deploy.stack.process import Process
from deploy.stack.stack import ENTRANCE, STORE, Stack, replicas
from research.scaling.processes import Spent, resident_bytes, spent

SOME, FEW, CROWDED = 12, 3, 32  # numbers of connections of the three loads
SESSIONS_EACH = 8
SECONDS = 5.0
MOVED = 240  # the number of sessions of each length that move to another replica
MOVED_AT_ONCE = 8
LENGTHS = (100, 600)  # session lengths in tokens: shorter and longer than the stored tail (a session's last tokens)
KEPT = 2000  # the number of sessions in the memory measurement
WRITES = 500
QUANTILES = 40
POLICIES = ("tail", "state")
Result = dict[str, Any]


def totals(stack: Stack) -> dict[str, float]:
    """Returns the sums of the replicas' counters, and the network bytes of HAProxy and Redis."""
    names = ("wane_batch_items_count", "wane_batch_items_sum", "wane_store_roundtrip_commands_count")
    found = dict.fromkeys((*names, "wane_store_roundtrip_commands_sum", "wane_state_rebuilds_total"), 0.0)
    for replica in stack.replicas:
        text = _get(f"{replica.url}/metrics")
        for name in found:
            found[name] += sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE))
    rows = [line.split(",") for line in _get(f"http://127.0.0.1:{stack.operations}/;csv").splitlines()]
    front = next(row for row in rows if row[:2] == ["clients", "FRONTEND"])
    found["front_bytes"] = float(front[8]) + float(front[9])
    with Redis.from_url(stack.administered_store) as redis:
        stats = redis.info("stats")
        found["store_bytes"] = float(stats["total_net_input_bytes"]) + float(stats["total_net_output_bytes"])
    return found


def load(stack: Stack, name: str, connections: int, seconds: float, port: int | None = None) -> Result:
    """Runs a closed loop of requests through HAProxy, or directly to a replica's `port`. Returns the costs per step."""
    random, port = Random(connections), port or stack.port
    sessions = [[f"{name}-{one}-{own}" for own in range(SESSIONS_EACH)] for one in range(connections)]
    begin(port, [session for own in sessions for session in own], random)
    drive(port, sessions, 1.0, random)
    counted, cpus = totals(stack), {process.name: spent(process) for process in stack.processes.values()}
    own_s = time.process_time()
    latencies = drive(port, sessions, seconds, random)
    own_s = time.process_time() - own_s
    steps = len(latencies)
    after = totals(stack)
    taken = {process.name: spent(process) - cpus[process.name] for process in stack.processes.values()}
    replica = [taken[process.name] for process in stack.replicas if port in (stack.port, process.port)]
    apart = {key: (after[key] - counted[key]) / steps for key in counted}
    return {
        "connections": connections,
        "steps": steps,
        "steps_per_s": steps / seconds,
        "p50_ms": 1e3 * statistics.median(latencies),
        "loop_us": 1e6 * sum(one.first_s for one in replica) / steps,
        "runner_us": 1e6 * sum(one.others_s for one in replica) / steps,
        "front_us": 1e6 * taken[ENTRANCE].all_s / steps,
        "store_us": 1e6 * taken[STORE].all_s / steps,
        "client_us": 1e6 * own_s / steps,
        "batches": apart["wane_batch_items_count"],
        "trips": apart["wane_store_roundtrip_commands_count"],
        "commands": apart["wane_store_roundtrip_commands_sum"],
        "front_bytes": apart["front_bytes"],
        "store_bytes": apart["store_bytes"],
    }


def start_with(port: int, sessions: Sequence[str], tokens: int, random: Random) -> None:
    """Creates the sessions `sessions`, each with `tokens` random tokens."""
    for path, body in (
        ("/v1/sessions", lambda session: {"session": session}),
        (None, lambda _: {"tokens": [random.randrange(1, VOCABULARY) for _ in range(tokens)]}),
    ):
        ask(port, [(path or f"/v1/sessions/{session}/tokens", body(session)) for session in sessions])


def ask(port: int, requests: Sequence[tuple[str, object]], connections: int = 1) -> list[float]:
    """Sends each request once over `connections` connections. Returns the latencies, in seconds, in the order of the
    answers."""
    taken: list[float] = []
    waiting = iter(requests)
    sent: dict[int, float] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:

        def send(connection: socket.socket) -> None:
            path, body = next(waiting, (None, None))
            if path is not None:
                sent[connection.fileno()] = time.perf_counter()
                connection.sendall(http_request(path, json.dumps(body)))

        for _ in range(connections):
            connection = opened.enter_context(contextlib.closing(connect(port)))
            selector.register(connection, selectors.EVENT_READ, HttpAnswers())
            send(connection)
        while sent:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.data.receive(key.fileobj.recv(READ_AT_ONCE)) is not None:
                    taken.append(time.perf_counter() - sent.pop(key.fd))
                    send(key.fileobj)
    return taken


def move(stack: Stack, tokens: int) -> Result:
    """Moves sessions from one replica to another, and measures their first and second step at the new replica.

    Several sessions move at the same time, as in a storm of rebuilds. An idle replica would also search for a proof of
    each answer that it computes from a tail. A busy replica does not, and the costs are needed for a busy replica.
    """
    random = Random(tokens)
    one, other = stack.replicas[0], stack.replicas[1]
    sessions = [f"moved-{tokens}-{number}" for number in range(MOVED)]
    start_with(one.port, sessions, tokens, random)
    found: list[tuple[Spent, list[float]]] = []
    for _ in range(2):
        requests = [(f"/v1/sessions/{name}/tokens", {"tokens": [random.randrange(1, VOCABULARY)]}) for name in sessions]
        before = spent(other)
        taken = ask(other.port, requests, MOVED_AT_ONCE)
        found.append((spent(other) - before, taken))
    (first, first_s), (second, second_s) = found
    return {
        "tokens": tokens,
        "rebuilt_ms": 1e3 * statistics.median(first_s),
        "resident_ms": 1e3 * statistics.median(second_s),
        "loop_more_us": 1e6 * (first.first_s - second.first_s) / MOVED,
        "runner_more_us": 1e6 * (first.others_s - second.others_s) / MOVED,
    }


def memory(stack: Stack) -> Result:
    """Measures the memory that a session with a full tail takes in Redis and, including its state, in a replica."""
    replica, store = stack.replicas[2], stack.processes[STORE]
    random = Random(0)
    # The first steps trigger one-time allocations, which do not count as memory of sessions.
    start_with(replica.port, [f"first-{number}" for number in range(200)], LENGTHS[-1], random)
    sessions = [f"kept-{number}" for number in range(KEPT)]
    with Redis.from_url(stack.administered_store) as redis:
        before, used = resident_bytes(replica), redis.info("memory")["used_memory"]
        start_with(replica.port, sessions, LENGTHS[-1], random)
        return {
            "replica_session_bytes": (resident_bytes(replica) - before) / KEPT,
            "store_session_bytes": (redis.info("memory")["used_memory"] - used) / KEPT,
            "replica_base_bytes": before,
            "store_resident_bytes": resident_bytes(store),
        }


def disk(stack: Stack, fsync: str) -> list[float]:
    """Sends WRITES writes of 100 bytes to Redis, one after another over one connection. Returns the milliseconds of
    each write."""
    parts = urlsplit(stack.administered_store)
    taken = []
    with (
        Redis.from_url(stack.administered_store) as redis,
        socket.create_connection(("127.0.0.1", parts.port or 6379)) as connection,
    ):
        redis.config_set("appendfsync", fsync)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(*words: str) -> None:
            sent = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{sent}".encode())
            told = connection.recv(1024)
            if told != b"+OK\r\n":
                raise BadAnswer(f"Redis answered {told!r} to {words[0]}")

        ask("AUTH", unquote(parts.username or ""), unquote(parts.password or ""))
        for _ in range(WRITES):
            begun = time.perf_counter()
            ask("SET", "write", "x" * 100)
            taken.append(1e3 * (time.perf_counter() - begun))
        redis.config_set("appendfsync", "always")
    return taken


def restart(replica: Process) -> Result:
    """Kills and restarts a replica. Measures the time and the CPU time from the start until the replica is ready."""
    replica.kill()
    begun = time.perf_counter()
    replica.start()
    replica.wait_ready()
    return {"ready_s": time.perf_counter() - begun, "cpu_s": spent(replica).all_s}


def runs(replica: Process) -> list[Result]:
    """Returns the compute time of windows by length. The replica measured these times at its warm-up."""
    report = json.loads(_get(f"{replica.url}/v1/report"))
    found: list[Result] = report["models"][0]["costs"]["window"]
    return found


def measure(seconds: float = SECONDS) -> Result:
    """Measures all costs. Most costs are measured for each policy of the store."""
    document: Result = {"policies": {}}
    writes: dict[str, list[float]] = {"always": [], "everysec": []}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring the stack", total=6 * len(POLICIES))

        def advance(_: object) -> None:
            progress.advance(task)

        for policy in POLICIES:
            every = {"WANE_BUNDLES": str(BUNDLE), "WANE_LOG_LEVEL": "warning", "WANE_STORE_POLICY": policy}
            variables = dict.fromkeys(replicas(), every)
            with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), variables=variables) as stack:
                found: Result = {}
                # The writes are measured before and after the loads, because the disk's speed varies.
                for fsync, taken in writes.items():
                    taken += disk(stack, fsync)
                document["policies"][policy] = found
                if policy == POLICIES[0]:
                    document["window_ms"] = runs(stack.replicas[0])
                own = stack.replicas[0].port
                advance(found.setdefault("some", load(stack, "some", SOME, seconds)))
                advance(found.setdefault("few", load(stack, "few", FEW, seconds, own)))
                advance(found.setdefault("crowded", load(stack, "crowded", CROWDED, seconds, own)))
                advance(found.setdefault("moved", [move(stack, tokens) for tokens in LENGTHS]))
                advance(found.setdefault("memory", memory(stack)))
                advance(found.setdefault("restarts", [restart(replica) for replica in stack.replicas]))
                for fsync, taken in writes.items():
                    taken += disk(stack, fsync)
    document["write_ms"] = {fsync: statistics.quantiles(taken, n=QUANTILES) for fsync, taken in writes.items()}
    return document


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text
