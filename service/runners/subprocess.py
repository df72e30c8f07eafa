"""A bundle's graphs in a process of their own, which has a processor only when nobody else wants one.

A thread of that kind would not do: one that is put aside while it holds the interpreter's lock holds up all the others.
Every message is a line of JSON and the bytes of the arrays that it names; nothing is unpickled.

`python -m wane.service.runners.subprocess BUNDLE` is the process: it answers on its standard output, and ends with its
input.
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
    """The process has ended."""


class SubprocessRunner:
    """Runs one bundle's graphs on the CPU, on one thread of another process. One caller at a time, but for `kill`.

    `cpu_s`: processor time in seconds that the runs have taken.
    """

    def __init__(self, bundle: Path) -> None:
        """Starts the process, which reads the bundle by itself: the first run waits for that."""
        self.cpu_s = 0.0
        process = subprocess.Popen(  # noqa: S603  (this interpreter, this module, and a folder)
            [sys.executable, "-m", "wane.service.runners.subprocess", str(bundle.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None, "no pipes: this is a bug"
        self.process, self.asked, self._answers = process, process.stdin, process.stdout

    def run(self, role: Role, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs of one graph, by name; see `Runner`. Raises RunnerLost, and RuntimeError where the run failed."""
        try:
            _write(self.asked, {"role": role}, feeds)
            said, outputs = _read(self._answers)
        except (OSError, ValueError) as error:
            raise RunnerLost("the process that runs aside has ended") from error
        self.cpu_s += said["cpu_s"]
        if said["failure"] is not None:
            raise RuntimeError(said["failure"])
        return outputs

    def kill(self) -> None:
        """Ends the process, without waiting for its end. A run that waits raises RunnerLost."""
        self.process.kill()

    def wait(self) -> None:
        """Waits for the end of the process, after `kill`."""
        self.process.wait()
        for pipe in (self.asked, self._answers):
            with suppress(OSError):  # a pipe whose other end is gone cannot take what was still to be written
                pipe.close()


def _write(pipe: IO[bytes], said: Mapping[str, object], arrays: Mapping[str, Array]) -> None:
    """One message."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shapes = [[name, array.dtype.str, array.shape] for name, array in whole.items()]
    pipe.write(json.dumps({**said, "arrays": shapes}).encode() + b"\n")
    for array in whole.values():
        pipe.write(array.tobytes())
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[dict[str, Any], dict[str, Array]]:
    """One message. Raises ValueError where there is none, or not all of one."""
    said = json.loads(pipe.readline())
    arrays: dict[str, Array] = {}
    for name, kind, shape in said.pop("arrays"):
        dtype = np.dtype(kind)
        data = pipe.read(int(np.prod(shape)) * dtype.itemsize)
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return said, arrays


def main() -> None:
    """Answers until there is nothing more to read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all; the one that is asked says when to end
    with suppress(AttributeError, OSError):  # only Linux has such processes
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    runner = OnnxRunner(Bundle.open(Path(sys.argv[1])), "cpu", threads=1)
    with suppress(OSError, ValueError):
        while True:
            said, feeds = _read(asked)
            begun_s, failure, outputs = time.process_time(), None, {}
            try:
                outputs = runner.run(said["role"], feeds)
            except Exception as error:  # whatever a run raises is told to the one who asked for it
                failure = str(error)
            _write(answers, {"cpu_s": time.process_time() - begun_s, "failure": failure}, outputs)


if __name__ == "__main__":
    main()
