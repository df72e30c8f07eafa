"""Compares the families of models that the sources compare, at equal weights and equal training.

    OMP_NUM_THREADS=1 nice -n 19 python -m research.families --data FOLDER --work FOLDER [--only NAME ...] [--trained]
    python -m research.families --render

`--data` has WikiText-2's word-level files. For each experiment of training/experiments/families, the command trains a
run in `--work`/runs (it resumes a run that was begun) and exports a bundle to `--work`/bundles. With `--trained` it
trains nothing, and leaves out the families that have no bundle.

Then one server serves all bundles, and the command measures them in turns, by the code of `wane compare`
(`service/cli/side_by_side.py`, which says what each figure is): perplexity on the first `--tokens` tokens of the test
split, perplexity and proofs of windows at `--positions` of them, the bytes of a session's state, and the times of steps
and of windows.

Training tokens a second are measured in this process: the command trains each network for a few steps, in turns, and
counts the processor time, which other programs change less than the time on the clock. One thread trains, so a second
of the processor is a second of the clock on a core that does nothing else.

The figures replace those in the JSON file. The tables of the page and the plot are made from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import Progress

from benchmarks.bench.contenders import Contender
from benchmarks.bench.process import ServerProcess
from benchmarks.page import markdown, put_all
from benchmarks.summary import provenance, rounded, write_json
from research.proofs import read_stream
from wane.models.bundle import Bundle
from wane.models.layer_registry import Frozen
from wane.service.cli import render
from wane.service.cli.connect import connect
from wane.service.cli.load import Load
from wane.service.cli.measure import choose
from wane.service.cli.side_by_side import (
    CONNECTIONS,
    WINDOW,
    WITHIN,
    Compared,
    ModelFigures,
    Spread,
    measure_models,
)
from wane.training.config import Experiment
from wane.training.data import Corpus, load_corpus
from wane.training.loop import Trainer
from wane.training.run import export_run, train
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "training" / "experiments" / "families"
NAMES = tuple(sorted(path.stem for path in EXPERIMENTS.glob("*.toml")))
FIGURES, PAGE = ROOT / "research" / "figures" / "families.json", ROOT / "docs" / "families.md"
SHOWN_WINDOWS = (1, 4, 16, 64)
TRAINED_STEPS, WARM_UP_STEPS = 8, 2
READY_WITHIN_S = 600
SERVER = (
    "{bin}/wane",
    "serve",
    "--bundles={bundle}",
    "--port={ports[0]}",
    "--log-level=warning",
    "--request-timeout-ms=600000",
)


class Family(Frozen):
    """The figures of one family. weights_hash: the SHA-256 of its weights file. training_tokens_per_s: per second of
    processor time."""

    weights_hash: str
    figures: ModelFigures
    training_tokens_per_s: Spread


def bundles_of(options: argparse.Namespace, console: Console) -> dict[str, Path]:
    """Returns the bundle of each family. Trains and exports the families that have none, unless `--trained` is
    given."""
    found = {}
    for name in options.only or NAMES:
        bundle = options.work / "bundles" / name
        if not (bundle / "manifest.json").exists():
            if options.trained:
                console.print(f"{name} has no bundle yet")
                continue
            run = options.work / "runs" / name
            command = f"python -m research.families --only {name}"
            train(Experiment.read(EXPERIMENTS / f"{name}.toml"), options.data, run, None, command, console)
            export_run(run, options.work / "bundles", options.data, "1", console)
        found[name] = bundle
    return found


@contextmanager
def served(bundles: dict[str, Path], console: Console) -> Iterator[str]:
    """Serves the bundles. Yields the server's URL when all are loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundles"
        folder.mkdir()
        for name, path in bundles.items():
            (folder / name).symlink_to(path.resolve())
        with ServerProcess(Contender("wane", "Wane", "wane", SERVER), folder, Path(scratch) / "log") as server:
            until = time.monotonic() + READY_WITHIN_S
            with console.status("loading the models"), httpx.Client(base_url=server.url, timeout=60) as client:
                while True:
                    try:
                        answer = client.get("/readyz")
                    except httpx.TransportError:
                        answer = None
                    if answer is not None and answer.is_success:
                        break
                    if time.monotonic() > until:
                        raise SystemExit(f"the server is not ready: {(Path(scratch) / 'log').read_text()[-2000:]}")
                    time.sleep(0.2)
            yield server.url


def measured(
    bundles: dict[str, Path], data: Path, tokens: int, positions: int, console: Console
) -> dict[str, ModelFigures]:
    """Measures all bundles, served by one server."""
    (stream, *others) = [read_stream(Bundle.read(path), data, "test") for path in bundles.values()]
    assert all(list(stream) == list(other) for other in others), "the families have different vocabularies"
    text = [stream[1 : 1 + tokens].tolist()]  # a model reads the first <eos> as its start token
    with served(bundles, console) as url, connect(url, None) as client, Progress(console=console) as progress:
        load = Load(url)
        models = [Compared(client, load, choose(client, name), text, None, positions) for name in bundles]
        found = measure_models(models, progress)
    return {one.model: one for one in found}


def training_rates(names: Sequence[str], data: Path, console: Console) -> dict[str, Spread]:
    """Returns the training tokens per second of processor time, from TRAINED_STEPS steps of each network, in turns."""
    corpora: dict[str, Corpus] = {}
    rates: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console) as progress:
        trainers = {}
        for name in names:
            experiment = Experiment.read(EXPERIMENTS / f"{name}.toml")
            of_data = experiment.data.model_copy(update={"path": data})
            key = of_data.model_dump_json()
            if key not in corpora:
                corpora[key] = load_corpus(of_data)
            trainers[name] = Trainer(experiment, corpora[key], RunFolder(Path(scratch) / name))
        steps = {name: trainer.run() for name, trainer in trainers.items()}
        task = progress.add_task("training speed", total=len(names) * (WARM_UP_STEPS + TRAINED_STEPS))
        for _ in range(WARM_UP_STEPS + TRAINED_STEPS):
            for name, trainer in trainers.items():
                begun = time.process_time()
                next(steps[name])
                rates[name].append(trainer.step_tokens / (time.process_time() - begun))
                progress.advance(task)
    return {name: Spread.of(found[WARM_UP_STEPS:]) for name, found in rates.items()}


def read(path: Path) -> dict[str, Family]:
    """Returns the stored figures by family."""
    if not path.exists():
        return {}
    return TypeAdapter(dict[str, Family]).validate_python(json.loads(path.read_text())["families"])


def ranked(found: dict[str, Family]) -> list[tuple[str, Family]]:
    """Returns the families, best perplexity first."""
    return sorted(found.items(), key=lambda each: each[1].figures.perplexity)


def table(found: dict[str, Family]) -> list[str]:
    """Returns the page's table."""
    names = (
        "family",
        "weights",
        "memory",
        "perplexity",
        *(f"k = {k}" for k in SHOWN_WINDOWS),
        f"smallest k within {100 * (WITHIN - 1):.0f} %",
        "state of a session",
        "step, ms",
        "window, ms",
        f"tokens/s at {CONNECTIONS}",
        f"proved at {WINDOW}",
        "training tokens/s",
    )
    rows = []
    for name, family in ranked(found):
        one = family.figures
        rows.append(
            [
                f"`{name}`",
                f"{one.weights:,}",
                "fades" if one.reach is None else f"{one.reach + 1:,} tokens",
                f"{one.perplexity:.2f}",
                *(f"{one.by_k[k]:.2f}" if k in one.by_k else "-" for k in SHOWN_WINDOWS),
                "none" if one.smallest_k is None else str(one.smallest_k),
                f"{one.state_bytes:,} B",
                of(one.step_ms, ".2f"),
                of(one.window_ms, ".2f"),
                of(one.tokens_per_s, ",.0f"),
                "-" if one.proved is None else f"{one.proved:.1%}".replace("%", " %"),
                of(family.training_tokens_per_s, ",.0f"),
            ]
        )
    return markdown(names, rows)


def of(value: Spread, form: str) -> str:
    """Returns a median, and the least and the largest value in brackets."""
    return f"{value.median:{form}} ({value.least:{form}} to {value.most:{form}})"


def listed(names: Sequence[str]) -> str:
    """Returns names as a part of a sentence."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def plural(count: int) -> str:
    return f"{count} model{'' if count == 1 else 's'}"


def missing(found: dict[str, Family]) -> list[str]:
    """Returns the sentence that names the families without figures."""
    names = [name for name in NAMES if name not in found]
    if not names:
        return [f"All {len(NAMES)} families are in the table."]
    return [f"Not in the table, because they are not trained yet: {listed(names)}."]


def findings(found: dict[str, Family]) -> list[str]:
    """Returns what the figures say, as a list of sentences."""
    order = [(name, family.figures) for name, family in ranked(found)]
    fading = [(name, one) for name, one in order if one.reach is None]
    finite = [(name, one) for name, one in order if one.reach is not None]
    lines = []
    if fading and finite:
        (name, best), (other, second) = fading[0], finite[0]
        ratio = second.perplexity / best.perplexity
        lines.append(
            f"The best model whose memory fades is `{name}` with a perplexity of {best.perplexity:.2f}. The best with "
            f"a finite memory is `{other}` with {second.perplexity:.2f}, {100 * abs(ratio - 1):.1f} % "
            f"{'more' if ratio > 1 else 'less'}, from {(second.reach or 0) + 1:,} tokens."
        )
    if fading:
        short = [name for name, one in fading if one.smallest_k is not None and one.smallest_k <= WINDOW]
        long = [name for name, _ in fading if name not in short]
        lines.append(
            f"Of {plural(len(fading))} whose memory fades, {len(short)} lose{'s' if len(short) == 1 else ''} less than "
            f"{100 * (WITHIN - 1):.0f} % in windows of {WINDOW} tokens{f': {listed(short)}' if short else ''}."
            + (f" {listed(long)} need{'s' if len(long) == 1 else ''} more." if long else "")
        )
        proving = [name for name, one in fading if one.proved]
        lines.append(
            f"{listed(proving) if proving else 'None of them'} prove{'s' if len(proving) < 2 else ''} first tokens "
            f"from windows of {WINDOW}. For the other models whose memory fades, a window without the tokens before is "
            "only as good as it was measured to be."
        )
    if finite:
        whole = [name for name, one in finite if one.window > (one.reach or 0)]
        lines.append(
            f"Of {plural(len(finite))} with a finite memory, {len(whole)} {'has' if len(whole) == 1 else 'have'} all "
            f"of it in a window of {WINDOW}{f': {listed(whole)}' if whole else ''}. Such a window has the answer of "
            "the whole text."
        )
    if len(order) > 1:
        step = sorted(order, key=lambda each: each[1].step_ms.median)
        state = sorted(order, key=lambda each: each[1].state_bytes or 0)
        rate = sorted(found.items(), key=lambda each: -each[1].training_tokens_per_s.median)
        lines.append(
            f"A step takes from {step[0][1].step_ms.median:.2f} ms (`{step[0][0]}`) to "
            f"{step[-1][1].step_ms.median:.2f} ms (`{step[-1][0]}`); a session's state from "
            f"{state[0][1].state_bytes:,} B (`{state[0][0]}`) to {state[-1][1].state_bytes:,} B (`{state[-1][0]}`)."
        )
        lines.append(
            f"A second of one core trains from {rate[-1][1].training_tokens_per_s.median:,.0f} tokens "
            f"(`{rate[-1][0]}`) to {rate[0][1].training_tokens_per_s.median:,.0f} (`{rate[0][0]}`)."
        )
    return [f"- {line}" for line in lines]


def tables(found: dict[str, Family]) -> dict[str, list[str]]:
    """Returns the generated parts of the page."""
    return {"families": table(found), "missing": missing(found), "findings": findings(found)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder of the runs and bundles")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES)
    parser.add_argument("--trained", action="store_true", help="only measure the families whose bundles are there")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of the test split for perplexity")
    parser.add_argument("--positions", type=int, default=1024, help="positions of windows and of proofs")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--render", action="store_true", help="only make the tables and the plot from the JSON")
    options = parser.parse_args(arguments)
    if not options.render and (options.data is None or options.work is None):
        parser.error("--data FOLDER with WikiText-2 and --work FOLDER are required without --render")
    if min(options.tokens, options.positions) < 1:
        parser.error("--tokens and --positions must be at least 1")
    console = Console(stderr=True)
    if not options.render:
        bundles = bundles_of(options, console)
        if not bundles:
            parser.error(f"{options.work} has no bundles")
        rates = training_rates(list(bundles), options.data, console)
        figures = measured(bundles, options.data, options.tokens, options.positions, console)
        families = {}
        for name, path in bundles.items():
            manifest = Bundle.read(path).manifest
            families[name] = {
                "weights_hash": manifest.files[manifest.weights],
                "figures": asdict(figures[name]),
                "training_tokens_per_s": asdict(rates[name]),
            }
        made = provenance("research.families", "onnxruntime", "torch", bundles=())
        write_json(options.json, rounded({**made, "families": families}))
    found = read(options.json)
    if not found:
        parser.error(f"{options.json} has no figures yet")
    render.save_models([family.figures for family in found.values()], options.json.with_suffix(".png"), True)
    put_all(options.page, tables(found))
    console.print(f"{options.json}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
