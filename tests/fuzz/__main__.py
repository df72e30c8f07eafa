"""Random input for every parser and for the body of a completion, and random requests to every route of a server.

    scripts/fuzz [--parsers N] [--requests N] [--seed N] [--only NAME ...]

Stops at the first finding. Prints the error, the seed, and the case after hypothesis has reduced it. When the error is
fixed, the case becomes a test.
"""

from __future__ import annotations

import argparse
import time

from tests.fuzz import completions, http
from tests.fuzz.parsers import PARSERS, fuzz

HTTP, COMPLETIONS = "http", "completions"
TARGETS = (*PARSERS, COMPLETIONS, HTTP)
COMPLETION_SHARE = 0.05
"""The number of completions that are run, divided by the number of cases of the parsers. It is small because a
completion takes some milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parsers", type=int, default=100_000, help="number of cases of all parsers together")
    parser.add_argument("--requests", type=int, default=2000, help="number of requests over HTTP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME")
    options = parser.parse_args()
    for name in options.only:
        begun = time.monotonic()
        print(f"{name}: ...", end=" ", flush=True)  # noqa: T201
        if name == HTTP:
            found = http.fuzz(options.requests, options.seed)
            what = f"{found.statuses.total()} answers: " + ", ".join(
                f"{status} {count}x" for status, count in sorted(found.statuses.items())
            )
        elif name == COMPLETIONS:
            statuses = completions.fuzz(max(1, round(options.parsers * COMPLETION_SHARE)), options.seed)
            what = ", ".join(f"{status} {count}x" for status, count in sorted(statuses.items()))
        else:
            what = f"{fuzz(name, options.parsers, options.seed)} cases"
        print(f"{what}; {time.monotonic() - begun:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
