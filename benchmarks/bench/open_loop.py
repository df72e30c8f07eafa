"""Open loop over HTTP: sends requests when they are due, even while earlier requests are in flight.

A request's latency is measured from its due time. A stall of the server therefore adds to the latencies of all requests
that are due during the stall. A delay between a request's due time and its sending also adds to its latency.
`lag_p99_ms` is the p99 of these delays. The loop waits with `select`, because Python rounds the timeout of `epoll` to
milliseconds.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench.connections import READ_AT_ONCE, BadAnswer, HttpAnswers, connect
from benchmarks.bench.results import Timed

CONNECTIONS = 64
TIMEOUT_S = 10.0


def poisson(rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Returns random due times of a Poisson process with `rate` requests per second, in seconds from the start."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=max(1, int(rate * seconds)))
    return np.cumsum(gaps)


def drive(port: int, requests: Iterator[bytes], due: NDArray[np.float64], connections: int = CONNECTIONS) -> Timed:
    """At each time in `due`, in seconds from the start, sends the next of `requests` on a free connection.

    If no connection is free, the request waits, and its latency includes the wait. Raises BadAnswer if an answer is not
    a 2xx. Also raises it if no answer arrives within ten seconds while no connection is free or all requests have been
    sent.
    """
    opened = [connect(port) for _ in range(connections)]
    try:
        return _drive(opened, requests, due.tolist())
    finally:
        for connection in opened:
            connection.close()


def _drive(opened: list[socket.socket], requests: Iterator[bytes], due: list[float]) -> Timed:
    answers = {connection: HttpAnswers() for connection in opened}
    idle, waiting = list(opened), deque(due)
    asked: dict[socket.socket, float] = {}
    latencies: list[float] = []
    lags: list[float] = []
    begun = time.perf_counter()
    while waiting or asked:
        now = time.perf_counter() - begun
        while waiting and idle and waiting[0] <= now:
            connection, intended = idle.pop(), waiting.popleft()
            asked[connection] = intended
            lags.append(time.perf_counter() - begun - intended)
            connection.sendall(next(requests))
        timeout = TIMEOUT_S
        if waiting and idle:
            timeout = max(0.0, waiting[0] - (time.perf_counter() - begun))
        readable = select.select(asked, [], [], timeout)[0]
        if not readable and timeout == TIMEOUT_S:
            raise BadAnswer(f"{len(asked)} requests were not answered within {TIMEOUT_S:.0f} s")
        for connection in readable:
            if answers[connection].receive(connection.recv(READ_AT_ONCE)) is not None:
                latencies.append(time.perf_counter() - begun - asked.pop(connection))
                idle.append(connection)
    return summary(latencies, time.perf_counter() - begun, lags)


def summary(latencies: list[float], seconds: float, lags: list[float] | None = None) -> Timed:
    """Summarises a load that took `seconds`. `latencies` are the requests' latencies in seconds. `lags` are the delays
    between the requests' due times and their sending, in seconds."""
    p50, p90, p99, longest = (float(value) for value in np.percentile(np.array(latencies) * 1e3, (50, 90, 99, 100)))
    lag = float(np.percentile(lags, 99) * 1e3) if lags else None
    return Timed(
        requests=len(latencies),
        seconds=seconds,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        longest_ms=longest,
        lag_p99_ms=lag,
    )
