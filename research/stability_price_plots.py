"""The figures of `research.stability_price`, from its results."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

LABELS = {"gated": "Gated (gates capped)", "rnn": "tanh-RNN (spectral norm limited)"}
COLOURS = {"gated": "C0", "rnn": "C1"}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "projected gradient descent, learning rate alpha / t"}


def plot_prices(results: dict[str, Any], path: Path) -> None:
    """Plots perplexity against lambda, with a mark per seed. A second panel plots the certified k against lambda."""
    prices = results["prices"]
    caps = sorted({point["lambda"] for point in prices}, key=lambda cap: cap or 1)
    place = {cap: index for index, cap in enumerate(caps)}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.2, 6.4), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    nowhere = 1.6 * results["longest_window"]
    for family, label in LABELS.items():
        by_cap: dict[float | None, list[dict[str, Any]]] = defaultdict(list)
        for point in prices:
            if point["family"] == family:
                by_cap[point["lambda"]].append(point)
        places = [place[cap] for cap in by_cap]
        middle = [sorted(p["perplexity"] for p in points)[len(points) // 2] for points in by_cap.values()]
        above.plot(places, middle, "-", color=COLOURS[family], label=label)
        for cap, points in by_cap.items():
            heights = [point["perplexity"] for point in points]
            above.plot([place[cap]] * len(points), heights, "o", color=COLOURS[family], markersize=5, alpha=0.7)
        shift = -0.06 if family == "gated" else 0.06
        proved = [(place[p["lambda"]] + shift, p["k"]) for p in prices if p["family"] == family and p["k"] is not None]
        missing = [place[p["lambda"]] + shift for p in prices if p["family"] == family and p["k"] is None]
        if proved:
            below.plot(*zip(*proved, strict=True), "o", color=COLOURS[family], label=label)
        if missing:
            below.plot(missing, [nowhere] * len(missing), "x", color=COLOURS[family])
    above.set(ylabel="validation perplexity per token", yscale="log", title="What stability costs")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.tick_params(axis="y", which="minor", labelsize=8)
    above.legend(fontsize=9)
    longest = results["longest_window"]
    below.axhline(longest, color="0.5", linestyle=":", linewidth=1)
    below.text(0, nowhere, f" x: no k up to {longest}", va="center", ha="left", fontsize=8, color="0.3")
    below.set(ylabel=f"certified k({results['epsilon']:g}), tokens", yscale="log", xlabel="requested lambda")
    below.yaxis.set_major_formatter("{x:g}")
    below.set_xticks(range(len(caps)), [str(cap or "none") for cap in caps])
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_distances(results: dict[str, Any], path: Path) -> None:
    """Plots the distance between the weights of recurrent and of truncated training (solid), and the distance of each
    training's weights from the initial weights (recurrent: dashed, truncated: dotted)."""
    figure, parts = plt.subplots(1, len(OPTIMIZERS), figsize=(10.5, 4.8), layout="constrained")
    for axes, (optimizer, title) in zip(parts, OPTIMIZERS.items(), strict=True):
        for index, found in enumerate(f for f in results["distances"] if f["optimizer"] == optimizer):
            name, colour = f"lambda {found['lambda']}" if found["lambda"] else "unconstrained", f"C{index}"
            lines = (
                ("between", "-", "recurrent to truncated"),
                ("recurrent_moved", "--", "recurrent to initial"),
            )
            for key, style, what in (*lines, ("truncated_moved", ":", "truncated to initial")):
                axes.plot(found["steps"][1:], found[key][1:], style, color=colour, label=f"{name}, {what}")
        axes.set(xlabel="step", ylabel="distance between weights (2-norm)", title=title, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    if handles := parts[0].get_legend_handles_labels()[0]:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
