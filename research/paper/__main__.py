"""Makes the experiments of Miller and Hardt ("Stable recurrent models", 2019) again.

    python -m research.paper NAME ... --data FOLDER [--work FOLDER]
    python -m research.paper all --data FOLDER
    python -m research.paper all --smoke      on generated data, with tiny networks
    python -m research.paper NAME ... --data FOLDER --finished    tables of the runs that are finished so far
    python -m research.paper NAME ... --render

NAME is a task (`jsb`, `atis`, `ptb`, `words`), or a figure: `gradients` and `distance` use the networks of `words`, and
`memory` those of all tasks. FOLDER of --data has the folders `jsb`, `atis`, `ptb` and `wikitext-2`.

Results are stored in research/figures/paper_NAME.json; tables and figures are put into research/paper.md. Every run is
stored in the folder of --work as soon as it is finished. If the program is started again, it goes on from there. On one
core, `jsb` takes about an hour, `atis` two hours, `ptb` two hours and `words` three hours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from benchmarks.page import put
from benchmarks.summary import digits, provenance, write_json
from research.paper import atis, characters, jsb, words
from research.paper.corpora import Corpus
from research.paper.generated import generate
from research.paper.gradients import gradient_norms
from research.paper.network import PaperNetwork
from research.paper.plots import plot_distances, plot_gradients, plot_memory
from research.paper.tables import distance_table, gradient_table, label, memory_table, task_table
from research.paper.task import Task
from research.paper.training import Run, finished, train
from wane.training.errors import DataError

TASKS = {module.TASK.name: module.TASK for module in (jsb, atis, characters, words)}
FIGURES = ("gradients", "distance", "memory")
PAGE, STORED = Path("research/paper.md"), Path("research/figures")
WORK = Path.home() / ".cache" / "wane" / "paper"

Found = dict[str, Any]
Advance = Callable[[], None]


class Paper:
    """The tasks with their data, and the folders of their results."""

    def __init__(
        self, tasks: dict[str, Task], data: Path, work: Path, checked: bool, only_finished: bool = False
    ) -> None:
        self.tasks, self.work, self._only_finished = tasks, work, only_finished
        self._data, self._checked = data, checked
        self._corpora: dict[str, Corpus] = {}

    def corpus(self, name: str) -> Corpus:
        """Returns the data of a task. Raises DataError."""
        if name not in self._corpora:
            task = self.tasks[name]
            self._corpora[name] = task.read(self._data / task.folder, self._checked)
        return self._corpora[name]

    def train(self, name: str, advance: Advance) -> list[Found]:
        """Returns the records of all runs of a task."""
        task, corpus = self.tasks[name], self.corpus(name)
        if self._only_finished:
            found = [finished(corpus, task.recipe, run, self.work) for run in task.runs()]
            return [record for record in found if record is not None]
        return [train(corpus, task.recipe, run, self.work, advance) for run in task.runs()]

    def steps(self, name: str) -> int:
        """Returns how often the experiment calls `advance`."""
        if name in self.tasks:
            return len(self.tasks[name].runs()) * self.tasks[name].recipe.epochs
        return sum(map(self.steps, self.tasks)) if name == "memory" else self.steps("words")

    def measure(self, name: str, advance: Advance) -> Found:
        """Returns the results of an experiment."""
        if name in self.tasks:
            return {"records": self.train(name, advance)}
        if name == "memory":
            return {"records": {task: self.train(task, advance) for task in self.tasks}}
        done = [record["run"] for record in self.train("words", advance)]
        runs = [run for run in self.tasks["words"].runs() if run.window is None and asdict(run) in done]
        if name == "gradients":
            corpus = self.corpus("words")
            return {"norms": {_label(run): gradient_norms(self._network(run), corpus) for run in runs}}
        (window,) = self.tasks["words"].windows
        pairs = [(run, replace(run, window=window)) for run in runs]
        return {"distances": {_label(run): self._distances(run, cut) for run, cut in pairs if asdict(cut) in done}}

    def _network(self, run: Run) -> PaperNetwork:
        task = self.tasks[run.task]
        network = PaperNetwork(self.corpus(run.task), run.cell, task.recipe.shapes[run.cell], run.bidirectional)
        network.load_state_dict(self._trained(run)["network"])
        return network

    def _trained(self, run: Run) -> Found:
        found: Found = torch.load(self.work / f"{run.name}.weights.pt", weights_only=True)
        return found

    def _distances(self, run: Run, other: Run) -> dict[int, float]:
        """Returns the relative distance of two trainings' recurrent weights, by the optimiser's step."""
        recurrent, truncated = self._trained(run)["snapshots"], self._trained(other)["snapshots"]
        return {
            step: digits(float((recurrent[step] - truncated[step]).norm() / recurrent[step].norm()))
            for step in sorted(recurrent.keys() & truncated.keys())
        }


def _label(run: Run) -> str:
    return label(TASKS[run.task], (run.bidirectional, run.cell, run.stable, run.window))


def render(name: str, tasks: dict[str, Task], found: Found, page: Path, figures: Path) -> None:
    """Puts an experiment's table into the page, and writes its figure. Raises PageError."""
    if name in tasks:
        put(page, name, task_table(tasks[name], found["records"]))
    elif name == "memory":
        some = [task for task in tasks.values() if found["records"][task.name]]
        put(page, name, memory_table(some, found["records"]))
        plot_memory(some, found["records"], figures / "paper_memory.png")
    elif name == "gradients":
        put(page, name, gradient_table(found["norms"]))
        plot_gradients(found["norms"], figures / "paper_gradients.png")
    else:
        put(page, name, distance_table(found["distances"]))
        plot_distances(found["distances"], figures / "paper_distance.png")


def main(arguments: list[str] | None = None) -> int:
    """Runs the program. Returns the exit status: 2 for invalid input."""
    parser = argparse.ArgumentParser(
        "python -m research.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=[*TASKS, *FIGURES, "all"])
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of the data")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--full", action="store_true", help="the source's sizes, for a GPU")
    parser.add_argument("--finished", action="store_true", help="only the runs that are finished; trains nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on generated data")
    parser.add_argument("--render", action="store_true", help="only make tables and figures from the stored results")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--figures", type=Path, default=STORED, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if not (options.data or options.smoke or options.render):
        parser.error("--data FOLDER is required")
    names = [*TASKS, *FIGURES] if "all" in options.names else list(dict.fromkeys(options.names))
    tasks = dict(TASKS)
    if options.full:
        tasks = {name: replace(task, recipe=task.full or task.recipe) for name, task in tasks.items()}
    torch.set_num_threads(1)
    console = Console(stderr=True)
    try:
        if options.smoke:
            tasks = {name: task.small() for name, task in tasks.items()}
            with tempfile.TemporaryDirectory() as folder:
                generate(Path(folder))
                return _run(names, Paper(tasks, Path(folder), Path(folder) / "work", checked=False), options, console)
        return _run(names, Paper(tasks, options.data, options.work, True, options.finished), options, console)
    except DataError as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 2


def _run(names: list[str], paper: Paper, options: argparse.Namespace, console: Console) -> int:
    columns = (TextColumn("{task.description}"), *Progress.get_default_columns()[1:], MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        for name in names:
            stored = options.figures / f"paper_{name}.json"
            if not options.render:
                task = progress.add_task(name, total=paper.steps(name))
                began = time.monotonic()
                found = paper.measure(name, lambda task=task: progress.advance(task))  # type: ignore[misc]
                wall = {"wall_s": round(time.monotonic() - began, 1)}
                origin = provenance("research.paper", "torch", "numpy", "scipy", bundles=[])
                write_json(stored, {**origin, **wall, **found})
            render(name, paper.tasks, json.loads(stored.read_bytes()), options.page, options.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
