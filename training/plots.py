"""Plots of training, evaluation and audit. Only this module imports matplotlib. It uses a backend that needs no
screen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from wane.models.manifest import Quality
from wane.training.audit.forgetting import Quantiles
from wane.training.audit.report import AuditReport
from wane.training.rankings.metrics import CUTOFFS, Rankings

FIGURE = (7.0, 4.2)
AUDIT = (11.0, 8.0)
LARGEST_CUTOFF = CUTOFFS[-1]


def plot_quality(name: str, quality: Quality, path: Path) -> None:
    """Plots perplexity per token against the window length k by split. A horizontal line shows the recurrent
    perplexity."""
    figure, axes = plt.subplots(figsize=FIGURE, layout="constrained")
    _perplexities(axes, name, quality)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_rankings(name: str, quality: Quality, rankings: dict[str, Rankings], path: Path) -> None:
    """Plots the perplexity like `plot_quality` and, in a second panel, recall@20 on the split `test`. The recall of
    windows is plotted against their length k. The recall of every other method is a horizontal line."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * FIGURE[0], FIGURE[1]), layout="constrained")
    _perplexities(left, name, quality)
    found = rankings["test"]
    windows = {
        int(method.removeprefix("window ")): metrics.recall[LARGEST_CUTOFF]
        for method, metrics in found.methods.items()
        if method.startswith("window ")
    }
    right.plot(list(windows), list(windows.values()), "o-", color="C0", label="window of the last k events")
    others = {method: metrics for method, metrics in found.methods.items() if not method.startswith("window ")}
    for index, (method, metrics) in enumerate(others.items()):
        recall = metrics.recall[LARGEST_CUTOFF]
        right.axhline(
            recall, color=f"C{index}", linestyle="--", label=f"{method}: {f'{recall:.3f}' if found.measured else '-'}"
        )
    right.set(xscale="log", xlabel="window k (tokens)", ylabel=f"recall@{LARGEST_CUTOFF}, test", title="next event")
    right.set_xticks(list(windows), [str(k) for k in windows])
    right.minorticks_off()
    right.grid(alpha=0.3)
    right.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _perplexities(axes: Axes, name: str, quality: Quality) -> None:
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
    axes.legend(loc="upper right")


def plot_log(name: str, log: Path, path: Path) -> None:
    """Plots training and validation loss against steps, from a run's log."""
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
            axes.axvline(record["decay_start"], color="0.5", linestyle="--", label="decay of the learning rate begins")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=name)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_audit(report: AuditReport, path: Path) -> None:
    """Plots forgetting in four panels: distance, total variation and perplexity as functions of k, and the gradient's
    norm as a function of i, the number of tokens between an input and the prediction."""
    figure, ((distance, variation), (perplexity, gradient)) = plt.subplots(2, 2, figsize=AUDIT, layout="constrained")
    windows, ks, recommended = report.windows, [at.k for at in report.windows], report.recommended
    certificate = report.certificate
    proved = "proved, in exact arithmetic"

    _spreads(distance, ks, [at.distance for at in windows])
    distance.set(ylabel="2-norm distance before the output layer", title="window and uninterrupted run: distance")
    if certificate.state_error:
        _proved(distance, list(certificate.state_error), proved)

    _spreads(variation, ks, [at.total_variation for at in windows])
    variation.set(ylabel="total variation", title="window and uninterrupted run: predicted distributions")
    if certificate.error_bound:
        _proved(variation, certificate.error_bound, proved)
    variation.axhline(recommended.tolerance, color="0.4", linestyle=":", label=f"tolerance {recommended.tolerance:g}")
    if recommended.p99 is not None:
        variation.axvline(
            recommended.p99, color="C1", alpha=0.5, label=f"k = {recommended.p99}: 99 % within the tolerance"
        )

    perplexity.plot(ks, [100 * (at.perplexity_ratio - 1) for at in windows], "o-", markersize=4, label="window")
    perplexity.axhspan(-0.5, 0.5, color="C2", alpha=0.25, label="within 0.5 %")
    perplexity.set(yscale="symlog", ylabel="perplexity above recurrent (%)", title="perplexity of the last k tokens")

    _spreads(gradient, [at.i + 1 for at in report.gradients], [at.gradient for at in report.gradients])
    gradient.set(
        ylabel="$|\\partial p_{t+i}\\,/\\,\\partial x_t|$", title="dependence of a prediction on earlier inputs"
    )

    for axes in (distance, variation, perplexity, gradient):
        axes.set_xscale("log", base=2)
        axes.set_xticks([k for k in ks if k & (k - 1) == 0])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("i + 1 (tokens)" if axes is gradient else "k (tokens)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper right")
    if not report.gradients:
        gradient.set_axis_off()
        gradient.set_title("an imported graph has no gradients")
    verdict = "certified" if certificate.certified else "not certified"
    figure.suptitle(
        f"{report.model.file}: {verdict}; {report.text.positions:,} positions of {report.text.tokens:,} tokens"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _spreads(axes: Axes, at: list[int], spreads: list[Quantiles]) -> None:
    """Plots median, p99 and maximum on a logarithmic axis, or on a linear axis if all values are 0."""
    if any(spread.max > 0 for spread in spreads):
        axes.set_yscale("log")
    for name, style in (("median", "o-"), ("p99", "s-"), ("max", "^-")):
        shown = _shown(axes, [getattr(spread, name) for spread in spreads])
        axes.plot(at, shown, style, markersize=4, label="99th percentile" if name == "p99" else name)


def _proved(axes: Axes, curve: Sequence[float], label: str) -> None:
    """Plots a curve of proved bounds, whose first value is that of k = 1. Does not extend a logarithmic axis below the
    measured values."""
    bottom = axes.get_ylim()[0]
    axes.plot(range(1, len(curve) + 1), _shown(axes, curve), "--", color="C3", label=label)
    if axes.get_yscale() == "log":
        axes.set_ylim(bottom=bottom)


def _shown(axes: Axes, values: Sequence[float]) -> list[float]:
    """Returns the values, with NaN for each value that the axis cannot show."""
    return [math.nan if value <= 0 and axes.get_yscale() == "log" else value for value in values]
