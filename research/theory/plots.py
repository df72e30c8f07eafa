"""The figures of research/theory.md, from the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from research.theory.curve import Result
from research.theory.instance import KINDS
from research.theory.tables import bound_of

LEAST = 1e-16
"""The smallest difference that the figures show. Smaller ones are rounding."""


def plot_all(found: Result, folder: Path) -> None:
    """Draws every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_lemmas(found, folder / "theory_lemmas.png")
    plot_lemma3(found["lemma 3"], folder / "theory_lemma3.png")
    plot_proposition2(found["proposition 2"], folder / "theory_proposition2.png")
    plot_theorem1(found["theorem 1"], folder / "theory_theorem1.png")


def band(axes: Any, places: list[float], compared: Result, colour: str, label: str) -> None:
    """Draws the median of a measured curve (solid), its spread over the seeds, and the median bound (dashed)."""
    measured = compared["measured"]
    axes.plot(places, measured["median"], color=colour, label=label)
    axes.fill_between(places, measured["least"], measured["most"], color=colour, alpha=0.2, linewidth=0)
    axes.plot(places, compared["bound"]["median"], "--", color=colour, linewidth=1)


def plot_lemmas(found: Result, path: Path) -> None:
    """Draws Lemmas 1 and 2 against k, a column for each kind of W."""
    figure, rows = plt.subplots(2, len(KINDS), figsize=(11, 6.6), sharex=True, layout="constrained")
    for row, name, ylabel in (
        (rows[0], "lemma 1", "difference of the outputs"),
        (rows[1], "lemma 2", "difference of the gradients"),
    ):
        for axes, kind in zip(row, KINDS, strict=True):
            for index, one in enumerate(one for one in found[name] if one["kind"] == kind):
                band(axes, one["windows"], one, f"C{index}", f"lambda = {one['factor']:g}")
            axes.set(yscale="log", title=f"Lemma {name[-1]}, {kind.title()} W")
            axes.set_ylim(bottom=LEAST)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(ylabel)
    for axes in rows[1]:
        axes.set_xlabel("k, tokens of the window")
    finish(figure, rows[0][0], path)


def plot_lemma3(rows: list[Result], path: Path) -> None:
    """Draws Lemma 3 against 1 / (1 - lambda)."""
    figure, axes = plt.subplots(figsize=(6.6, 4.6), layout="constrained")
    for index, kind in enumerate(KINDS):
        ones = [one for one in rows if one["kind"] == kind]
        merged = {
            key: {part: [one[key][part][0] for one in ones] for part in ones[0][key]} for key in ("measured", "bound")
        }
        band(axes, [1 / (1 - one["factor"]) for one in ones], merged, f"C{index}", f"{kind.title()} W")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="1 / (1 - lambda)",
        ylabel="change of the gradient / change of the weights",
        title="Lemma 3",
    )
    axes.set_xticks([2, 4, 10], ["2", "4", "10"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    finish(figure, axes, path)


def plot_proposition2(found: Result, path: Path) -> None:
    """Draws Proposition 2 against the number of steps, with and without the 1/t rate."""
    figure, grid = plt.subplots(2, 3, figsize=(12.5, 7.6), sharex=True, layout="constrained")
    for axes, rate in zip(grid.flat, found["rates"], strict=False):
        for index, one in enumerate(rate["curves"]):
            band(axes, rate["steps"], one, f"C{index}", f"k = {one['window']}")
        axes.set(xscale="log", yscale="log", title=f"step size {rate['rate']}; constants of {bound_of(rate)}")
        axes.set_ylim(LEAST, 1e22)
        axes.grid(alpha=0.3)
    last = grid[1, 2]
    for index, rate in enumerate(found["growth"]):
        band(last, rate["steps"], rate, f"C{index + 5}", f"step size {rate['rate']}")
    last.set(xscale="log", yscale="log", title="growth of a small difference (k to infinity)")
    last.set(ylabel="factor since the first step")
    last.grid(alpha=0.3)
    last.legend(loc="upper left", fontsize=8)
    for axes in grid[1]:
        axes.set_xlabel("N, steps of projected gradient descent")
    for axes in (grid[0, 0], grid[1, 0]):
        axes.set_ylabel("distance of the weights")
    finish(figure, grid[0, 0], path)


def plot_theorem1(found: Result, path: Path) -> None:
    """Draws Theorem 1: the difference of the trained models' outputs against k, and k against epsilon."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    band(left, found["windows"], found, "C0", "measured (dashed: the bound, constants of the path)")
    left.set(yscale="log", xlabel="k, tokens of the window", ylabel="difference of the outputs")
    left.set_title(f"two models after {found['steps']} steps of size 1/t")
    left.set_ylim(top=1e5)
    left.legend(loc="upper right", fontsize=8)
    epsilons = [need["epsilon"] for need in found["needed"]]
    for index, (key, label) in enumerate(
        (("measured", "measured"), ("path", "theorem, constants of the path"), ("omega", "theorem, constants of Omega"))
    ):
        middle = [sorted(need[key])[len(need[key]) // 2] for need in found["needed"]]
        right.plot(epsilons, middle, "o-", color=f"C{index}", markersize=4, label=label)
    right.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="k that suffices, tokens", title="Theorem 1")
    right.set_ylim(top=1e6)
    right.invert_xaxis()
    right.legend(loc="upper left", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def finish(figure: Any, axes: Any, path: Path) -> None:
    """Adds a legend below the figure, and writes it."""
    handles, labels = axes.get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color="0.3", linestyle="--", linewidth=1))
    figure.legend(handles, [*labels, "bound (median)"], loc="outside lower center", ncols=len(labels) + 1, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
