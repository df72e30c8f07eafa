"""Compares Wane with its peers and with two upper bounds (HTTP alone, the model alone), on one machine.

    scripts/bench [--only NAME ...] [--models NAME ...] [--rounds N] [--seconds S] [--quick] [--around COMMAND]
                  [--baseline FOLDER [--module MODULE]]

A contender is a server or a loop that is measured. A load is one kind of request. In every round and for each model,
the benchmark starts each contender, compares its answers with the model's, measures it under each of its loads, and
stops it. The order of the contenders changes from round to round. An interrupted run resumes if the code, the models
and the settings are unchanged. A complete run of at least five rounds writes docs/figures/bench.json,
docs/figures/bench.png and the tables of docs/benchmarks.md; any other run writes to build/bench/. Clients and servers
share the machine. Linux only.

With `--baseline`, FOLDER is another checkout of Wane, and only Wane's servers are measured unless `--only` is given.
The same interpreter starts the servers of both checkouts. The servers of the two checkouts run at the same time. Each
load is applied to one of the two servers, and then to the other. In each round, a figure of this checkout's server is
divided by the same figure of the other server. The table shows these ratios.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.bench import environments, plot, tables, wrk
from benchmarks.bench.baseline import Baseline, comparisons
from benchmarks.bench.connections import BadAnswer
from benchmarks.bench.contenders import LSTM, ROOT, Contender, contenders, wanes
from benchmarks.bench.process import ServerFailed
from benchmarks.bench.results import Results, Rounds
from benchmarks.bench.run import Run, visit_path
from benchmarks.bench.services import ServiceMissing, require_services
from benchmarks.bench.subjects import MODELS, WORK, empty, export_lstm
from benchmarks.bench.targets import targets
from benchmarks.bench.visit import visit
from benchmarks.bench.wire import WrongAnswer
from benchmarks.page import put_all

PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
WHOLE_ROUNDS = 5
WIDTH = 160
"""Width in characters of tables that are written to a file."""

FAILURES = (ServerFailed, WrongAnswer, wrk.LoadFailed, BadAnswer, httpx.HTTPError, OSError)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rounds, seconds = (1, 1) if options.quick else (options.rounds, options.seconds)
    baseline = Baseline(options.baseline.resolve(), options.module) if options.baseline else None
    everyone = [wane.name for wane in wanes()] if baseline else list(contenders())
    names, models = options.only or everyone, options.models
    run = Run(names, models, rounds, seconds, options.workers, baseline)
    if options.visit is not None:
        name, model, round_, folder = options.visit
        visited(run.together(name), model, int(round_), seconds, Path(folder))
        return
    console = Console(stderr=True)
    prepare(names, models, console)
    failed = run.go(shlex.split(options.around), console)
    if visits := run.visits():
        whole = not failed and not options.workers and rounds >= WHOLE_ROUNDS
        whole = whole and not baseline and names == list(contenders()) and models == list(MODELS)
        found = Rounds(visits)
        results = empty(models, rounds, seconds).having(found, targets(found), comparisons(found, models))
        report(results, FIGURES if whole else WORK, PAGE if whole else None)
    if failed:
        raise SystemExit(
            f"bench: these measurements failed and are not in the results: {', '.join(failed)}; "
            "run the same command to retry them"
        )


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        "scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(contenders()),
        metavar="NAME",
        help=f"contenders to measure: {', '.join(contenders())}",
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: both")
    parser.add_argument("--rounds", type=positive, default=WHOLE_ROUNDS, help=f"default {WHOLE_ROUNDS}")
    parser.add_argument("--seconds", type=positive, default=5, help="duration of one load in one round (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round of one second, as a smoke test")
    parser.add_argument(
        "--around",
        default="",
        metavar="COMMAND",
        help="prefix of the command of each measuring process, such as `taskset -c 0,1`",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="number of model processes of each peer (default: the peer's own setting)",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FOLDER",
        help="another checkout of Wane, whose server is compared with this checkout's",
    )
    parser.add_argument(
        "--module", default="wane", help="the baseline's server is started as `python -m MODULE serve` (default: wane)"
    )
    parser.add_argument("--visit", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def visited(together: list[Contender], model: str, round_: int, seconds: float, folder: Path) -> None:
    """Measures the contenders `together` in this process and writes the results. `together` has one contender, or a
    server of this checkout and the same server of the baseline. The caller runs this function in a process of its own,
    so that the process's exit releases all resources."""
    try:
        for found in visit(together, MODELS[model], round_, seconds, WORK / "logs"):
            found.write(visit_path(folder, round_, model, found.contender))
    except FAILURES as error:
        raise SystemExit(f"{together[0].name}: {error}") from error


def prepare(names: list[str], models: list[str], console: Console) -> None:
    """Checks that wrk and the contenders' services are installed, and creates the peers' environments and the LSTM's
    bundle."""
    try:
        wrk.require_wrk()
        for name in names:
            contender = contenders()[name]
            require_services(contender.services)
            if contender.requirements is not None:
                console.print(f"environment of {contender.title}")
            environments.install(contender)
    except (wrk.LoadFailed, ServiceMissing, environments.NotInstalled) as error:
        raise SystemExit(f"bench: {error}") from error
    if LSTM in models:
        export_lstm()


def report(results: Results, folder: Path, page: Path | None) -> None:
    """Prints the tables, and writes the JSON and the plot to `folder`. Also writes the tables into the Markdown file
    `page`, unless `page` is None."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    tables.show(results, console)
    results.write(folder / "bench.json")
    plot.save(results, folder / "bench.png")
    plot.save_two(results, folder / "steps.png")
    if page is not None:
        put_all(page, tables.page_tables(results))
    console.print(f"{folder / 'bench.json'}, {folder / 'bench.png'}")


if __name__ == "__main__":
    main()
