"""Runs a bundle's graphs in a separate process that runs only on idle processors.

A thread with a low priority would not be sufficient. Such a thread may hold the interpreter's lock (GIL) while it waits
for a processor, and would then block all other threads. Every message between the processes is a line of JSON, followed
by the bytes of the arrays that the line describes. No message is decoded with pickle, which could run code from the
message.

`python -m wane.service.runners.subprocess BUNDLE` starts this process. The process reads requests from its standard
input, writes answers to its standard output, and exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from wane.models.bundle import Bundle
from wane.models.manifest import Role
from wane.service.runners.onnx import OnnxRunner
from wane.service.runners.runner import Array


class RunnerLost(Exception):
    """The runner's process has exited."""


class SubprocessRunner:
    """Runs one bundle's graphs on one CPU thread of another process. During a call, another thread may call `kill`
    only.

    `cpu_s` is the total CPU time of the runs in seconds.
    """

    def __init__(self, bundle: Path) -> None:
        """Starts the process. The first run waits until the process has loaded the bundle."""
        self.cpu_s = 0.0
        process = subprocess.Popen(  # noqa: S603  (this interpreter, this module, and a folder)
            [sys.executable, "-m", "wane.service.runners.subprocess", str(bundle.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None, "the process has no pipes: this is a bug"
        self.process, self.asked, self._answers = process, process.stdin, process.stdout

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs one graph and returns its outputs by name. See `Runner` for the shapes. Raises RunnerLost if the process
        has exited, and RuntimeError if the run failed."""
        try:
            _write(self.asked, {"role": role}, feeds)
            said, outputs = _read(self._answers)
        except (OSError, ValueError) as error:
            raise RunnerLost("the runner's process has exited") from error
        self.cpu_s += said["cpu_s"]
        if said["failure"] is not None:
            raise RuntimeError(said["failure"])
        return outputs

    def kill(self) -> None:
        """Kills the process without waiting for its exit. A run in progress raises RunnerLost."""
        self.process.kill()

    def wait(self) -> None:
        """Waits until the process has exited. Call this after `kill`."""
        self.process.wait()
        for pipe in (self.asked, self._answers):
            with suppress(OSError):  # closing flushes the buffer, which fails if the other end is closed
                pipe.close()


def _write(pipe: IO[bytes], said: Mapping[str, object], arrays: Mapping[str, Array]) -> None:
    """Writes one message."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = [[name, array.dtype.str, array.shape] for name, array in whole.items()]
    pipe.write(json.dumps({**said, "arrays": shapes}).encode() + b"\n")
    for array in whole.values():
        pipe.write(array.tobytes())
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Reads one message. Raises ValueError if there is no complete message."""
    said = json.loads(pipe.readline())
    arrays: dict[str, Array] = {}
    for name, kind, shape in said.pop("arrays"):
        dtype = np.dtype(kind)
        data = pipe.read(int(np.prod(shape)) * dtype.itemsize)
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return said, arrays


def main() -> None:
    """Answers requests from standard input until its end."""
    # a terminal sends SIGINT to both processes, but the server ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(AttributeError, OSError):  # only Linux has SCHED_IDLE
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    runner = OnnxRunner(Bundle.open(Path(sys.argv[1])), "cpu", threads=1)
    with suppress(OSError, ValueError):
        while True:
            said, feeds = _read(asked)
            begun_s, failure, outputs = time.process_time(), None, {}
            try:
                outputs = runner.run(said["role"], feeds)
            except Exception as error:  # the error is sent to the caller
                failure = str(error)
            _write(answers, {"cpu_s": time.process_time() - begun_s, "failure": failure}, outputs)


if __name__ == "__main__":
    main()
