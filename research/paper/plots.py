"""The figures of research/paper.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.paper.tables import WITHIN, grouped, label
from research.paper.task import Task

COLOURS = {"free RNN": "#d55e00", "stable RNN": "#e69f00", "free LSTM": "#0072b2", "stable LSTM": "#56b4e9"}


def plot_memory(tasks: Sequence[Task], records: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Draws the loss in windows, relative to that of the whole input, against the window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for key, same in grouped(records[task.name]).items():
            if key[-1] is not None:
                continue
            name = label(task, key)
            colour = COLOURS[name.removesuffix(" in two directions")]
            test = same[0]["test"]
            ks = sorted(map(int, test["by_k"]))
            excess = [max(test["by_k"][str(k)] / test["loss"] - 1, 1e-5) for k in ks]
            axes.plot(ks, excess, "--" if key[0] else "-", marker=".", color=colour, label=name, lw=1)
        axes.axhline(WITHIN - 1, color="black", lw=0.6, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="k, inputs in the window", title=task.title)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
    most = max(figure.axes, key=lambda axes: len(axes.lines))
    figure.legend(handles=most.lines[:-1], frameon=False, fontsize=7, ncols=4, loc="outside lower center")
    figure.axes[0].set_ylabel("excess of the loss (dotted: 1 %)")
    figure.savefig(path, dpi=150)


def plot_gradients(norms: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws the norms of gradients against the lag."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in norms.items():
        axes.plot(range(len(values)), [max(value, 1e-12) for value in values], color=COLOURS[name], label=name, lw=1.2)
    axes.set(yscale="log", xlabel="lag, words", ylabel="norm of the gradient by an embedding")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_distances(distances: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws the relative distance of the recurrent weights of two trainings against the optimiser's steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, by_step in distances.items():
        steps = [int(step) for step in by_step if int(step)]
        values = [by_step[str(step)] for step in steps]
        axes.plot(steps, values, marker=".", color=COLOURS[name], label=name, lw=1.2)
    axes.set(xscale="log", xlabel="step", ylabel="|recurrent - truncated| / |recurrent|")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
