"""Measures the effect of onnxruntime's threads, spinning and arena on the duration of steps and windows, for batches of
one row and for full batches.

    python -m benchmarks.threads [BUNDLE ...] [--rounds N] [--seconds S] [--json FILE]
    python -m benchmarks.threads --render

Every setting has its own ONNX Runtime sessions. Each round measures every setting once, with the same inputs. The
setting that the server uses is one thread without spinning, with the arena. `--render` writes the stored figures into
docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.page import markdown, put
from benchmarks.summary import Spread, provenance, ratios, write_json
from wane.models.bundle import Bundle
from wane.models.manifest import Role
from wane.service.runners.runner import Array

SHIPPED = (Path("models/bundles/gated-stable"), Path("models/bundles/lstm"))
PAGE, FIGURES = Path("docs/serving.md"), Path("docs/figures/threads.json")
BATCHES = (1, 64)
ROLES: tuple[Role, ...] = ("step", "window")


@dataclass(frozen=True)
class Choice:
    """One combination of settings of ONNX Runtime sessions."""

    name: str
    threads: int = 1
    spinning: bool = False
    arena: bool = True

    def session(self, graph: Path) -> onnxruntime.InferenceSession:
        """Opens an ONNX Runtime session for a graph."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = self.arena
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spinning)))
        options.log_severity_level = 3
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


CHOICES = (
    Choice("as served"),
    Choice("two threads", threads=2),
    Choice("two threads that spin", threads=2, spinning=True),
    Choice("no arena", arena=False),
)


def feeds(bundle: Bundle, role: Role, batch: int) -> dict[str, Array]:
    """Returns random tokens and, for a step, states of zeros."""
    manifest = bundle.manifest
    tokens = np.random.default_rng(0).integers(manifest.vocabulary.size, size=(batch, manifest.window))
    if role == "window":
        return {"tokens": tokens, "lengths": np.full(batch, manifest.window)}
    states = {tensor.name: np.zeros((batch, *tensor.shape), np.float32) for tensor in manifest.state}
    return {"tokens": tokens[:, 0].copy(), **states}


def median_us(session: onnxruntime.InferenceSession, given: dict[str, Array], seconds: float) -> float:
    """Returns the median time of a run, in microseconds."""
    session.run(None, given)
    taken, end = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        session.run(None, given)
        taken.append(time.perf_counter() - begun)
    return 1e6 * float(np.median(taken))


def lines(document: dict[str, Any]) -> list[str]:
    """Returns the figures as a Markdown table."""
    names = [choice.name for choice in CHOICES]
    rows: dict[tuple[str, str, int], dict[str, dict[str, dict[str, float]]]] = {}
    for run in document["runs"]:
        rows.setdefault((run["bundle"], run["role"], run["batch"]), {})[run["choice"]] = run
    return markdown(
        ["us", *names],
        [
            [
                f"`{bundle}`, {role}, batch {batch}",
                f"{found[names[0]]['us']['median']:,.0f}",
                *(shown(found[name]) for name in names[1:]),
            ]
            for (bundle, role, batch), found in rows.items()
        ],
    )


def shown(run: dict[str, dict[str, float]]) -> str:
    """Returns, as text, the time of one setting, and the time of the server's setting divided by the time of this
    setting."""
    ratio = run["served_over_it"]
    return f"{run['us']['median']:,.0f} ({ratio['median']:.2f}x, {ratio['least']:.2f} to {ratio['most']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, default=list(SHIPPED))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for which each setting runs in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.render:
        put(PAGE, "threads", lines(json.loads(FIGURES.read_text(encoding="utf-8"))))
        return
    console, found = Console(), []
    for path in options.bundles:
        bundle = Bundle.read(path)
        table = Table("", *(choice.name for choice in CHOICES), title=f"{bundle.manifest.name}: microseconds of a run")
        for role in ROLES:
            sessions = {choice: choice.session(bundle.graph_path(role)) for choice in CHOICES}
            for batch in BATCHES:
                given = feeds(bundle, role, batch)
                rounds: dict[Choice, list[float]] = {choice: [] for choice in CHOICES}
                for _ in track(range(options.rounds), f"{role}, batch {batch}", console=console, transient=True):
                    for choice, session in sessions.items():
                        rounds[choice].append(median_us(session, given, options.seconds))
                cells = []
                for choice, taken in rounds.items():
                    us, over_it = Spread.of(taken), ratios(rounds[CHOICES[0]], taken)
                    row = {
                        "bundle": bundle.manifest.name,
                        "role": role,
                        "batch": batch,
                        "choice": choice.name,
                        "us": us,
                        "served_over_it": over_it,
                    }
                    found.append(row)
                    cells.append(f"{us.median:,.0f}\n{over_it.median:.2f}x ({over_it.least:.2f} to {over_it.most:.2f})")
                length = f" of {bundle.manifest.window}" if role == "window" else ""
                table.add_row(f"{role}{length}, batch {batch}", *cells)
        console.print(table)
    if options.json:
        origin = provenance("benchmarks.threads", "onnxruntime", bundles=["gated-stable", "lstm"])
        write_json(options.json, {**origin, "rounds": options.rounds, "runs": found})


if __name__ == "__main__":
    main()
