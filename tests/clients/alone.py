"""Runs a program in a separate process, because some client packages emit warnings on import and leave threads
running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.service.sessions.stores.redis_server import REQUIRED

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TIMEOUT_S = 300


def skip_without(package: str) -> pytest.MarkDecorator:
    """Returns a pytest mark that skips tests if a client package is not installed. If `WANE_REQUIRE_STACK` is 1, the
    tests run and fail instead."""
    missing = find_spec(package) is None and os.environ.get(REQUIRED) != "1"
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; the extra `clients` installs it")


def import_client(package: str) -> Any:
    """Imports a client package. If the package is not installed, skips the test file, or fails if `WANE_REQUIRE_STACK`
    is 1."""
    return import_module(package) if os.environ.get(REQUIRED) == "1" else pytest.importorskip(package)


def run(program: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Runs a Python program. Returns the value of the JSON that the program prints as its last line."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **OFFLINE, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])
