"""Closed loop over HTTP with wrk: each connection sends its next request after the answer to its last request."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bench.results import Timed

SCRIPT = Path(__file__).with_name("replay.lua")

Requests = Iterable[tuple[str, str]]


class LoadFailed(Exception):
    """wrk is not installed, or requests of a load failed. If requests failed, the message contains their number."""


def require_wrk() -> None:
    """Raises LoadFailed if wrk is not installed."""
    if shutil.which("wrk") is None:
        raise LoadFailed("wrk was not found; on Debian and Ubuntu: apt-get install wrk")


def drive(url: str, requests: Requests, connections: int, seconds: float) -> Timed:
    """Sends `requests` (pairs of path and body) in order. After the last request, starts again with the first. Raises
    LoadFailed if an answer is not a 2xx."""
    with tempfile.NamedTemporaryFile("w", suffix=".requests") as file:
        file.writelines(f"{path}\t{body}\n" for path, body in requests)
        file.flush()
        command = ["wrk", "--threads=1", f"--connections={connections}", f"--duration={max(1, round(seconds))}s"]
        command += ["--timeout=10s", f"--script={SCRIPT}", url, "--", file.name]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse(ended.stdout, ended.stderr)


def parse(output: str, errors: str = "") -> Timed:
    """Parses the output that the script `replay.lua` writes in wrk. Raises LoadFailed if the output is incomplete or
    requests failed."""
    last = output.strip().rpartition("\n")[2]
    if not last.startswith("{"):
        raise LoadFailed(f"the output of wrk has no count of the requests: {output[-300:]}{errors[-300:]}")
    counted = json.loads(last)
    if failed := counted.pop("failed"):
        raise LoadFailed(f"{failed} requests failed, {counted['requests']} were answered")
    if not counted["requests"]:
        raise LoadFailed("no request was answered")
    return Timed(**counted)
