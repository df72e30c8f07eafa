"""A real OTLP receiver: Rotel, a collector of OpenTelemetry data. It logs the spans that it receives."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from tests.service.sessions.stores.redis_server import REQUIRED, free_port

TIMEOUT_S = 120
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FIELD = re.compile(r" *([A-Z][A-Za-z ]*?) *: (.*)")
ATTRIBUTE = re.compile(r" *-> (\S+): (\w+)\((.*)\)")
LINKED = re.compile(r" *-> ID: ([0-9a-f]{16})")


@dataclass
class Received:
    """A received span. Times are nanoseconds since the epoch."""

    resource: dict[str, str]
    fields: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.fields["Name"]

    @property
    def id(self) -> str:
        return self.fields["ID"]

    @property
    def parent(self) -> str:
        return self.fields["Parent ID"]

    @property
    def trace(self) -> str:
        return self.fields["Trace ID"]

    @property
    def times(self) -> tuple[int, int]:
        return int(self.fields["Start time"]), int(self.fields["End time"])


class Receiver:
    """The receiver's process, and the spans in its log. `endpoint` is the value for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._lines: Queue[str] = Queue()
        self._spans: list[Received] = []
        self._resource: dict[str, str] = {}
        self._into: dict[str, str] | None = None
        arguments = ["start", "--otlp-http-endpoint", f"127.0.0.1:{self.port}"]
        arguments += ["--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}", "--exporter", "blackhole"]
        arguments += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
        self.process = subprocess.Popen(
            [_program(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = Thread(target=self._read)
        self._reader.start()
        while "Starting Rotel" not in self._lines.get(timeout=TIMEOUT_S):
            pass
        while True:  # the receiver logs `Starting Rotel` before it listens
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S).close()
                return
            except ConnectionRefusedError:
                assert self.process.poll() is None, "the receiver ended"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(ANSI.sub("", line).rstrip("\n"))

    def spans(self) -> list[Received]:
        """Stops the receiver, which logs all received spans before it exits. Then reads the spans from the log."""
        self.process.terminate()
        assert self.process.wait(TIMEOUT_S) == 0
        self._reader.join(TIMEOUT_S)
        while not self._lines.empty():
            self._take(self._lines.get())
        return self._spans

    def _take(self, line: str) -> None:
        if line.startswith("ResourceSpans"):
            self._resource = {}
            self._into = self._resource
        elif line.startswith("Span #"):
            self._spans.append(Received(self._resource))
            self._into = self._spans[-1].attributes
        elif line.startswith("SpanLink #"):
            self._into = None
        elif self._into is None and (linked := LINKED.fullmatch(line)):
            self._spans[-1].links.append(linked[1])
        elif self._into is not None and (found := ATTRIBUTE.fullmatch(line)):
            self._into[found[1]] = found[3]
        elif self._spans and self._into is not self._resource and (found := FIELD.fullmatch(line)):
            self._spans[-1].fields.setdefault(found[1], found[2])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Runs a receiver while the `with` block runs."""
    started = Receiver()
    try:
        yield started
    finally:
        started.stop()


def _program() -> str:
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        say = pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip
        say("rotel is not installed; the extra `dev` installs it")
    return str(Path(spec.origin).with_name("rotel-agent"))
