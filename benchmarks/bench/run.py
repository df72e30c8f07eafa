"""Runs all visits of a benchmark, each in its own process. In a visit, one contender serves one model in one round, and
all its loads are measured. A visit is skipped if an earlier, interrupted run has written the visit's results."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.bench.baseline import Baseline
from benchmarks.bench.contenders import ROOT, Contender, contenders
from benchmarks.bench.results import Visit
from benchmarks.bench.subjects import WORK, facts, hashed

SOURCES = ("service", "models", "benchmarks/bench", "benchmarks/peers")
CODE = (".py", ".lua", ".toml", ".txt", ".json")


@dataclass(frozen=True)
class Run:
    """A run's contenders, models, number of rounds, and duration of each load in seconds.

    workers: the number of model processes of each peer; None for the peer's own setting. baseline: another checkout,
    whose server is compared with this checkout's server; None for a run without a comparison.
    """

    names: list[str]
    models: list[str]
    rounds: int
    seconds: int
    workers: int | None = None
    baseline: Baseline | None = None

    def plan(self) -> list[tuple[int, str, str]]:
        """Returns the round, the model and the contender of every visit, in order. The first contender changes from
        round to round."""
        count = len(self.names)
        return [
            (round_, model, self.names[(index + round_) % count])
            for round_ in range(self.rounds)
            for model in self.models
            for index in range(count)
        ]

    def folder(self) -> Path:
        """Returns the folder of the visits' results. The folder's name depends on the code, the models and the
        settings."""
        parts = [code(ROOT), *(json.dumps(facts(model)) for model in self.models), f"{self.seconds} {self.workers}"]
        if self.baseline is not None:
            parts.append(code(self.baseline.folder))
        return WORK / "runs" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def together(self, name: str) -> list[Contender]:
        """Returns the contenders that share a visit: the contender `name`, and the baseline's server with the same
        settings, if there is a baseline and the contender is Wane."""
        contender = contenders()[name]
        if self.workers and contender.kind == "windows":
            contender = replace(contender, workers=self.workers)
        return [contender, self.baseline.of(contender)] if self.baseline and contender.kind == "wane" else [contender]

    def go(self, around: Sequence[str], console: Console) -> list[str]:
        """Runs the visits that have no results yet. Returns the names of the visits that failed. around: words that
        precede the command of each visit."""
        folder, plan, failed = self.folder(), self.plan(), []
        own = [*around, sys.executable, "-m", "benchmarks.bench", "--seconds", str(self.seconds)]
        own += ["--workers", str(self.workers)] if self.workers else []
        own += ["--baseline", str(self.baseline.folder), "--module", self.baseline.module] if self.baseline else []
        for number, (round_, model, name) in enumerate(plan, start=1):
            if all(path.exists() for path in self.paths(folder, round_, model, name)):
                continue
            title = " and ".join(contender.title for contender in self.together(name))
            console.print(f"[{number}/{len(plan)}] round {round_ + 1}, {model}, {title}", markup=False)
            if status([*own, "--visit", name, model, str(round_), str(folder)]):
                failed.append(f"{model}-{name}-{round_}")
        return failed

    def paths(self, folder: Path, round_: int, model: str, name: str) -> list[Path]:
        """Returns the result files of one visit."""
        return [visit_path(folder, round_, model, contender.name) for contender in self.together(name)]

    def visits(self) -> list[Visit]:
        """Reads the completed visits."""
        folder = self.folder()
        paths = [path for planned in self.plan() for path in self.paths(folder, *planned)]
        return [Visit.read(path) for path in paths if path.exists()]


def code(root: Path) -> str:
    """Returns a hash of the code files in a checkout's folders SOURCES."""
    found = (path for folder in SOURCES for path in (root / folder).rglob("*"))
    return hashed(sorted(path for path in found if path.suffix in CODE and "bundles" not in path.parts), root)


def visit_path(folder: Path, round_: int, model: str, name: str) -> Path:
    return folder / f"{model}-{name}-{round_}.json"


def status(command: list[str]) -> int:
    """Runs a visit and returns its exit status. If this process is interrupted, terminates the visit and waits until
    the visit has stopped its server."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
