"""Configures all tests: the groups of tests, and the memory of a run.

`scripts/test` runs the group `quick`, which needs only the extra `dev`, and takes a few minutes. `scripts/test --rest`
runs all other tests.

BLAS uses one thread in the tests and in every process that they start, unless OMP_NUM_THREADS is set. The matrices are
small. With several threads, the threads of numpy's BLAS library busy-wait for one another. The tests would then take
several times as long, and use most of the machine's CPU time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Generator
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# numpy and torch read this variable when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example may take long on a busy machine.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

HERE = Path(__file__).parent
REST = [
    *(HERE / name for name in ("benchmarks", "clients", "console", "deploy", "docs", "fuzz", "research", "stack")),
    *(HERE / name for name in ("models/imported", "test_wheel.py", "training")),
]
"""The folders and files of which the group `quick` has no test, except the files in `UNITS`. The group also has no
test with the mark `stack` or `slow`."""
UNITS = [HERE / "docs" / "test_readme.py"]
NEEDS_TORCH = [
    HERE / name
    for name in (
        "models/certificate/test_curve.py",
        "models/certificate/test_request.py",
        "models/certificate/test_top1.py",
        "models/test_constraints.py",
        "models/test_export.py",
        "models/test_export_again.py",
        "models/test_l1_ball.py",
        "models/test_layer_registry.py",
        "models/test_opened_gates.py",
        "models/test_parallel_scan.py",
        "models/test_radius.py",
        "models/test_readout.py",
        "models/test_spectral_limit.py",
        "models/test_stacks.py",
        "service/runners/test_onnx_device.py",
        "service/test_random_stacks.py",
        "service/test_stacks.py",
    )
]
LEFT_OUT = (
    "stack, containers, clients, console, training, export and import of models, docs, benchmarks, research, fuzz "
    "tests, wheel, and all tests that need torch"
)
MAX_WORKER_BYTES = {"quick": 5 * 2**28, "rest": 2**31, "all": 2**31}
SLOW = re.compile(r"\bmark\.(slow|stack)\b")
"""Matches the text of a file in which a test has the mark `slow` or `stack`."""
LONG = [HERE / "service" / name for name in ("workers/test_workers.py", "test_server.py", "test_conformance.py")]
"""The files of the group `quick` that take longest. By their names, they would start last."""
SLOW_S = 900
"""The time limit of a test with the mark `slow` or `stack`. pyproject.toml has the limit of other tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--group", choices=["quick", "rest", "all"], default="all", help="which tests run")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Makes the random weights of each test the same in every run, whichever tests ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@cache  # thousands of tests share a few hundred paths
def is_rest(path: Path) -> bool:
    return path in NEEDS_TORCH or (path not in UNITS and any(rest == path or rest in path.parents for rest in REST))


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in ("slow", "stack"))


class NoTorch(MetaPathFinder):
    """Fails to import torch, so that a test of the group `quick` that imports torch fails everywhere, and not only
    where torch is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch":
            raise ModuleNotFoundError("no test of the group `quick` may import torch", name=name)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import the files of which the group has no test, because importing them takes time and memory."""
    group = config.getoption("group")
    if group == "all" or not collection_path.name.startswith("test_"):
        return None
    if group == "quick":
        return True if is_rest(collection_path) else None
    return None if is_rest(collection_path) or SLOW.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes tests of other groups. Moves long files to the front, because a long file that starts last would still
    run after all other tests have ended."""
    for item in items:
        if is_slow(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    group = config.getoption("group")
    if group != "all":
        chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            chosen[(is_rest(item.path) or is_slow(item)) == (group == "rest")].append(item)
        config.hook.pytest_deselected(items=chosen[False])
        items[:] = chosen[True]
    long = {item.path for item in items if item.get_closest_marker("slow")} | {*LONG}
    items.sort(key=lambda item: item.path not in long)


STEP_BYTES = 32 * 2**20
freed_at = 0
raises: list[tuple[int, str]] = []
"""The tests that raised the peak memory of this process by more than `STEP_BYTES`: by how many bytes, and the name."""


def pytest_collection_finish() -> None:
    """Excludes the collected tests and the imported modules from garbage collection. They stay until the end, and
    going through them takes most of the time of a collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = peak_bytes()
    result = yield
    if peak_bytes() > before + STEP_BYTES:
        raises.append((peak_bytes() - before, item.nodeid))
    return result


def pytest_runtest_logfinish() -> None:
    """Frees garbage, and returns it to the kernel, each time that the process has grown by `STEP_BYTES`. The parts of
    an engine refer to one another, so that only a garbage collection frees an engine that a test has dropped."""
    global freed_at
    if sys.platform == "linux" and resident_bytes() > freed_at + STEP_BYTES:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        freed_at = resident_bytes()


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the peak memory of a worker process, and the tests that raised it most, to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak_bytes()
        session.config.workeroutput["raises"] = sorted(raises, reverse=True)[:3]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("group") == "quick":
        sys.meta_path.insert(0, NoTorch())
    if not hasattr(config, "workerinput"):
        list_characters()
        config.pluginmanager.register(Workers(config.getoption("group")))


def list_characters() -> None:
    """Makes hypothesis list all Unicode characters, in a process of its own, unless it has done so in this checkout.
    This takes 200 MiB. Otherwise each worker would list them in its first test with random text."""
    if not Path(".hypothesis", "unicode_data").exists():
        program = "from hypothesis import strategies; strategies.text().validate()"
        subprocess.run([sys.executable, "-c", program], check=True)


class Workers:
    """Fails a run if the tests of one worker process needed more memory than `MAX_WORKER_BYTES` allows its group."""

    def __init__(self, group: str) -> None:
        self.most = MAX_WORKER_BYTES[group]
        self.peaks: dict[str, int] = {}
        self.raises: list[tuple[int, str]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """xdist calls this hook when a worker ends. A worker that was killed has no output."""
        if "peak" in getattr(node, "workeroutput", {}):
            self.peaks[node.gateway.id] = node.workeroutput["peak"]
            self.raises += node.workeroutput["raises"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and max(self.peaks.values(), default=0) > self.most:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        peaks = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in sorted(self.peaks.items()))
        if peaks:
            terminalreporter.write_line(f"peak memory of the worker processes: {peaks}")
            for rise, name in sorted(self.raises, reverse=True):
                terminalreporter.write_line(f"  raised by {rise / 2**20:.0f} MiB: {name}")
        if max(self.peaks.values(), default=0) > self.most:
            limit = self.most // 2**20
            terminalreporter.write_line(f"a worker process may need {limit} MiB at most", red=True)


def peak_bytes() -> int:
    """Returns the largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Reports the tests that did not run."""
    if config.getoption("group") == "quick":
        terminalreporter.write_line(f"not run: {LEFT_OUT}; `scripts/test --rest` runs them")
