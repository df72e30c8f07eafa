"""Wane beside its peers and the two ceilings, in one run on one machine.

    scripts/bench [--only NAME ...] [--models NAME ...] [--rounds N] [--seconds S] [--quick] [--around COMMAND]

Every round starts each contender in turn, each round in another order, on one model after the other; checks that it
answers what the model says; puts it under its loads; and stops it. A run that was stopped goes on where it was, as
long as the code, the models and the settings are the same. A whole run of five rounds or more writes
docs/figures/bench.json, docs/figures/bench.png and the tables of docs/benchmarks.md; any other, build/bench/.
Clients and servers share the machine. Linux only.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.bench import environments, plot, tables, wrk
from benchmarks.bench.connections import BadAnswer
from benchmarks.bench.contenders import ROOT, contenders
from benchmarks.bench.process import ServerFailed
from benchmarks.bench.results import Results, Visit
from benchmarks.bench.targets import LSTM, SHIPPED
from benchmarks.bench.visit import visit
from benchmarks.bench.wire import WrongAnswer

WORK = ROOT / "build" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
SOURCES = ("service", "models", "benchmarks/bench", "benchmarks/peers")
CODE = (".py", ".lua", ".toml", ".txt", ".json")
MODELS = {LSTM: WORK / "models" / LSTM, SHIPPED: ROOT / "models" / "bundles" / SHIPPED}
WHOLE_ROUNDS = 5
FAILURES = (ServerFailed, WrongAnswer, wrk.LoadFailed, BadAnswer, httpx.HTTPError, OSError)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.visit is not None:
        name, model, round_, out = options.visit
        visited(name, MODELS[model], int(round_), options.seconds, Path(out))
        return
    console = Console(stderr=True)
    names = options.only or list(contenders())
    rounds, seconds = (1, 1) if options.quick else (options.rounds, options.seconds)
    prepare(names, options.models, console)
    folder = run_folder(options.models, seconds)
    wanted = plan(names, options.models, rounds)
    failed = []
    for done, (round_, model, name) in enumerate(wanted):
        out = folder / f"{model}-{name}-{round_}.json"
        if out.exists():
            continue
        console.print(f"[{done + 1}/{len(wanted)}] round {round_ + 1}, {model}, {contenders()[name].title}")
        command = [*shlex.split(options.around), sys.executable, "-m", "benchmarks.bench", "--seconds", str(seconds)]
        if run([*command, "--visit", name, model, str(round_), str(out)]):
            failed.append(out.stem)
    visits = [
        Visit.read(folder / f"{model}-{name}-{round_}.json")
        for round_, model, name in wanted
        if (folder / f"{model}-{name}-{round_}.json").exists()
    ]
    results = empty(options.models, rounds, seconds).having(visits)
    whole = not (failed or options.only or options.quick) and rounds >= WHOLE_ROUNDS and options.models == list(MODELS)
    report(results, FIGURES if whole else WORK, PAGE if whole else None)
    if failed:
        console.print(f"failed, and left out: {', '.join(failed)}; the same command tries them again")
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(contenders()), metavar="NAME", help=f"of {', '.join(contenders())}"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: both")
    parser.add_argument("--rounds", type=positive, default=WHOLE_ROUNDS, help=f"default {WHOLE_ROUNDS}")
    parser.add_argument("--seconds", type=positive, default=5, help="of one load in one round (default 5)")
    parser.add_argument("--quick", action="store_true", help="one round of one second, to see that all of it works")
    parser.add_argument(
        "--around", default="", metavar="COMMAND", help="is given each visit's command to run, such as `taskset -c 0,1`"
    )
    parser.add_argument("--visit", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def run(command: list[str]) -> int:
    """The exit status of a visit. Where this process is ended meanwhile, the visit has time to stop its server."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def visited(name: str, bundle: Path, round_: int, seconds: float, out: Path) -> None:
    """One visit in a process of its own, so that whatever it leaves behind ends with it."""
    log = WORK / "logs" / f"{out.stem}.log"
    try:
        visit(contenders()[name], bundle, round_, seconds, log).write(out)
    except FAILURES as error:
        raise SystemExit(f"{name}: {error}") from error


def prepare(names: list[str], models: list[str], console: Console) -> None:
    """Everything that a run needs: wrk, the peers' environments, the benchmarks' own model."""
    try:
        wrk.require_wrk()
        for name in names:
            contender = contenders()[name]
            if contender.requirements is not None:
                console.print(f"environment of {contender.title}")
            environments.install(contender)
    except (wrk.LoadFailed, environments.NotInstalled) as error:
        raise SystemExit(f"bench: {error}") from error
    if LSTM in models:
        export_lstm()


def export_lstm() -> None:
    """The LSTM's bundle, anew where the code that makes it has changed."""
    sources = hashed([*sorted((ROOT / "models").rglob("*.py")), ROOT / "benchmarks" / "lstm256.py"])
    stamp = MODELS[LSTM].parent / f"{LSTM}.sources"
    if not MODELS[LSTM].exists() or not stamp.exists() or stamp.read_text() != sources:
        shutil.rmtree(MODELS[LSTM], ignore_errors=True)
        subprocess.run([sys.executable, "-m", "benchmarks.lstm256", str(MODELS[LSTM].parent)], cwd=ROOT, check=True)
        stamp.write_text(sources)


def run_folder(models: list[str], seconds: int) -> Path:
    """Where this run's visits are kept: another folder for other code, models or seconds."""
    found = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    files = sorted(path for path in found if path.suffix in CODE and "bundles" not in path.parts)
    parts = [hashed(files), *(json.dumps(facts(model)) for model in models), str(seconds)]
    return WORK / "runs" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def hashed(files: list[Path]) -> str:
    """One hash of many files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def plan(names: list[str], models: list[str], rounds: int) -> list[tuple[int, str, str]]:
    """Every visit: rounds, in each all models, in each all contenders, who begins changing from round to round."""
    return [
        (round_, model, names[(index + round_) % len(names)])
        for round_ in range(rounds)
        for model in models
        for index in range(len(names))
    ]


def facts(model: str) -> dict[str, str]:
    """What is told of a model: what it is, and the hashes of its weights and of the graph that all run."""
    manifest = json.loads((MODELS[model] / "manifest.json").read_text(encoding="utf-8"))
    made = manifest["architecture"]
    units = made.get("units") or made["hidden"]
    about = f"{made['layers']} x {made['cell']} of {units}, vocabulary {made['vocabulary_size']:,}"
    files = manifest["files"]
    return {"about": about, "weights": files[manifest["weights"]], "window": files[manifest["graphs"]["window"]]}


def empty(models: list[str], rounds: int, seconds: float) -> Results:
    """A run of which nothing is known but what it is of."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return Results(
        created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=git.stdout.strip() or None,
        machine={"cpu": cpu(), "cores": f"{os.cpu_count()} cores", "python": f"Python {platform.python_version()}"},
        seconds=seconds,
        rounds=rounds,
        models={model: facts(model) for model in models},
    )


def cpu() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def report(results: Results, folder: Path, page: Path | None) -> None:
    """The tables in the terminal; JSON, figure and page as files."""
    console = Console()
    tables.show(results, console)
    results.write(folder / "bench.json")
    plot.save(results, folder / "bench.png")
    if page is not None:
        tables.put_tables(results, page)
    console.print(f"{folder / 'bench.json'}, {folder / 'bench.png'}")


if __name__ == "__main__":
    main()
