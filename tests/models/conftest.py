"""Leaves out, and says so, the tests that need the train extra where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

TRAIN_FILES = ("test_constraints.py", "test_parallel_scan.py", "test_export.py")

MISSING = [package for package in ("torch", "onnx") if find_spec(package) is None]

collect_ignore = list(TRAIN_FILES) if MISSING else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs the extra `train`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name in TRAIN_FILES:
            item.add_marker(pytest.mark.train)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the files that were left out."""
    if MISSING:
        files = ", ".join(TRAIN_FILES)
        terminalreporter.write_line(f"tests/models: left out without {' and '.join(MISSING)} (extra 'train'): {files}")
