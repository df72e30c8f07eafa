"""Plots a run: each contender's throughput, and its latency with one client."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.bench.contenders import BARE, HANDLER, WANE, contenders, peer_names
from benchmarks.bench.results import Results
from benchmarks.summary import Spread

OURS, THEIRS, CEILING = "#1f77b4", "#7f7f7f", "#d9a441"
MEANING = {OURS: "Wane", THEIRS: "other servers", CEILING: "parts alone: upper bounds"}

Dot = tuple[str, Spread, str]


def save(results: Results, path: Path) -> None:
    """Plots one row per model, with throughput on the left and the latency of one client on the right. Each whisker
    reaches from the smallest to the largest value of all rounds."""
    models = list(results.figures)
    figure, rows = plt.subplots(
        len(models), 2, figsize=(11, 0.8 + 3.5 * len(models)), layout="constrained", squeeze=False
    )
    for (left, right), model in zip(rows, models, strict=True):
        _dots(left, throughput(results, model), "{:,.0f}")
        left.set(title=f"{model}: answers a second", xlabel="next tokens a second (log scale)")
        _dots(right, latency(results, model), "{:.2g}")
        right.set(title=f"{model}: latency with one client", xlabel="p50 of one connection, ms (log scale)")
    marks = [Line2D([], [], color=colour, marker="o", label=label) for colour, label in MEANING.items()]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save_two(results: Results, path: Path) -> None:
    """Plots two bars for lstm256: the session steps a second of Wane, and of the fastest other server that receives
    the last 64 tokens with each request. Both have 64 connections. A line reaches from the smallest to the largest
    value of all rounds. Plots nothing if a load was not measured."""
    others = {
        contenders()[name].title: summary.rate
        for name in peer_names()
        if (summary := results.summary("lstm256", name, "window-64")) is not None
    }
    own = results.summary("lstm256", WANE, "session-64")
    if own is None or not others:
        return
    fastest = max(others, key=lambda title: others[title].median)
    bars = [
        ("Wane: one token a request", own.rate, OURS),
        (f"{fastest}: the last 64 tokens", others[fastest], THEIRS),
    ]
    figure, axes = plt.subplots(figsize=(8, 2), layout="constrained")
    for place, (_, rate, colour) in enumerate(bars):
        axes.barh(place, rate.median, color=colour, height=0.6)
        axes.plot([rate.least, rate.most], [place, place], color="black", linewidth=1.5)
        axes.annotate(f"{rate.median:,.0f}", (rate.most, place), (7, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlim=(0, None), xlabel="next tokens a second, LSTM of 256 units, 64 connections, two cores")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def throughput(results: Results, model: str) -> list[Dot]:
    """Returns a label, the answers per second, and a colour for each measured load. Wane's loads are first."""
    wanted = [
        (WANE, "batched-64", "Wane, session, 64 steps a call", OURS),
        (WANE, "websocket-64", "Wane, session, 64 WebSockets", OURS),
        (WANE, "session-64", "Wane, session, 64 connections", OURS),
        (WANE, "window-64", "Wane, window of 64", OURS),
        *((name, "session-64", contenders()[name].title, THEIRS) for name in peer_names("sessions")),
        *((name, "window-64", f"{contenders()[name].title}, window of 64", THEIRS) for name in peer_names()),
        (HANDLER, "handler-64", "upper bound, HTTP alone: trivial FastAPI", CEILING),
        (BARE, "engine-64", "Wane's engine, no HTTP, steps", CEILING),
        (BARE, "step-64", "upper bound, model alone: ONNX Runtime loop, step", CEILING),
        (BARE, "window-64", "upper bound, model alone: ONNX Runtime loop, window", CEILING),
    ]
    return _measured(results, model, wanted, "rate")


def latency(results: Results, model: str) -> list[Dot]:
    """Returns a label, the median latency of a single client, and a colour for each measured load."""
    wanted = [
        (WANE, "session-1", "Wane, session", OURS),
        (WANE, "window-1", "Wane, window of 64", OURS),
        *((name, "session-1", contenders()[name].title, THEIRS) for name in peer_names("sessions")),
        *((name, "window-1", f"{contenders()[name].title}, window of 64", THEIRS) for name in peer_names()),
        (HANDLER, "handler-1", "trivial FastAPI", CEILING),
        (BARE, "step-1", "bare loop, step", CEILING),
        (BARE, "window-1", "bare loop, window", CEILING),
    ]
    return _measured(results, model, wanted, "p50_ms")


def _measured(results: Results, model: str, wanted: list[tuple[str, str, str, str]], figure: str) -> list[Dot]:
    found = [(label, results.summary(model, name, load), colour) for name, load, label, colour in wanted]
    return [(label, getattr(summary, figure), colour) for label, summary, colour in found if summary is not None]


def _dots(axes: Axes, dots: list[Dot], form: str) -> None:
    """Plots medians as dots with whiskers from the smallest to the largest of the rounds' values. Bars would start at
    zero, which does not exist on a log scale."""
    for index, (_, spread, colour) in enumerate(dots):
        axes.plot([spread.least, spread.most], [index, index], color=colour, linewidth=2)
        axes.plot(spread.median, index, "o", color=colour, markersize=7)
        text = form.format(spread.median)
        axes.annotate(text, (spread.most, index), (7, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(dots)), [label for label, _, _ in dots], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.grid(alpha=0.3)
