"""Runs an ONNX file of unknown origin in a process of its own, which is killed if it takes too long or too much memory.

    python -m wane.models.imported.first_run FILE BYTES < feeds.npz > outputs.npz

The process checks the file before onnxruntime opens it. A file that passes may still take long or much memory to run:
that is found here, where it costs one killed process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.imported.graph_file import GraphError, read_graph

SECONDS = 30.0
"""The time limit of the first run, in seconds, with the start of the process and the check of the file."""

MEMORY_BYTES = 8 * 2**30
"""The largest address space of the process."""

ERROR = "error"
CHECK_ONLY = "check_only"

Arrays = dict[str, NDArray[Any]]


def check_apart(path: Path, seconds: float = SECONDS, memory: int = MEMORY_BYTES) -> None:
    """Reads and checks the file in a process of its own: the parsed form of a hostile file may be many times as large
    as the file. Raises GraphError."""
    _apart(path, {CHECK_ONLY: np.array(True)}, seconds, memory)


def run_apart(
    path: Path, feeds: Mapping[str, NDArray[Any]], seconds: float = SECONDS, memory: int = MEMORY_BYTES
) -> Arrays:
    """Checks the file, opens it with onnxruntime and runs it once, all in a process of its own. Returns the outputs by
    name. Raises GraphError if the file is refused, if onnxruntime cannot open or run it, or if the process takes more
    than `seconds` or more than `memory` bytes of address space."""
    return _apart(path, {f"feed {name}": value for name, value in feeds.items()}, seconds, memory)


def _apart(path: Path, values: Mapping[str, NDArray[Any]], seconds: float, memory: int) -> Arrays:
    buffer = BytesIO()
    np.savez(buffer, **values)  # type: ignore[arg-type]
    # -P: no module is imported from the current folder, which may be that of the file.
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), str(memory)]
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            output, errors = process.communicate(buffer.getvalue(), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise GraphError(f"{path}: was stopped: its first run takes more than {seconds:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:300]
        raise GraphError(
            f"{path}: its first run, which may use {memory // 2**20:,} MiB of memory, ended with the status "
            f"{process.returncode}: {last}"
        )
    with np.load(BytesIO(output), allow_pickle=False) as found:
        arrays: Arrays = {name.removeprefix("output "): found[name] for name in found.files}
    if ERROR in arrays:
        raise GraphError(str(arrays[ERROR]))
    return arrays


def _run(path: Path, values: Arrays) -> Arrays:
    """Checks and runs the file in this process."""
    try:
        read_graph(path)
        if CHECK_ONLY in values:
            return {}
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no common class
            raise GraphError(f"{path}: onnxruntime cannot open it: {_first_line(error)}") from error
        names = [output.name for output in session.get_outputs()]
        try:
            found = session.run(names, {name.removeprefix("feed "): value for name, value in values.items()})
        except Exception as error:
            raise GraphError(f"{path}: onnxruntime cannot run it: {_first_line(error)}") from error
    except MemoryError:
        return {ERROR: np.array(f"{path}: needs more memory than a first run may use")}
    except GraphError as error:
        return {ERROR: np.array(str(error))}
    odd = [name for name, value in zip(names, found, strict=True) if not isinstance(value, np.ndarray)]
    if odd:
        return {ERROR: np.array(f"{path}: the output {odd[0]!r} is not a tensor")}
    return {f"output {name}": value for name, value in zip(names, found, strict=True)}


def _first_line(error: BaseException) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__)[:1000]


def main() -> int:
    """Reads the feeds from the standard input, and writes the outputs, or the error, to the standard output."""
    path, memory = Path(sys.argv[1]), int(sys.argv[2])
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with np.load(BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as found:
        values = {name: found[name] for name in found.files}
    buffer = BytesIO()
    np.savez(buffer, **_run(path, values))  # type: ignore[arg-type]
    sys.stdout.buffer.write(buffer.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
