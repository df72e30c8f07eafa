"""Measures the theorems of Miller and Hardt ("Stable recurrent models", 2019) on random instances.

    python -m research.theory [--seeds N] [--json FILE] [--figures DIR] [--page FILE]

Writes the results, the figures and the tables of research/theory.md. Each measured curve is compared with its bound at
every point and for every seed. The exit status is 1, and the curve is named, if a curve leaves its bound. Takes about
two minutes of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from benchmarks.page import PageError, put_all
from benchmarks.summary import provenance, write_json
from research.theory.curve import departures
from research.theory.plots import plot_all
from research.theory.results import compute, stages
from research.theory.tables import all_of

PAGE = Path("research/theory.md")
FIGURES = Path("research/figures")


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes and checks. Returns the exit status: 1 if a curve leaves its bound, 2 for invalid input."""
    parser = argparse.ArgumentParser(
        "python -m research.theory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of instances of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=FIGURES / "theory.json", help="default: %(default)s")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the figures (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="page of the tables (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, not {options.seeds}")
    torch.set_num_threads(1)
    console = Console(stderr=True)
    began = time.monotonic()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=stages())
        found = compute(range(options.seeds), lambda: progress.advance(task))
    wall = {"wall_s": round(time.monotonic() - began, 1)}
    origin = provenance("research.theory", "torch", "numpy", bundles=[found["served"]["bundle"]])
    write_json(options.json, {**origin, **wall, **found})
    plot_all(found, options.figures)
    tables = all_of(found)
    for name, lines in tables.items():
        show(name, lines)
    try:
        put_all(options.page, tables)
    except PageError as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 2
    left = departures({key: found[key] for key in found if key != "seeds"})
    for line in left:
        console.print(line, style="bold red", markup=False)
    return 1 if left else 0


def show(title: str, lines: list[str]) -> None:
    """Prints a table of the page."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
