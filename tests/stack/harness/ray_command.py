"""Runs scripts/ray on free ports and in its own folder, and reads its output."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ray.store import PASSWORD
from deploy.stack.local import ROOT
from tests.service.sessions.stores.redis_server import REQUIRED, free_port, program
from tests.stack.conftest import BUNDLE, STORE_TIMEOUT
from tests.stack.harness.command import Command

CONFIGURATION = ROOT / "deploy" / "ray" / "serve.yaml"
OWNER = "alice"
OWN, OTHERS = ({"authorization": f"Bearer the-key-of-{name}-in-tests"} for name in (OWNER, "bob"))
"""The authorization headers of the client that creates the sessions, and of another client."""

KEYS = f"{OWNER}:the-key-of-{OWNER}-in-tests,bob:the-key-of-bob-in-tests"
REPLICA = re.compile(r"\w+ \(pid (\d+), RUNNING\)")
STORE = re.compile(r"sessions are in (\S+) \(pid (\d+)\)\n")
READY = ": ready at "
REPLICAS = 2
"""The number of replicas at the start."""


class RayCommand(Command):
    """The running command scripts/ray, its configuration, and the replicas that its output names."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Starts the command. The path of `folder` must be short, because the folder contains Unix sockets."""
        program("redis-server")
        if find_spec("ray") is None:
            (pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip)(
                "ray is not installed; scripts/test installs it"
            )
        self.port = free_port()
        self.folder = folder
        self.configuration = folder / "serve.yaml"
        self._write(REPLICAS, CONFIGURATION)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        super().__init__(
            "scripts/ray",
            f"--config={self.configuration}",
            f"--port={self.port}",
            f"--folder={folder / 'redis'}",
            f"--ray-folder={folder / 'ray'}",
            *arguments,
            environment={
                **inherited,
                **STORE_TIMEOUT,
                "WANE_BUNDLES": str(BUNDLE),
                "WANE_API_KEYS": KEYS,
                "HOME": str(folder),
            },
        )

    def until_store(self) -> str:
        """Waits until the command prints the address of the session store. Returns the address."""
        told = STORE.fullmatch(self.until(STORE.fullmatch)[-1])
        assert told is not None
        password = (self.folder / "redis" / PASSWORD).read_text(encoding="utf-8").strip()
        return told[1].replace("//", f"//:{password}@")

    def until_ready(self, replicas: int, without: Sequence[int] = ()) -> list[int]:
        """Waits until exactly this number of replicas runs, and none of them has a process id in `without`. Returns the
        process ids."""

        def wanted(line: str) -> bool:
            pids = running(line)
            return READY in line and len(pids) == replicas == line.count("(pid") and not set(pids) & set(without)

        return running(self.until(wanted)[-1])

    def scale(self, replicas: int) -> None:
        """Writes the configuration with this number of replicas, and makes the command read it."""
        self._write(replicas, self.configuration)
        self.process.send_signal(signal.SIGHUP)
        self.until_said("is read again")

    def _write(self, replicas: int, source: Path) -> None:
        """Writes the configuration in `source` with `replicas` as the smallest and the largest number of replicas. If
        the largest number were higher, Ray's autoscaler would add replicas on a slow machine."""
        document: Any = yaml.safe_load(source.read_text(encoding="utf-8"))
        for deployment in document["applications"][0]["deployments"]:
            deployment["autoscaling_config"] |= {"min_replicas": replicas, "max_replicas": replicas}
        self.configuration.write_text(yaml.safe_dump(document), encoding="utf-8")

    def processes(self) -> list[int]:
        """Returns the process id of every process of the command. Ray's processes have their own process sessions, so
        this function finds them by a variable in their environment."""
        mark = f"HOME={self.folder}".encode()
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # the process has ended meanwhile
                continue
        return found

    def logged(self, request_id: str) -> dict[str, Any]:
        """Returns the log line of a request. The replica that answered the request must have exited."""
        for file in (self.folder / "ray").glob("session_2*/logs/worker-*.err"):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.startswith("{") and request_id in line:
                    found: dict[str, Any] = json.loads(line)
                    return found
        raise AssertionError(f"no log has a line with the request id {request_id}")

    def end(self) -> None:
        """Kills all processes that are still running."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        super().end()


def running(line: str) -> list[int]:
    """Returns the process ids of the replicas that a line of output lists as running."""
    return [int(pid) for pid in REPLICA.findall(line)]
