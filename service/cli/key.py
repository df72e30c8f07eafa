"""`wane key`: creates an API key.

Standard output gets the key's line for a file of keys. It holds the key's hash, from which the key cannot be found.
Standard error gets the key itself, this once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from wane.service.auth.keys import KeysError, make_key

FAILURES = (KeysError, OSError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; `arguments[0]` is its name."""
    parser = argparse.ArgumentParser("wane key", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="the key's owner; all keys of a name share its sessions")
    parser.add_argument("--scope", metavar="SCOPE", help="use (default), metrics, admin, or several joined by +")
    parser.add_argument("--rate", metavar="REQUESTS", help="requests per second (default: no limit)")
    parser.add_argument("--burst", metavar="REQUESTS", help="requests at once (default: one second's)")
    parser.add_argument("--sessions", metavar="SESSIONS", help="quota of sessions of NAME (default: no limit)")
    options = vars(parser.parse_args(arguments[1:]))
    name = options.pop("name")
    made, kept = make_key(name, [f"{option}={value}" for option, value in options.items() if value is not None])
    print(f"The key of {name}, which is shown only now:\n\n    {made}\n", file=sys.stderr, flush=True)  # noqa: T201
    print(kept.line())  # noqa: T201
    return 0
