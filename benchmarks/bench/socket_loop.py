"""Closed loop over WebSockets or HTTP: a client sends the next message on a connection after it has received the answer
to the last message."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Sequence

from benchmarks.bench.connections import BadAnswer, HttpConnection, WebSocket
from benchmarks.bench.open_loop import TIMEOUT_S, summary
from benchmarks.bench.results import Timed


def drive(port: int, paths: Sequence[str], frames: Iterator[bytes], wanted: bytes, seconds: float) -> Timed:
    """Opens a WebSocket at each of `paths`. For `seconds`, sends the next of `frames` on a WebSocket whenever the
    answer to the last frame on this WebSocket has arrived.

    Raises BadAnswer if an answer does not contain `wanted`, or if no answer arrives on any WebSocket within ten
    seconds.
    """
    return closed_loop([WebSocket(port, path) for path in paths], frames, wanted, seconds)


def closed_loop(
    sockets: Sequence[WebSocket | HttpConnection], frames: Iterator[bytes], wanted: bytes, seconds: float
) -> Timed:
    """Runs the loop of `drive` on open connections, and closes them. Raises BadAnswer."""
    latencies: list[float] = []
    with selectors.DefaultSelector() as selector:
        try:
            begun = time.perf_counter()
            sent: dict[WebSocket | HttpConnection, float] = {}
            for opened in sockets:
                selector.register(opened.socket, selectors.EVENT_READ, opened)
                sent[opened] = time.perf_counter()
                opened.send(next(frames))
            while sent:
                ready = selector.select(TIMEOUT_S)
                if not ready:
                    raise BadAnswer(f"{len(sent)} messages were not answered within {TIMEOUT_S:.0f} s")
                for key, _ in ready:
                    answer = key.data.receive()
                    if answer is None:
                        continue
                    now = time.perf_counter()
                    latencies.append(now - sent.pop(key.data))
                    if wanted not in answer:
                        raise BadAnswer(f"an answer lacks the expected text: {answer[:300]!r}")
                    if now - begun < seconds:
                        sent[key.data] = now
                        key.data.send(next(frames))
        finally:
            for opened in sockets:
                opened.socket.close()
    return summary(latencies, time.perf_counter() - begun)
