"""The shipped bundles, for tests with real models."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest

from wane.models.bundle import Bundle
from wane.service.runners.onnx import OnnxRunner
from wane.service.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / Settings.read(os.environ).bundles
PATHS = sorted(path.parent for path in FOLDER.glob("*/manifest.json"))
assert PATHS, f"{FOLDER} contains no bundles: the checkout is incomplete"

each_bundle = pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS], scope="module")
"""The scope makes pytest run all tests of a file with one bundle before those with the next one."""


@lru_cache(maxsize=2)
def opened(path: Path) -> tuple[Bundle, OnnxRunner]:
    """Returns a bundle and its CPU runner. Tests of a file share them. All bundles together need 230 MiB."""
    bundle = Bundle.read(path)
    return bundle, OnnxRunner(bundle, "cpu", threads=1)
