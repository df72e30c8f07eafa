"""Configures all tests. Skips the tests that need the extra `train` if the extra is not installed, and reports the
skipped files.

BLAS uses one thread in the tests and in every process that they start, unless OMP_NUM_THREADS is set. The matrices are
small. With several threads, the threads of numpy's BLAS library busy-wait for one another. The tests would then take
several times as long, and use most of the machine's CPU time.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# numpy and torch read this variable when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
TRAIN_FILES = [
    HERE / name
    for name in (
        "docs/test_audit.py",
        "docs/test_readme_training.py",
        "docs/test_training.py",
        "models/test_cell_registry.py",
        "models/test_constraints.py",
        "models/test_export.py",
        "models/test_l1_ball.py",
        "models/test_parallel_scan.py",
        "models/test_spectral_limit.py",
        "research/systems/test_page.py",
        "research/systems/test_systems.py",
        "research/test_stability_price.py",
        "training/audit/test_audit.py",
        "training/audit/test_served.py",
        "training/test_end_to_end.py",
        "training/test_evaluate.py",
        "training/test_group.py",
        "training/test_loop.py",
        "training/test_proof.py",
        "training/test_run.py",
    )
]
MISSING = [package for package in ("torch", "onnx") if find_spec(package) is None]

collect_ignore = [str(file) for file in TRAIN_FILES] if MISSING else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that need the extra `train`. Moves the files with slow tests to the front, because a slow file
    that starts last would still run after all other tests have ended."""
    for item in items:
        if item.path in TRAIN_FILES:
            item.add_marker(pytest.mark.train)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports the skipped test files."""
    if MISSING:
        files = ", ".join(str(file.relative_to(HERE)) for file in TRAIN_FILES)
        terminalreporter.write_line(
            f"skipped, because {' and '.join(MISSING)} (extra `train`) is not installed: {files}"
        )
