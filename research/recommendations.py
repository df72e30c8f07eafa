"""What trained recommenders reach, and what each part of a mixture adds: the tables of `docs/recommendations.md`.

    python -m research.recommendations [RUN ...] [--untrained RUN ...] [--parts RUN --data PATH] [--page PAGE]

The first table has a row for each method of each experiment, from the `rankings.json` that `wane evaluate --positions
all --transitions` wrote into the run folders: the mean over the runs of one experiment, which differ in their seeds. Of
the runs after `--untrained`, it has only the rows without a network. The second table is of `--parts`, a run with a
validation split: parts are added to its network one after another. The weights of each mixture are fitted to the
validation split, and the metrics are of the test split.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from wane.models.transitions import PARTS
from wane.training.evaluate_events import (
    TRANSITIONS_ALONE,
    Judge,
    Scores,
    hidden_after,
    mixture_of,
    sessions_of,
)
from wane.training.rankings.baselines import Vmis
from wane.training.rankings.metrics import RankingMetrics, Rankings
from wane.training.rankings.transitions import Counts
from wane.training.run import open_run
from wane.training.run_folder import RunFolder

COLUMNS = (("recall", 10), ("recall", 20), ("mrr", 20), ("ndcg", 10))
SHARES = np.linspace(0, 0.5, 11)
"""The shares of VMIS-kNN that are tried in a mixture with it."""


def results(runs: list[Path], untrained: list[Path]) -> Iterator[str]:
    """Yields the lines of the table of the runs. Runs whose experiments have the same name are one row."""
    yield "| data | method | R@10 | R@20 | MRR@20 | NDCG@10 | seeds | hours |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    groups: dict[tuple[str, bool], list[Path]] = {}
    for run in (*runs, *untrained):
        groups.setdefault((RunFolder(run).experiment().name, run in untrained), []).append(run)
    for (name, only_counts), members in groups.items():
        found = [_test_of(run) for run in members]
        hours = sum(RunFolder(run).load("checkpoint.pt")["wall_s"] for run in members) / 3600
        for method in found[0].methods:
            trained = method not in found[0].tests and method != TRANSITIONS_ALONE
            if method.startswith("window ") or (trained and only_counts):
                continue
            rows = np.array([[getattr(one.methods[method], metric)[k] for metric, k in COLUMNS] for one in found])
            cells = [_cell(column, len(found) > 1 and trained) for column in rows.T]
            seeds, took = (str(len(found)), f"{hours:.2f}") if trained else ("", "")
            yield f"| {name} | {method} | {' | '.join(cells)} | {seeds} | {took} |"


def _test_of(run: Path) -> Rankings:
    return Rankings.model_validate(json.loads((run / "rankings.json").read_text(encoding="utf-8"))["test"])


def _cell(values: np.ndarray, spread: bool) -> str:
    return f"{values.mean():.3f}" + (f" ({values.min():.3f} to {values.max():.3f})" if spread else "")


def parts(run_folder: Path, data: Path | None) -> Iterator[str]:
    """Yields the lines of the table of what each part adds to a run's network."""
    run = open_run(run_folder, data)
    backwards = run.folder.transitions().backwards
    counts = Counts(sessions_of(run.corpus, "train"), run.corpus.vocabulary.size, backwards)
    neighbours = Vmis(sessions_of(run.corpus, "train"), run.corpus.vocabulary.size)
    valid, test = (Judge(run.network, run.corpus, split) for split in ("valid", "test"))
    hidden = {judge: hidden_after(run.network, judge.sessions, judge.positions) for judge in (valid, test)}
    yield "| parts | R@10 | R@20 | MRR@20 | NDCG@10 |"
    yield "| --- | --- | --- | --- | --- |"

    def line(name: str, scores: Scores) -> str:
        found: RankingMetrics = test.rankings({name: test.of_scores(scores)}, []).methods[name]
        return f"| {name} | {' | '.join(f'{getattr(found, metric)[k]:.3f}' for metric, k in COLUMNS)} |"

    yield line("network", test.scores(hidden[test], None))
    if run.cache is not None:
        yield line("network + cache", test.scores(hidden[test], mixture_of(run.cache, counts.size)))
    alone = valid.of_targets(valid.scores(hidden[valid], None))
    for count in range(2, len(PARTS) + 1):
        fitted, _ = valid.fit_transitions(counts, alone, PARTS[:count])
        tables = counts.weighted(fitted)
        mixture = {judge: judge.with_transitions(tables, judge.scores(hidden[judge], None)) for judge in (valid, test)}
        yield line(" + ".join(("network", *PARTS[1:count])), mixture[test])
    share, loss = 0.0, np.inf
    for tried in SHARES:
        found = float(-valid.of_targets(_with_neighbours(valid, mixture[valid], neighbours, tried)).mean())
        if found < loss:
            share, loss = float(tried), found
    yield line(f"all of these + VMIS-kNN, share {share:.2f}", _with_neighbours(test, mixture[test], neighbours, share))


def _with_neighbours(judge: Judge, mixture: Scores, neighbours: Vmis, share: float) -> Scores:
    def scores(some: np.ndarray) -> np.ndarray:
        near = neighbours.scores(judge.known(some))
        near /= np.maximum(near.sum(1, keepdims=True), 1e-9)
        with np.errstate(divide="ignore"):
            return np.log((1 - share) * np.exp(mixture(some)) + share * near)

    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="evaluated run folders")
    parser.add_argument("--untrained", nargs="+", default=[], type=Path, help="runs whose networks are left out")
    parser.add_argument("--parts", type=Path, help="run folder whose mixture is taken apart")
    parser.add_argument("--data", type=Path, help="data of --parts; overrides the experiment's data.path")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced (default: prints them)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    is_listed = options.runs or options.untrained
    blocks = {"results": results(options.runs, options.untrained)} if is_listed else {}
    if options.parts is not None:
        with torch.inference_mode():
            blocks["parts"] = iter([*parts(options.parts, options.data)])
    text = options.page.read_text(encoding="utf-8") if options.page else ""
    for name, lines in blocks.items():
        table = "\n".join(lines)
        Console().print(table, soft_wrap=True, markup=False, highlight=False)
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        if begin:
            text = f"{before}{begin}\n{table}\n\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    if options.page:
        options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
