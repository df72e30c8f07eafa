"""`python -m service`: serve the models, or ask a running server how its two modes compare.

python -m service [serve] [settings]       serve; --help lists every setting
python -m service compare URL [options]    drive both modes over a text: latency and agreement
python -m service key NAME >> FILE         make an API key, and add its hash to a file of keys
python -m service report URL...            what a server has measured so far, or replicas of one together
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from models.bundle import BundleError
from service import plot, server
from service.client import Client, ClientError, Document
from service.compare import choose, measure, requests_needed
from service.console import agreement_table, latency_table, report_tables
from service.engine.catalog import CatalogError
from service.keys import KeysError, make_key
from service.merged import MergeError, merge
from service.runners.runner import DeviceError
from service.settings import Settings, SettingsError
from service.stores.store import StoreError
from service.tracing import Tracing

CHARACTERS_OF_A_TOKEN = 32  # at most, on the average of a text: no more of it is sent to be tokenised
SAMPLE = Path(__file__).with_name("sample.txt")


class CommandError(Exception):
    """The command line asks for what cannot be done; the message says why."""


def serve(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser("python -m service", description=__doc__, formatter_class=HELP)
    Settings.add_arguments(parser)
    settings = Settings.read(os.environ, parser.parse_args(arguments))
    server.refuse_more_workers(os.environ)
    server.run(settings)


def compare(arguments: Sequence[str]) -> None:
    """Drives both modes of one model over a text, and shows how long they take and how far they are apart."""
    parser = argparse.ArgumentParser("python -m service compare", description=compare.__doc__)
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--file", type=Path, default=SAMPLE, metavar="TEXT", help="UTF-8 text; default: a short one")
    parser.add_argument("--model", metavar="NAME", help="default: the server's")
    parser.add_argument("--window", type=int, metavar="K", help="tokens of a window; default: the model's own k")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="leading tokens to use (default 256)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    for name in ("tokens", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name} is {value}, but must be at least 1")
    if options.plot is not None and options.plot.suffix not in plot.FORMATS:
        raise CommandError(f"--plot is {options.plot}, but must end in {', '.join(plot.FORMATS)}")
    text = options.file.read_text(encoding="utf-8")[: options.tokens * CHARACTERS_OF_A_TOKEN]

    screen = Console(stderr=True)
    bar = Progress(console=screen, transient=True, disable=not screen.is_terminal)
    with traced() as tracing, Client(options.url, tracing=tracing) as client, bar as progress:
        card = choose(client, options.model)
        k = card["k"] if options.window is None else options.window
        tokens = client.score(card["id"], text)["tokens"][: options.tokens]
        task = progress.add_task(f"Comparing the modes of {card['id']}", total=requests_needed(len(tokens)))
        compared = measure(client, options.url, card, k, tokens, advance=lambda: progress.advance(task))

    console = Console()
    console.print(latency_table(compared), agreement_table(compared))
    if options.json is not None:
        options.json.write_text(json.dumps(compared.document(), indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot.save(compared, options.plot)


def report(arguments: Sequence[str]) -> None:
    """Shows what servers have measured so far: one, or replicas of one added up."""
    parser = argparse.ArgumentParser("python -m service report", description=report.__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a server, such as http://127.0.0.1:8000")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    urls = dict.fromkeys(url.rstrip("/") for url in options.urls)
    reports: list[Document] = []
    failures: list[str] = []
    with traced() as tracing:
        for url in urls:
            try:
                with Client(url, tracing=tracing) as client:
                    found = client.report()
                merge([*reports, found])
                reports.append(found)
            except (ClientError, MergeError) as error:
                failures.append(str(error) if url in str(error) else f"{url}: {error}")
    if reports:
        found = reports[0] if len(urls) == 1 else merge(reports)
        if options.json:
            print(json.dumps(found, indent=2))  # noqa: T201  (what was asked for)
        else:
            Console().print(*report_tables(found))
    if failures:
        missing = f"{len(failures)} of {len(urls)} did not report, and are not in it: " if reports else ""
        raise CommandError(missing + "; ".join(failures))


@contextmanager
def traced() -> Iterator[Tracing | None]:
    """Tracing for the calls of one command, where OpenTelemetry's variables ask for it."""
    logging.basicConfig(format="%(message)s")
    tracing = Tracing.open(os.environ)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def key(arguments: Sequence[str]) -> None:
    """Makes an API key: its line for a file of keys goes to standard output, the key itself, this once, to standard
    error. The line holds the key's hash, from which nobody finds the key."""
    parser = argparse.ArgumentParser("python -m service key", description=key.__doc__)
    parser.add_argument("name", metavar="NAME", help="whose key it is; all keys of a name have the same sessions")
    parser.add_argument("--scope", metavar="SCOPE", help="use (default), metrics, admin, or several joined by +")
    parser.add_argument("--rate", metavar="REQUESTS", help="requests a second (default: any number)")
    parser.add_argument("--burst", metavar="REQUESTS", help="of those, how many at once (default: a second's)")
    parser.add_argument("--sessions", metavar="SESSIONS", help="how many NAME may have (default: any number)")
    options = vars(parser.parse_args(arguments))
    name = options.pop("name")
    made, kept = make_key(name, [f"{option}={value}" for option, value in options.items() if value is not None])
    print(f"The key of {name}, which is shown only now:\n\n    {made}\n", file=sys.stderr, flush=True)  # noqa: T201
    print(kept.line())  # noqa: T201


HELP = argparse.RawDescriptionHelpFormatter
COMMANDS = {"serve": serve, "key": key, "compare": compare, "report": report}
INTERRUPTED = 130  # as shells have it: 128 and the signal's number
FAILURES = (
    SettingsError,
    CommandError,
    CatalogError,
    KeysError,
    StoreError,
    BundleError,
    DeviceError,
    ClientError,
    MergeError,
    OSError,
    UnicodeError,
)


def main(arguments: Sequence[str]) -> int:
    """Runs one command; `serve` where none is named. Returns the exit code: 2 with a message for what was foreseen."""
    name, rest = "serve", list(arguments)
    if rest and rest[0] in COMMANDS:
        name, *rest = rest
    try:
        COMMANDS[name](rest)
    except FAILURES as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  (a command's last word)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
