"""What the certificates of the bundles promise, beside what is observed over a text, and how many answers they prove.

    OMP_NUM_THREADS=1 python -m benchmarks.proofs --data FOLDER [--only NAME ...] [--positions N] [--fewer N]
    python -m benchmarks.proofs --render

FOLDER holds WikiText-2's word-level files. At positions spread evenly over a split, for windows of several k: the state
(the output layer's input) and the answer of the window, in float64, against the run that has never been interrupted
since the split's first token; the certificate's curve; the bound of each request; which first tokens are proved.
Bounds of LSTM and GRU windows are slow, so those other than of 64 tokens are measured at `--fewer` positions.

Every k of every bundle is kept in the JSON when it is done: a run that was killed goes on, and what is done is not
done again. From the JSON come the figure and, between their markers, the tables of the page; `--render` makes only
these. Measured bundles that are no longer there are dropped. Small matrices gain nothing from threads: run it with
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from benchmarks.proof_plots import plot
from benchmarks.proof_results import ModelFigures, Proved, Results, Spread, Values, WindowFigures
from benchmarks.proof_tables import put_tables
from models.bundle import Bundle
from models.certificate.answer import total_variation
from models.certificate.certify import CERTIFIED
from models.certificate.request import RequestBound
from models.certificate.top1 import Top1
from models.reference import Reference
from service.engine.margin import Margin
from training.wikitext import read_wikitext_2

WINDOWS = (64, 16, 32, 128, 256)
FIRST = WINDOWS[0]
LONGEST = max(WINDOWS)
SLOW = ("lstm", "gru")
AT_ONCE = 128
FLOAT64 = 1e-9
"""What float64 may add to a distance before it counts as a violation."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Never:
    """The never-interrupted run at some positions: where, (N), and `hidden` after the token there, (N, H)."""

    ends: Tokens
    hidden: Values

    def fewer(self, count: int) -> Never:
        """About `count` of them, as evenly spread."""
        chosen = np.linspace(0, len(self.ends) - 1, min(count, len(self.ends))).astype(np.int64)
        return Never(self.ends[chosen], self.hidden[chosen])


def never_interrupted(reference: Reference, stream: Tokens, count: int, progress: Progress) -> Never:
    """The run over all of the stream, at `count` positions that have more behind them than the longest window."""
    ends = np.linspace(LONGEST, len(stream) - 1, count).astype(np.int64)
    wanted, hidden = set(ends.tolist()), []
    state = reference.zero_state(1)
    task = progress.add_task("never interrupted", total=len(stream))
    for position, token in enumerate(stream):
        after, state = reference.advance(np.array([token]), state)
        if position in wanted:
            hidden.append(after[0])
        if position % 1000 == 0:
            progress.update(task, completed=position)
    progress.remove_task(task)
    return Never(ends, np.array(hidden))


class Prover:
    """One bundle, with all that proves anything about it."""

    def __init__(self, bundle: Bundle) -> None:
        architecture, weights = bundle.manifest.architecture, bundle.weights()
        self.certificate = bundle.manifest.certificate
        self.reference = Reference(architecture, weights)
        self._request = RequestBound(architecture, weights)
        self._direction = Top1(architecture, weights, self._request)
        self._margin = Margin(weights)
        self._rounding = self.certificate.rounding.measured if self.certificate.rounding else 0.0

    def figures(self, stream: Tokens, never: Never, k: int, progress: Progress) -> WindowFigures:
        """Windows of k at all of the positions."""
        columns: dict[str, list[Values]] = {}
        task = progress.add_task(f"windows of {k}", total=len(never.ends))
        for start in range(0, len(never.ends), AT_ONCE):
            ends = never.ends[start : start + AT_ONCE]
            found = self._measure(stream[ends[:, None] + np.arange(1 - k, 1)], never.hidden[start : start + AT_ONCE])
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
            progress.advance(task, len(ends))
        progress.remove_task(task)
        of = {name: np.concatenate(parts) for name, parts in columns.items()}
        worst, epsilon = self.certificate.state_error_at(k), self.certificate.error_bound_at(k)
        wrong = (of["observed"] > of["smaller"] + FLOAT64) | (of["observed_variation"] > of["variation"] + FLOAT64)
        for name in ("curve", "request", "direction"):
            wrong |= (of[name] > 0) & (of["same"] == 0)
        return WindowFigures(
            positions=len(never.ends),
            observed=Spread.of(of["observed"]),
            observed_variation=Spread.of(of["observed_variation"]),
            worst_case=worst,
            worst_case_variation=epsilon,
            request=Spread.of(of["radius"]),
            request_variation=Spread.of(of["variation"]),
            over_worst_case=None if worst is None else Spread.of(of["observed"] / worst),
            over_request=Spread.of(of["observed"] / of["radius"]),
            same_top1=float(of["same"].mean()),
            proved=Proved(**{name: float(of[name].mean()) for name in ("curve", "request", "direction")}),
            violations=int(wrong.sum()),
        )

    def _measure(self, windows: Tokens, hidden: Values) -> dict[str, Values]:
        bound = self._request(windows)
        worst = self.certificate.state_error_at(windows.shape[1])
        curve = np.inf if worst is None else worst
        smaller = np.minimum(bound.radius, curve)
        logits, never = self.reference.logits(bound.hidden), self.reference.logits(hidden)
        rows = list(zip(logits.astype(np.float32), bound.hidden.astype(np.float32), smaller, strict=True))
        direction = self._direction.proved(replace(bound, radius=smaller))
        return {
            "observed": np.linalg.norm(bound.hidden - hidden, axis=1),
            "observed_variation": np.abs(_softmax(logits) - _softmax(never)).sum(axis=1) / 2,
            "radius": bound.radius,
            "smaller": smaller,
            "variation": total_variation(self.certificate.head_diameter, smaller + self._rounding),
            "same": (logits.argmax(axis=1) == never.argmax(axis=1)).astype(np.float64),
            "curve": np.array([float(self._margin.proves(x, h, curve + self._rounding)) for x, h, _ in rows]),
            "request": np.array([float(self._margin.proves(x, h, e + self._rounding)) for x, h, e in rows]),
            "direction": direction.astype(np.float64),
        }


def _softmax(logits: Values) -> Values:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Values = shares / shares.sum(axis=1, keepdims=True)
    return result


def described(bundle: Bundle, tokens: int) -> ModelFigures:
    """What the manifest says, before anything is measured."""
    manifest, certificate = bundle.manifest, bundle.manifest.certificate
    quality, last = manifest.quality, manifest.max_window
    shown = sorted({*np.geomspace(1, last, 60).astype(int).tolist(), *(k for k in WINDOWS if k <= last)})
    return ModelFigures(
        weights=manifest.files[manifest.weights],
        cell=manifest.architecture.cell,
        layers=certificate.layers,
        certified=certificate.certified,
        max_window=last,
        tokens=tokens,
        smallest_window=certificate.smallest_window(CERTIFIED),
        perplexity=quality.recurrent["valid"].per_token if quality else None,
        window_perplexity={k: p.per_token for k, p in quality.window["valid"].by_k.items()} if quality else {},
        curve={k: certificate.state_error[k - 1] for k in shown} if certificate.state_error else {},
    )


def read_stream(bundle: Bundle, folder: Path, split: str) -> Tokens:
    """A split as training reads it: `<eos>` before every line and after the last, (tokens)."""
    vocabulary = bundle.vocabulary
    flat = [vocabulary.eos_id]
    for sequence in vocabulary.encode_lines(read_wikitext_2(folder)[0][split]):
        flat += [*sequence, vocabulary.eos_id]
    return np.array(flat, dtype=np.int64)


def measure(
    bundle: Bundle, stream: Tokens, split: str, positions: int, fewer: int, path: Path, progress: Progress
) -> None:
    """All of one bundle, into the JSON at `path`; what that already has of these weights is not measured again."""
    name, results = bundle.manifest.name, read(path, split)
    before, figures = results.models.get(name), described(bundle, len(stream))
    positions = min(positions, len(stream) - LONGEST)
    if before is not None and (before.weights, before.tokens) == (figures.weights, figures.tokens):
        figures = figures.model_copy(update={"windows": before.windows})
    slow = bundle.manifest.architecture.cell in SLOW

    def asked(k: int) -> int:
        return min(fewer, positions) if slow and k != FIRST else positions

    missing = [
        k
        for k in WINDOWS
        if k <= figures.max_window and (k not in figures.windows or figures.windows[k].positions < asked(k))
    ]
    if missing:
        prover = Prover(bundle)
        never = never_interrupted(prover.reference, stream, positions, progress)
        for k in missing:
            found = prover.figures(stream, never.fewer(asked(k)), k, progress)
            figures = figures.model_copy(update={"windows": dict(sorted({**figures.windows, k: found}.items()))})
            read(path, split).having(name, figures).write(path)
            progress.console.print(f"{name}, k = {k}: {found.proved}, {found.violations} violations")
    read(path, split).having(name, figures).write(path)


def read(path: Path, split: str) -> Results:
    """What is in the JSON by now: other bundles may be measured by other processes."""
    return Results.read(path) if path.exists() else Results(split=split)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=Path("models/bundles"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the bundles, measure these now")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--positions", type=int, default=5000)
    parser.add_argument("--fewer", type=int, default=1000, help="positions of slow cells, but at k = 64")
    parser.add_argument("--json", type=Path, default=Path("docs/figures/proofs.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/proofs.png"))
    parser.add_argument("--page", type=Path, default=Path("docs/stability.md"))
    parser.add_argument("--render", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    if options.data is None and not options.render:
        parser.error("name the folder of WikiText-2 with --data, or measure nothing with --render")
    if min(options.positions, options.fewer) < 1:
        parser.error("--positions and --fewer are at least 1")
    there = sorted(path.name for path in options.bundles.iterdir() if path.is_dir())
    if unknown := set(options.only or ()) - set(there):
        parser.error(f"--only: {options.bundles} has no {', '.join(sorted(unknown))}; it has {', '.join(there)}")

    if (kept := read(options.json, options.split).split) != options.split:
        parser.error(f"--split: {options.json} has figures of {kept}; name another file with --json")
    console = Console(stderr=True)
    if not options.render:
        with Progress(console=console, transient=True) as progress:
            for name in options.only or there:
                bundle = Bundle.read(options.bundles / name)
                stream = read_stream(bundle, options.data, options.split)
                measure(bundle, stream, options.split, options.positions, options.fewer, options.json, progress)
    results = read(options.json, options.split)
    results = results.model_copy(update={"models": {n: m for n, m in results.models.items() if n in there}})
    results.write(options.json)
    plot(results, options.figure)
    put_tables(results, options.page)
    console.print(f"{options.json}, {options.figure}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
