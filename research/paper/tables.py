"""The tables of research/paper.md, made from the stored results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import markdown
from research.paper.task import Task

Record = dict[str, Any]
WITHIN = 1.01
CELLS = {"rnn_tanh": "RNN", "lstm": "LSTM"}


def grouped(records: Sequence[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Returns the records of the same training with several seeds, by bidirectional, cell, stable and window."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        run = record["run"]
        groups.setdefault((run["bidirectional"], run["cell"], run["stable"], run["window"]), []).append(record)
    return groups


def label(task: Task, key: tuple[Any, ...]) -> str:
    """Returns the name of a group of runs."""
    bidirectional, cell, stable, window = key
    if task.control and window == 1:
        return "control without memory"
    words = ["stable" if stable else "free", CELLS[cell]]
    return " ".join([*words, *(["in two directions"] if bidirectional else [])])


def task_table(task: Task, records: Sequence[Record]) -> list[str]:
    """Returns the table of one task: one row for each group of runs."""
    if not records:
        return ["No run of this task is finished yet."]
    rows = []
    for key, same in grouped(records).items():
        bidirectional, cell, stable, window = key
        is_control = task.control and window == 1
        figures = [task.figure(record["test"]) for record in same]
        reported = "" if is_control or (task.bidirectional and not bidirectional) else task.source[cell, stable]
        factors = [record["factor"] for record in same]
        factor = None if None in factors else max(factors)
        rows.append(
            [
                label(task, key),
                "whole" if window is None else f"window of {window}",
                "" if window is not None else reported,
                _spread(figures),
                "" if window is None else _spread([_in_window(task, record, window) for record in same]),
                str(len(same)),
                "none" if factor is None else f"{factor:.3g}",
                "yes" if factor is not None and factor < 1 else "no",
                "yes" if all(record["by_the_paper"] for record in same) else "no",
                f"{same[0]['weights']:,}",
                f"{statistics.median(record['seconds'] for record in same) / 60:.1f}",
            ]
        )
    names = [
        "network",
        "trained on",
        f"source, {task.measure}",
        "ours, whole",
        "ours, in the window",
        "seeds",
        "factor",
        "contractive by our certificate",
        "stable by the paper's rule",
        "weights",
        "processor minutes",
    ]
    return [*markdown(names, rows), "", f"What differs from the source: {task.differs}."]


def _in_window(task: Task, record: Record, window: int) -> float:
    """Returns the test figure of windows of the training's size."""
    test, k = record["test"], str(window)
    split = {"loss": test["by_k"][k]}
    if "f1_by_k" in test:
        split["f1"] = test["f1_by_k"][k]
    return task.figure(split)


def _spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    form = ".1f" if middle >= 20 else ".2f"
    if len(values) == 1:
        return f"{middle:{form}}"
    return f"{middle:{form}} ({min(values):{form}} to {max(values):{form}})"


def smallest_k(test: Mapping[str, Any]) -> int | None:
    """Returns the smallest window from which on the loss is at most WITHIN times the loss of the whole input; None if
    there is none."""
    found = None
    for k in sorted(map(int, test["by_k"]), reverse=True):
        if test["by_k"][str(k)] > WITHIN * test["loss"]:
            break
        found = k
    return found


def memory_table(tasks: Sequence[Task], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Returns the table of the windows that each task needs: one row for each group of runs trained on the whole
    input."""
    rows = []
    for task in tasks:
        for key, same in grouped(records[task.name]).items():
            if key[-1] is not None:
                continue
            ks = [smallest_k(record["test"]) for record in same]
            some = sorted(k for k in ks if k is not None)
            largest = max(map(int, same[0]["test"]["by_k"]))
            shown = f"more than {largest}" if len(some) < len(ks) else f"{some[0]}"
            if some and len(some) == len(ks) and some[0] != some[-1]:
                shown = f"{some[0]} to {some[-1]}"
            rows.append([task.title, label(task, key), shown, str(len(same))])
    return markdown(["task", "network", "smallest k within 1 % of the loss", "seeds"], rows)


def gradient_table(norms: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns the table of gradients: the norm at some lags, divided by the norm at lag 0."""
    lags = [lag for lag in (1, 2, 5, 10, 20, 40) if all(lag < len(values) for values in norms.values())]
    rows = [[name, *(f"{values[lag] / values[0]:.1e}" for lag in lags)] for name, values in norms.items()]
    return markdown(["network", *(f"lag {lag}" for lag in lags)], rows)


def distance_table(distances: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns the table of the relative distances of the recurrent weights at some steps."""
    rows = []
    for name, by_step in distances.items():
        steps = list(by_step)
        chosen = [steps[index] for index in sorted({1, len(steps) // 2, len(steps) - 1})]
        rows.append([name, *(f"{by_step[step]:.3f} (step {int(step):,})" for step in chosen)])
    return markdown(["network", "first", "middle", "last"], rows)
