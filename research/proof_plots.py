"""The figure of `research.proofs`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D

from research.proof_results import MedianAndLargest, ModelFigures, Results

LEAST = 1e-13
"""The smallest plotted distance. Smaller values are rounding errors of float64."""

HELD = 64
KINDS = (
    ("curve", ":", "by the curve"),
    ("request", "--", "by the request's bound"),
    ("direction", "-", "by the direction proof"),
)


def plot(results: Results, path: Path) -> None:
    """Plots each bundle's distances and bounds as functions of k in the upper row. The lower row shows the shares of
    proved predictions as functions of k, and the windows' perplexity against these shares."""
    models = {name: model for name, model in sorted(results.models.items()) if model.windows}
    count = max(len(models), 1)
    figure = plt.figure(figsize=(max(10.5, 2.9 * count), 8.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1))
    panels = above.subplots(1, count, sharey=True, squeeze=False)[0]
    for index, (axes, (name, model)) in enumerate(zip(panels, models.items(), strict=False)):
        _distances(axes, name, model, f"C{index}")
    panels[0].set(ylabel="distance of the state (2-norm)")
    _legend(
        above,
        (
            ("worst case, any text", "", "-", "0.2"),
            ("request's bound, median (shade: to the largest)", "s", "--", "0.4"),
            ("observed, median (shade: to the largest)", "o", "-", "0.4"),
        ),
    )
    _legend(
        below,
        tuple((name, "", "-", f"C{index}") for index, name in enumerate(models))
        + tuple((what, "", style, "0.3") for _, style, what in KINDS),
    )
    shares, frontier = below.subplots(1, 2, width_ratios=(3, 2))
    _shares(shares, models)
    _frontier(frontier, models)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _legend(figure: SubFigure, lines: tuple[tuple[str, str, str, str], ...]) -> None:
    """Adds a legend at the bottom of the figure. lines: the label, marker, dash style and colour of each line."""
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle=dashes, markersize=4, label=what)
        for what, mark, dashes, colour in lines
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)


def _distances(axes: Axes, name: str, model: ModelFigures, colour: str) -> None:
    windows = sorted(model.windows)
    shown = [k for k in sorted(model.curve) if min(windows) <= k <= max(windows)]
    axes.plot(shown, [model.curve[k] for k in shown], "-", color="0.2", linewidth=1.2)
    _band(axes, windows, [model.windows[k].request for k in windows], colour, "s--")
    _band(axes, windows, [model.windows[k].observed for k in windows], colour, "o-")
    axes.set_title(name if model.curve else f"{name} (no worst case)", fontsize=10)
    _by_window(axes, windows)
    axes.set(yscale="log")
    axes.set_ylim(bottom=LEAST)


def _band(axes: Axes, windows: list[int], spreads: list[MedianAndLargest], colour: str, style: str) -> None:
    """Plots the medians of `spreads` against k, and shades the area from the medians to the largest values."""
    known = [
        (k, max(s.median, LEAST), max(s.largest if s.largest is not None else s.median, LEAST))
        for k, s in zip(windows, spreads, strict=True)
        if s.median is not None
    ]
    if not known:
        return
    where, middle, largest = zip(*known, strict=True)
    axes.plot(where, middle, style, color=colour, markersize=4)
    axes.fill_between(where, middle, largest, color=colour, alpha=0.2, linewidth=0)


def _shares(axes: Axes, models: dict[str, ModelFigures]) -> None:
    every = sorted({k for model in models.values() for k in model.windows})
    for index, model in enumerate(models.values()):
        windows = sorted(model.windows)
        for kind, style, _ in KINDS:
            shares = [100 * getattr(model.windows[k].proved, kind) for k in windows]
            marker = "o" if kind == "direction" else None
            axes.plot(windows, shares, style, color=f"C{index}", marker=marker, markersize=4)
    axes.axhline(90, color="0.6", linewidth=0.8)
    _by_window(axes, every)
    axes.set(ylabel="% of the positions", title="Top-1 token proved equal to that of the never-interrupted run")
    axes.set_ylim(-3, 103)


def _frontier(axes: Axes, models: dict[str, ModelFigures]) -> None:
    """Plots the perplexity of windows against the share of proved predictions, with a point for every bundle and k."""
    for index, model in enumerate(models.values()):
        points = [
            (model.window_perplexity[k], 100 * window.proved.direction, k)
            for k, window in sorted(model.windows.items())
            if k in model.window_perplexity
        ]
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=f"C{index}", markersize=4, linewidth=1)
        for perplexity, share, k in points:
            if k == HELD:
                axes.plot([perplexity], [share], "o", color=f"C{index}", markersize=9, fillstyle="none")
        if model.perplexity is not None:
            axes.axvline(model.perplexity, color=f"C{index}", linestyle=":", linewidth=1)
    axes.set(
        xlabel="validation perplexity per token", ylabel="% of positions proved by the direction proof", xscale="log"
    )
    axes.set_title(f"Trade-off by window length (ringed: k = {HELD}; dotted: recurrent perplexity)", fontsize=10)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=8)
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.3)


def _by_window(axes: Axes, windows: list[int]) -> None:
    axes.set(xscale="log", xlabel="window k (tokens)")
    axes.set_xticks(windows, [str(k) for k in windows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
