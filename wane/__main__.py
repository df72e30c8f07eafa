"""Runs the command `wane` for `python -m wane`."""

from __future__ import annotations

import sys

from wane.cli import main

if __name__ == "__main__":
    sys.exit(main())
