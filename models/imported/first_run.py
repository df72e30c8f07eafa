"""Opens and runs ONNX files of unknown origin in a process of its own, which is killed if it takes too long or too much
memory.

    python -P -m wane.models.imported.first_run SECONDS BYTES

The process reads requests from its standard input, and writes one answer to each (`_encode`). A file that passes its
check may still take long or much memory to run: that is found here, where it costs one killed process. The process
limits its own processor time and memory, so that it also ends if the process that started it was killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wane.models.imported.graph_file import GraphError, read_graph

SECONDS = 30.0
"""The time limit of the first run, in seconds, with the start of the process and the check of the file."""

MEMORY_BYTES = 8 * 2**30
"""The largest address space of the process."""

LARGEST_ANSWER = 2**31
"""The largest number of bytes of the outputs of one run."""

LARGEST_LOG = 2**24
"""The largest number of bytes that the process may write to a file, such as that of its error messages."""

Arrays = dict[str, NDArray[Any]]


class LimitedProcess:
    """A process that opens and runs graphs, with a limit of its whole time and of its memory.

    `path`: the file that the messages name. `what`: what takes the time, for a message.
    """

    def __init__(
        self, path: Path, seconds: float = SECONDS, memory: int = MEMORY_BYTES, what: str = "its first run"
    ) -> None:
        self._path = path
        self._seconds = seconds
        self._memory = memory
        self._what = what
        self._late = False

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        # -P: no module is imported from the current folder, which may be that of the file.
        command = [sys.executable, "-P", "-m", __name__, str(math.ceil(self._seconds)), str(self._memory)]
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._timer = Timer(self._seconds, self._stop)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        self._requests.close()
        self._answers.close()
        self._log.close()

    def check(self, path: Path) -> None:
        """Reads and checks a file. Raises GraphError."""
        self._ask({"do": "check", "path": str(path.absolute())})

    def open(self, key: str, path: Path) -> None:
        """Opens a checked file with onnxruntime, as `key`. Raises GraphError."""
        self._ask({"do": "open", "key": key, "path": str(path.absolute())})

    def close(self, key: str) -> None:
        """Closes a file that is open."""
        self._ask({"do": "close", "key": key})

    def run(self, key: str, feeds: Mapping[str, NDArray[Any]], names: Sequence[str] | None = None) -> Arrays:
        """Runs an open file. Returns the outputs by name, or those of `names`. Raises GraphError if onnxruntime cannot
        run it, or if an output is not a tensor."""
        request = {"do": "run", "key": key, "feeds": [*feeds], "names": names and [*names]}
        answer, values = self._ask(request, [*feeds.values()])
        return dict(zip(answer["names"], values, strict=True))

    def _ask(
        self, request: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()
    ) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        try:
            self._requests.send_bytes(_encode(request, arrays))
            data = self._answers.recv_bytes(LARGEST_ANSWER + 2**20)
        except (EOFError, OSError) as error:
            raise GraphError(self._ended()) from error
        answer, values = _decode(data)
        if "error" in answer:
            raise GraphError(answer["error"].replace(str(self._path.absolute()), str(self._path)))
        return answer, values

    def _ended(self) -> str:
        """Returns why the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._kill()
        status = self._process.wait()
        if self._late or status == -signal.SIGXCPU:
            return f"was stopped: {self._what} takes more than {self._seconds:g} s"
        self._log.seek(0)
        lines = self._log.read(LARGEST_LOG).decode(errors="replace").strip().splitlines() or ["no message"]
        return (
            f"{self._what}, which may use {self._memory // 2**20:,} MiB of memory, ended with the status {status}: "
            f"{lines[-1][:300]}"
        )

    def _stop(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        if self._process.returncode is None:  # otherwise, its number may be that of another process
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's name before the message of a GraphError, unless it begins with it."""
    try:
        yield
    except GraphError as error:
        text = str(error)
        raise GraphError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from error


def check_apart(path: Path, seconds: float = SECONDS, memory: int = MEMORY_BYTES) -> None:
    """Reads and checks the file in a process of its own: the parsed form of a hostile file may be many times as large
    as the file. Raises GraphError."""
    with naming(path), LimitedProcess(path, seconds, memory) as process:
        process.check(path)


def run_apart(
    path: Path, feeds: Mapping[str, NDArray[Any]], seconds: float = SECONDS, memory: int = MEMORY_BYTES
) -> Arrays:
    """Checks the file, opens it with onnxruntime and runs it once, all in a process of its own. Returns the outputs by
    name. Raises GraphError if the file is refused, if onnxruntime cannot open or run it, or if the process takes more
    than `seconds` or more than `memory` bytes of address space."""
    with naming(path), LimitedProcess(path, seconds, memory) as process:
        process.check(path)
        process.open("file", path)
        return process.run("file", feeds)


def _encode(head: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> bytes:
    """Returns a request or an answer as the bytes of an npz file: a JSON object, and arrays without names. Names in the
    object may have any character."""
    buffer = BytesIO()
    text = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(buffer, head=text, **{str(index): array for index, array in enumerate(arrays)})  # type: ignore[arg-type]
    return buffer.getvalue()


def _decode(data: bytes) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    with np.load(BytesIO(data), allow_pickle=False) as found:
        head: dict[str, Any] = json.loads(found["head"].tobytes())
        return head, [found[str(index)] for index in range(len(found.files) - 1)]


class _Sessions:
    """The open files of this process."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def answer(self, request: Mapping[str, Any], arrays: list[NDArray[Any]]) -> tuple[dict[str, Any], list[Any]]:
        """Does what a request asks. Returns the answer. Raises GraphError."""
        if request["do"] == "check":
            read_graph(Path(request["path"]))
        elif request["do"] == "open":
            self._open[request["key"]] = _session(Path(request["path"]))
        elif request["do"] == "close":
            del self._open[request["key"]]
        else:
            session = self._open[request["key"]]
            names = request["names"] or [output.name for output in session.get_outputs()]
            try:
                found = session.run(names, dict(zip(request["feeds"], arrays, strict=True)))
            except Exception as error:  # onnxruntime's errors have no common class
                raise GraphError(f"onnxruntime cannot run it: {_first_line(error)}") from error
            odd = [name for name, value in zip(names, found, strict=True) if not isinstance(value, np.ndarray)]
            if odd:
                raise GraphError(f"the output {odd[0]!r} is not a tensor")
            if (size := sum(value.nbytes for value in found)) > LARGEST_ANSWER:
                raise GraphError(f"its outputs have {size:,} bytes, more than the limit of {LARGEST_ANSWER:,}")
            return {"names": names}, found
        return {}, []


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = _first_line(error).replace(f"{path.parent}/", "").replace(f"{path.parent}", "its folder")
        raise GraphError(f"onnxruntime cannot open {path.name}: {text}") from error


def _first_line(error: BaseException) -> str:
    """Returns onnxruntime's message without its places in the source code."""
    noise = r"\[ONNXRuntimeError\] : \d+ : \w+ : |Non-zero status code returned while running |Status Message: /.*"
    return re.sub(noise, "", str(error).partition("\n")[0] or type(error).__name__).strip()[:300]


def main() -> int:
    """Answers requests until the standard input ends."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_LOG, LARGEST_LOG))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # a library that prints does not write into an answer
    sessions = _Sessions()
    while True:
        try:
            request, arrays = _decode(requests.recv_bytes())
        except EOFError:
            return 0
        try:
            data = _encode(*sessions.answer(request, arrays))
        except MemoryError:
            data = _encode({"error": "needs more memory than its process may use"}, [])
        except GraphError as error:
            data = _encode({"error": str(error)}, [])
        answers.send_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
