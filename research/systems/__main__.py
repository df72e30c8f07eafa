"""Runs the lectures' systems, and writes research/systems.md and its figures.

    python -m research.systems [NAME ...]   all systems, or only those of these names, such as `attention`
    python -m research.systems --render     only makes the page and the figures from the stored results

Each system does its task with several seeds, and every reached value is compared with its known answer. The command
fails if a seed misses one. It takes a few minutes on one core. Results are stored in research/figures/systems.json as
soon as a system is finished.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import research.systems
from benchmarks.page import markdown, put
from benchmarks.summary import Spread, provenance, write_json
from research.systems import plots
from research.systems.system import System

PAGE, TABLE = Path("research/systems.md"), "systems"
FIGURES = Path("research/figures")
RESULTS = FIGURES / "systems.json"
NAMES = sorted(
    {module.name for module in pkgutil.iter_modules(research.systems.__path__)} - {"__main__", "plots", "system"}
)

Found = dict[str, Any]
"""The results of one system, as JSON stores them."""


def system(name: str) -> System:
    """Returns the system that the module of this name describes."""
    found: System = importlib.import_module(f"research.systems.{name}").SYSTEM
    return found


def measure(this: System, advance: Callable[[], None]) -> Found:
    """Does a system's task with each seed. Returns the spread of every answer over the seeds, the number of seeds that
    reached it, the processor's seconds of a seed, and the first seed's curves. Raises ValueError if a reached value is
    not finite."""
    runs, seconds = [], []
    for seed in range(this.seeds):
        start = time.process_time()
        runs.append(this.measure(seed))
        seconds.append(time.process_time() - start)
        advance()
    answers = {}
    for same in zip(*(run.answers for run in runs), strict=True):
        if not all(math.isfinite(answer.reached) for answer in same):
            raise ValueError(f"{this.title}: {same[0].what}: a seed reached a value that is not finite")
        known = [answer.known for answer in same if answer.known is not None]
        answers[same[0].what] = {
            "relation": same[0].relation,
            "known": Spread.of(known) if known else None,
            "within": max(answer.within for answer in same),
            "reached": Spread.of(answer.reached for answer in same),
            "held": sum(answer.holds for answer in same),
        }
    return {"seeds": this.seeds, "seconds": Spread.of(seconds), "answers": answers, "curves": runs[0].curves}


def read(path: Path) -> dict[str, Found]:
    """Reads the results of all systems. Returns none if there is no file."""
    found: dict[str, Found] = json.loads(path.read_bytes())["systems"] if path.exists() else {}
    return found


def short(spread: dict[str, float]) -> str:
    """Returns a spread with four digits, or one number if all seeds agree in these digits."""
    text = f"{Spread.model_validate(spread):.4g}"
    middle, _, ends = text.partition(" ")
    return middle if ends == f"({middle} to {middle})" else text


def known(answer: Found) -> str:
    """Returns the known answer as text, with its relation and its tolerance."""
    if answer["known"] is None:
        return "none"
    words = "" if answer["relation"] == "equals" else f"{answer['relation']} "
    return words + short(answer["known"]) + (f" ± {answer['within']:.2g}" if answer["within"] else "")


def reached(answer: Found, seeds: int) -> str:
    """Returns the reached values as text, and how many of the seeds reached the known answer, if there is one."""
    count = "" if answer["known"] is None else f", {answer['held']} of {seeds}"
    return short(answer["reached"]) + count


def missed(results: dict[str, Found]) -> list[str]:
    """Returns the answers that some seed did not reach."""
    return [
        f"{name}: {what}"
        for name, found in results.items()
        for what, answer in found["answers"].items()
        if answer["held"] < found["seeds"]
    ]


def table(results: dict[str, Found]) -> list[str]:
    """Returns the table of the page, one row for each system."""
    rows = []
    for name, found in sorted(results.items()):
        this, answers = system(name), found["answers"]
        rows.append(
            [
                f"[{this.title}](systems/{name}.py)",
                this.source,
                f"`{this.source_equation}`",
                f"`{this.our_equation}`",
                this.task,
                "<br>".join(f"{what}: {known(answer)}" for what, answer in answers.items()),
                "<br>".join(reached(answer, found["seeds"]) for answer in answers.values()),
                f"{Spread.model_validate(found['seconds']):.1f}",
            ]
        )
    names = [
        "system",
        "source",
        "its equation",
        "ours",
        "task",
        "known answers",
        "reached by seeds",
        "CPU seconds a seed",
    ]
    return markdown(names, rows)


def show(results: dict[str, Found], names: Iterable[str]) -> None:
    """Prints the answers."""
    printed = Table("system", "answer", "known", "reached by seeds")
    for name in names:
        for what, answer in results[name]["answers"].items():
            printed.add_row(name, what, known(answer), reached(answer, results[name]["seeds"]))
    Console().print(printed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m research.systems", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(NAMES)}")
    parser.add_argument("--render", action="store_true", help="only make the page and the figures")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no system {', '.join(sorted(unknown))}, only {', '.join(NAMES)}")
    names = options.names or NAMES
    if not options.render:
        torch.set_num_threads(1)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[name]}"))
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("seeds", total=sum(system(name).seeds for name in names), name="")
            for name in names:
                progress.update(task, name=name)
                found = measure(system(name), lambda: progress.advance(task))
                stored = dict(sorted({**read(options.json), name: found}.items()))
                write_json(options.json, {**provenance("research.systems", "torch", bundles=()), "systems": stored})
    results = read(options.json)
    if lacking := sorted(set(names) - set(results)):
        parser.error(f"{options.json} has no results of {', '.join(lacking)}")
    for name in names:
        if name in plots.FIGURES:
            plots.plot(name, results[name]["curves"], options.figures / f"systems_{name}.png")
    put(options.page, TABLE, table(results))
    show(results, names)
    for miss in missed(results):
        print(f"missed by some seed: {miss}", file=sys.stderr)
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
