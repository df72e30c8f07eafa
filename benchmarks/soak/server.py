"""The server under test: a separate `wane serve` process, its metrics and its memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

STARTS_WITHIN_S = 600
METRIC = re.compile(r"(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Server:
    """Context manager that runs `wane serve` with the given settings. Entry waits until the server is ready. Exit stops
    it."""

    def __init__(self, settings: dict[str, object], log: Path, key: str | None = None, workers: int = 1) -> None:
        """key: an admin key, with which the metrics are read; None for a server without keys. workers: the number of
        the server's processes that answer requests."""
        if workers > 1:
            settings = settings | {"workers": workers}
        self.ended_workers: list[str] = []
        """What the log says about workers that have ended before the server was stopped."""
        self._ready_fields = {"workers": workers} if workers > 1 else {}
        options = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()
        ]
        self.command = [sys.executable, "-m", "wane", "serve", "--port=0", *options]
        self._log = log
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.port = 0
        self.exit_code: int | None = None

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        if not ready.wait(STARTS_WITHIN_S) or not self.port:
            self._process.kill()
            raise RuntimeError(f"the server ended or was not ready within {STARTS_WITHIN_S} s: see {self._log}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.exit_code = self._process.wait(60)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self, ready: threading.Event) -> None:
        """Copies the server's log to the log file without the access log, and reads the server's port from the log."""
        assert self._process.stderr is not None
        with self._log.open("w") as log:
            for line in self._process.stderr:
                entry = json.loads(line) if line.startswith("{") else {"message": line.strip()}
                if entry["message"] == "listening":
                    self.port = int(entry["url"].rpartition(":")[2])
                if entry["message"] == "ready" and self._ready_fields.items() <= entry.items():
                    ready.set()
                if entry["message"].startswith("worker ") and "has ended" in entry["message"]:
                    self.ended_workers.append(entry["message"])
                if entry["message"] != "request":
                    log.write(line)
        ready.set()

    def resident_bytes(self) -> int:
        """Returns the resident memory of all the server's processes, in bytes."""
        own = self._process.pid
        workers = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        total = 0
        for pid in (own, *workers):
            with suppress(FileNotFoundError):  # the worker has ended
                status = Path(f"/proc/{pid}/status").read_text()
                total += sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return total

    def counts(self) -> dict[str, float]:
        """Returns the server's Prometheus metrics, with keys such as `wane_x:method=GET:status=200`."""
        text = self._get("/metrics").text
        found = {}
        for name, labels, value in METRIC.findall(text):
            pairs = sorted(LABEL.findall(labels))
            found[":".join([name, *(f"{label}={text}" for label, text in pairs)])] = float(value)
        return found

    def report(self) -> dict[str, Any]:
        """Returns the first model's part of /v1/report."""
        model: dict[str, Any] = self._get("/v1/report").json()["models"][0]
        return model

    def _get(self, path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, headers=self._headers, trust_env=False, timeout=60).raise_for_status()
