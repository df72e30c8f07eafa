"""Runs a local Ray cluster with Wane, and Redis, for `scripts/ray`, until a signal stops the process.

On SIGHUP, the process reads the configuration again. Ray then applies the changes, such as another number of replicas
or other settings.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deploy.ray.cluster import Cluster, DeployFailed
from deploy.ray.store import PASSWORD, redis
from deploy.stack.local import ROOT
from deploy.stack.process import ProcessFailed

CONFIGURATION = ROOT / "deploy" / "ray" / "serve.yaml"
LOOK_EVERY_S = 0.2


class Stopped(BaseException):
    """A signal asked the process to stop."""


class Signals:
    """The signals that the process has received since the last check."""

    def __init__(self) -> None:
        self.again = False
        self.stopped = False

    def listen(self) -> None:
        """Installs the signal handlers. This method must be called again after a library has installed its own
        handlers."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, self._stop)
        signal.signal(signal.SIGHUP, self._hang_up)

    def _stop(self, _: int, __: FrameType | None) -> None:
        """Raises Stopped at the first signal. The interrupted code may catch this exception, so the main loop also
        checks `stopped`."""
        if not self.stopped:
            self.stopped = True
            raise Stopped

    def _hang_up(self, _: int, __: FrameType | None) -> None:
        self.again = True


@contextmanager
def store(folder: Path) -> Iterator[None]:
    """A context manager that provides the session store during its `with` block. If the environment variable WANE_STORE
    has the address of a store, uses that store. Otherwise, starts Redis and sets the variable to the address of
    this Redis."""
    if "WANE_STORE" in os.environ:
        yield
        return
    with redis(folder) as process:
        address = f"redis://127.0.0.1:{process.port}/0"
        print(f"sessions are in {address} (pid {process.pid})", flush=True)
        os.environ["WANE_STORE"] = address
        os.environ["WANE_STORE_PASSWORD_FILE"] = str(folder / PASSWORD)
        yield


def main() -> int:
    """Runs the command, and returns the exit code. If a process did not start or Ray could not apply the configuration,
    prints a message and returns 2."""
    parser = argparse.ArgumentParser("scripts/ray", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIGURATION, help="default: deploy/ray/serve.yaml")
    parser.add_argument("--port", type=int, help="port for clients; default: the port in the configuration")
    parser.add_argument("--cpus", type=int, help="number of cores that Ray may use; default: all cores of the machine")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "ray",
        help="folder for Redis's log and data; default: build/ray",
    )
    parser.add_argument("--ray-folder", type=Path, help="folder for Ray's logs and sockets; default: /tmp/ray")
    options = parser.parse_args()
    signals = Signals()
    signals.listen()
    try:
        print("starting Ray and Redis; Ctrl-C stops them ...", flush=True)
        with (
            store(options.folder.resolve()),
            Cluster(options.config, options.port, options.cpus, options.ray_folder) as cluster,
        ):
            signals.listen()
            cluster.deploy()
            told = ""
            while not signals.stopped:
                if signals.again:
                    signals.again = False
                    print(f"{options.config} is read again", flush=True)
                    cluster.deploy()
                state = cluster.state()
                if state != told:
                    print(state, flush=True)
                    told = state
                time.sleep(LOOK_EVERY_S)
    except Stopped:
        pass
    except (DeployFailed, ProcessFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
