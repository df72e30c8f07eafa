"""Plots of what training and evaluation found. matplotlib is imported here only, and drawn without a screen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from models.manifest import Quality

FIGURE = (7.0, 4.2)


def plot_quality(name: str, quality: Quality, path: Path) -> None:
    """Perplexity per token against the window k, with the recurrent one as a line, by split."""
    figure, axes = plt.subplots(figsize=FIGURE, layout="constrained")
    for index, (split, window) in enumerate(quality.window.items()):
        colour = f"C{index}"
        axes.plot(
            list(window.by_k),
            [perplexity.per_token for perplexity in window.by_k.values()],
            "o-",
            color=colour,
            label=f"{split}, window of the last k tokens",
        )
        axes.axhline(
            window.recurrent.per_token,
            color=colour,
            linestyle="--",
            label=f"{split}, recurrent: {window.recurrent.per_token:.2f}",
        )
    axes.set(xscale="log", yscale="log", xlabel="window k (tokens)", ylabel="perplexity per token", title=name)
    ticks = sorted({k for window in quality.window.values() for k in window.by_k})
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_log(name: str, log: Path, path: Path) -> None:
    """Training and validation loss against steps, from a run's log."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    valid = [(r["step"], r["valid_loss"]) for r in records if "valid_loss" in r]
    figure, axes = plt.subplots(figsize=FIGURE, layout="constrained")
    axes.plot(*zip(*train, strict=True), color="C0", alpha=0.35, label="training loss, one step")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="C1", markersize=3, label="validation loss")
        best = min(loss for _, loss in valid)
        axes.axhline(best, color="C1", linestyle=":", label=f"best: {best:.4f} (perplexity {math.exp(best):.2f})")
    for record in records:
        if "decay_start" in record:
            axes.axvline(record["decay_start"], color="0.5", linestyle="--", label="learning rate decays from here")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
