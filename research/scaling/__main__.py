"""Simulates fleets of 10^5 to 10^8 sessions from measured costs.

    python -m research.scaling [--core-hour P] [--gib-hour P] [--load SHARE]   writes docs/scaling.md
    python -m research.scaling measure [--seconds S]   measures the costs on the real stack: scaling_costs.json
    python -m research.scaling check [--seconds S]     measures the real stack under load: scaling_check.json

Each command takes about three minutes on two cores. `measure` and `check` need an idle machine. The simulation runs on
one core of any machine, and its results are reproducible. All commands need the extra `research`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from benchmarks.page import put_all
from benchmarks.summary import provenance, rounded, write_json
from research.scaling import check, costs, measure, tables
from research.scaling.plots import plot_all
from research.scaling.results import SESSIONS, compute

PAGE = Path("docs/scaling.md")
RESULTS = costs.FIGURES / "scaling.json"
STAGES = 1 + 6 * len(measure.POLICIES) + len(SESSIONS)


def show(title: str, lines: list[str]) -> None:
    """Prints a table of the page docs/scaling.md."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = Table(title=title)
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


def run(options: argparse.Namespace) -> None:
    """Simulates the fleets with the costs from the files of measurements, and writes docs/scaling.md."""
    wire_s = 1e-6 * options.wire_us
    by_policy = {policy: replace(costs.read(policy), wire_s=wire_s) for policy in measure.POLICIES}
    limits = costs.Limits(load=options.load)
    prices = costs.Prices(options.core_hour, options.gib_hour)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[stage]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("simulating", total=STAGES, stage="")
        result = compute(
            by_policy,
            limits,
            prices,
            wire_s,
            lambda stage: progress.update(task, advance=1, stage=stage),
        )
    checked = json.loads(check.FILE.read_text(encoding="utf-8"))
    result["check"] = check.simulate(costs.read("tail"), checked)
    result = rounded(result)
    result["costs"] = {policy: asdict(own) for policy, own in by_policy.items()}
    write_json(RESULTS, {**provenance("research.scaling", "numpy", "simpy"), **result})
    plot_all(result, checked)
    made = tables.all_of(result, checked)
    put_all(PAGE, made)
    for name, lines in made.items():
        show(name, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m research.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("run", "measure", "check"), default="run")
    parser.add_argument("--seconds", type=float, default=measure.SECONDS, help="seconds of each measured load")
    parser.add_argument(
        "--core-hour", type=float, default=costs.Prices().core_hour, help="price of a core, USD per hour"
    )
    parser.add_argument(
        "--gib-hour", type=float, default=costs.Prices().gib_hour, help="price of a GiB of memory, USD per hour"
    )
    parser.add_argument(
        "--load", type=float, default=costs.Limits().load, help="planned load as a share of a thread's time"
    )
    parser.add_argument(
        "--wire-us", type=float, default=100.0, help="one-way latency between two machines, microseconds"
    )
    options = parser.parse_args()
    if options.command == "measure":
        write_json(costs.FILE, {**provenance("research.scaling", "onnxruntime"), **measure.measure(options.seconds)})
    elif options.command == "check":
        write_json(check.FILE, {**provenance("research.scaling", "onnxruntime"), **check.measure(options.seconds)})
    else:
        run(options)


if __name__ == "__main__":
    main()
