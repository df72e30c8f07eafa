"""`wane key`: creates an API key.

Prints the key's line for a key file to standard output. The line contains only a hash of the key. Prints the key itself
to standard error. The key cannot be shown again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wane.arguments import Parser
from wane.service.auth.keys import KeysError, make_key

FAILURES = (KeysError, OSError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = Parser("wane key", description=__doc__)
    parser.add_argument(
        "name", metavar="NAME", help="the key's owner; all keys with the same name share the same sessions"
    )
    parser.add_argument(
        "--scope",
        metavar="SCOPE",
        help="use (default), metrics or admin; + joins several scopes",
    )
    parser.add_argument("--rate", metavar="REQUESTS", help="largest number of requests per second (default: no limit)")
    parser.add_argument(
        "--burst", metavar="REQUESTS", help="size of the token bucket in requests (default: the requests of one second)"
    )
    parser.add_argument("--sessions", metavar="SESSIONS", help="largest number of sessions of NAME (default: no limit)")
    options = vars(parser.parse_args(arguments[1:]))
    name = options.pop("name")
    made, kept = make_key(name, [f"{option}={value}" for option, value in options.items() if value is not None])
    print(f"The key of {name}, which is shown only now:\n\n    {made}\n", file=sys.stderr, flush=True)  # noqa: T201
    print(kept.line())  # noqa: T201
    return 0
