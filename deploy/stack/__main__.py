"""Runs the services of docker-compose.yml as local processes for `scripts/stack`, until a signal stops them."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from deploy.stack.local import ROOT
from deploy.stack.process import ProcessFailed
from deploy.stack.secrets import CLIENT_KEY
from deploy.stack.stack import COMPOSE, ENTRANCE, Stack, replicas

LOOK_EVERY_S = 0.5


class Stopped(Exception):
    """A signal asked the process to stop."""


def stop(_: int, __: FrameType | None) -> None:
    """Stops the process at the first signal. Ignores further signals during the shutdown."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    raise Stopped


def main() -> int:
    """Runs the command, and returns the exit code. If a service did not start, prints a message and returns 2."""
    parser = argparse.ArgumentParser("scripts/stack", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="HAProxy's port for clients; default: %(default)s")
    parser.add_argument(
        "--operations-port",
        type=int,
        default=8404,
        help="port of HAProxy's status page and metrics; default: %(default)s",
    )
    parser.add_argument("--prometheus-port", type=int, default=9090, help="port of Prometheus; default: %(default)s")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "stack",
        help="folder for logs, volumes and secrets; default: build/stack",
    )
    parser.add_argument(
        "--bundles",
        type=Path,
        help="a folder of bundles, or the path of one bundle; default: the folder in the compose file",
    )
    options = parser.parse_args()
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, stop)
    try:
        bundles = {} if options.bundles is None else {"WANE_BUNDLES": str(options.bundles.resolve())}
        published = {8000: options.port, 8404: options.operations_port, 9090: options.prometheus_port}
        stack = Stack(options.folder.resolve(), published, dict.fromkeys(replicas(), bundles), whole=True)
        print(f"starting the services of {COMPOSE.name} ...", flush=True)
        with stack:
            for process in stack.processes.values():
                print(f"  {process.name:10} 127.0.0.1:{process.port}  pid {process.pid}")
            print(f"  the API key is in {stack.secrets / CLIENT_KEY}")
            print(
                f"ready at {stack.processes[ENTRANCE].url}; logs in {stack.logs}; Ctrl-C stops all services", flush=True
            )
            while True:
                time.sleep(LOOK_EVERY_S)
                for name in stack.tend():
                    print(f"  {name} ended and was restarted", flush=True)
    except Stopped:
        print("stopped")
        return 0
    except ProcessFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
