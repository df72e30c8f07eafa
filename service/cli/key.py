"""`wane key`: makes an API key.

The key's line for a file of keys goes to standard output: it holds the key's hash, from which the key cannot be found.
The key itself goes to standard error, this once.
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
    parser.add_argument("name", metavar="NAME", help="whose key it is; all keys of a name have the same sessions")
    parser.add_argument("--scope", metavar="SCOPE", help="use (default), metrics, admin, or several joined by +")
    parser.add_argument("--rate", metavar="REQUESTS", help="requests a second (default: any number)")
    parser.add_argument("--burst", metavar="REQUESTS", help="of those, how many at once (default: a second's)")
    parser.add_argument("--sessions", metavar="SESSIONS", help="how many NAME may have (default: any number)")
    options = vars(parser.parse_args(arguments[1:]))
    name = options.pop("name")
    made, kept = make_key(name, [f"{option}={value}" for option, value in options.items() if value is not None])
    print(f"The key of {name}, which is shown only now:\n\n    {made}\n", file=sys.stderr, flush=True)  # noqa: T201
    print(kept.line())  # noqa: T201
    return 0
