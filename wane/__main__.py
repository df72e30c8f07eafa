"""Runs the command `wane`, also for `python -m wane`."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""The exit status of an interrupted command, as in shells: 128 plus the signal number of SIGINT."""


def main() -> int:
    """Runs the command and returns its exit status. An interrupt prints nothing, also while modules are imported: this
    module therefore imports nothing that takes time."""
    try:
        from wane.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
