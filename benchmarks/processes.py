"""Compares training in two processes with training in one process with two threads, on this machine's CPUs.

    python -m benchmarks.processes TEXT [--rounds N] [--seconds S] [--json FILE]
    python -m benchmarks.processes --render

The benchmark trains shipped experiments on TEXT, with the shipped vocabulary. Every round measures each setting (a
number of processes and of threads) once, in new processes. Whole training steps are timed, without evaluations and
checkpoints. `--render` writes the stored figures into docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.page import markdown, put
from benchmarks.summary import Spread, provenance, ratios, write_json
from wane.training.config import DataConfig, Experiment
from wane.training.data import load_corpus
from wane.training.group import Group
from wane.training.loop import Trainer
from wane.training.run_folder import RunFolder

EXPERIMENTS = ("rnn-stable", "lstm", "gated-stable")
VOCABULARY = Path("models/bundles/lstm/tokenizer.json")
PAGE, FIGURES = Path("docs/training.md"), Path("docs/figures/processes.json")
WARM_UP = 5
FOREVER = 1_000_000


@dataclass(frozen=True)
class Way:
    """One setting: the number of processes, and the number of threads of each process."""

    name: str
    processes: int
    threads: int

    def command(self) -> list[str]:
        """Returns the first words of the command that starts the processes. The caller appends the module's name."""
        if self.processes == 1:
            return [sys.executable, "-m"]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [sys.executable, "-m", *launcher, "-m", "--"]


WAYS = (
    Way("one process, one thread", 1, 1),
    Way("one process, two threads", 1, 2),
    Way("two processes, one thread each", 2, 1),
)
BESIDE, MEASURED = WAYS[1].name, WAYS[2].name


def speeds(text: Path, threads: int, seconds: float, group: Group) -> dict[str, float]:
    """Trains each experiment for a given number of seconds in this process. If torchrun has started several processes,
    they train together as one group. Returns tokens per second by experiment."""
    found = {}
    data = DataConfig(kind="text", path=text)
    corpus = group.from_first(lambda: load_corpus(data, VOCABULARY.read_text(encoding="utf-8")))
    for name in EXPERIMENTS:
        experiment = Experiment.read(Path(f"training/experiments/{name}.toml"))
        changed = {"threads": threads, "steps": FOREVER, "evaluate_every": FOREVER, "checkpoint_every": FOREVER}
        training = experiment.training.model_copy(update=changed)
        experiment = experiment.model_copy(update={"data": data, "training": training})
        with tempfile.TemporaryDirectory() as folder:
            steps = Trainer(experiment, corpus, RunFolder(Path(folder)), group).run()
            for _ in range(WARM_UP):
                next(steps)
            taken, begun = 0, time.perf_counter()
            while group.from_first(partial(before, begun + seconds)):
                for _ in range(WARM_UP):
                    next(steps)
                taken += WARM_UP
            found[name] = taken * training.batch * training.chunk / (time.perf_counter() - begun)
    return found


def before(end: float) -> bool:
    """Returns whether the current time, by `time.perf_counter`, is before `end`."""
    return time.perf_counter() < end


def measure(way: Way, text: Path, seconds: float) -> dict[str, float]:
    """Runs `speeds` in new processes, with the setting `way`. Returns tokens per second by experiment."""
    with tempfile.NamedTemporaryFile() as answer:
        arguments = [str(text), "--seconds", str(seconds), "--threads", str(way.threads), "--answer", answer.name]
        environment = os.environ | {"OMP_NUM_THREADS": str(way.threads)}
        subprocess.run([*way.command(), "benchmarks.processes", *arguments], env=environment, check=True)
        speeds: dict[str, float] = json.loads(Path(answer.name).read_text())
        return speeds


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns each experiment's tokens per second in every setting. Also returns the ratio of the tokens per second of
    two processes to those of two threads.

    `rounds` has one list for each setting. The list has one dict for each round: the tokens per second by experiment.
    """
    found = {}
    for name in EXPERIMENTS:
        by_way = {way: [one[name] for one in of_way] for way, of_way in rounds.items()}
        spreads = {way: Spread.of(values).model_dump() for way, values in by_way.items()}
        found[name] = {"tokens_per_s": spreads, "ratio": ratios(by_way[MEASURED], by_way[BESIDE]).model_dump()}
    return found


def lines(document: dict[str, Any]) -> list[str]:
    """Returns a Markdown table of medians with the smallest and the largest value of all rounds."""
    rows = []
    for name in EXPERIMENTS:
        found = document["experiments"][name]
        ratio = Spread(**found["ratio"])
        cells = [f"{Spread(**found['tokens_per_s'][way.name]):,.0f}" for way in WAYS]
        rows.append([f"`{name}`", *cells, f"{ratio.median:.2f}x ({ratio.least:.2f} to {ratio.most:.2f})"])
    return markdown(["tokens/s", *(way.name for way in WAYS), "two processes / two threads"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="file or folder of text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each experiment in each round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.render:
        put(PAGE, "processes", lines(json.loads(FIGURES.read_text(encoding="utf-8"))))
        return
    if options.text is None:
        parser.error("the argument TEXT is missing: give a file or a folder of text to train on")
    if options.answer:
        group = Group.join()
        found = speeds(options.text, options.threads, options.seconds, group)
        if group.first:
            options.answer.write_text(json.dumps(found))
        group.leave()
        return
    console = Console()
    told: dict[str, list[dict[str, float]]] = {way.name: [] for way in WAYS}
    for _ in track(range(options.rounds), "rounds", console=console, transient=True):
        for way in WAYS:
            told[way.name].append(measure(way, options.text, options.seconds))
    document = {
        **provenance("benchmarks.processes", "torch", bundles=[]),
        "rounds": options.rounds,
        "experiments": summary(told),
    }
    console.print("\n".join(lines(document)), markup=False, soft_wrap=True)
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
