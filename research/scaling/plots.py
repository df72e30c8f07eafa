"""The figures of docs/scaling.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from research.scaling.costs import FIGURES
from research.scaling.scenarios import SLICE_S

matplotlib.use("Agg")

from matplotlib import pyplot as plt

Result = dict[str, Any]
DPI = 110


def plot_all(result: Result, checked: Result) -> None:
    """Plots all figures."""
    saturation(result, FIGURES / "scaling_saturation.png")
    capacity(result, FIGURES / "scaling_capacity.png")
    storms(result, FIGURES / "scaling_storms.png")
    money(result, FIGURES / "scaling_cost.png")
    skew(result, FIGURES / "scaling_skew.png")
    comparison(result, checked, FIGURES / "scaling_check.png")


def saturation(result: Result, path: Path) -> None:
    """Plots the number of sessions at which each part (replica, Redis, HAProxy, network) saturates, against the step
    interval of the sessions."""
    own = result["policies"]["tail"]["saturated_at"]
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for number, (name, sessions) in enumerate(own.items()):
        style = "--" if "memory" in name or "state pool" in name else "-"
        axes.loglog(result["thinks_s"], sessions, style, marker="o", markersize=3, color=f"C{number}", label=name)
    axes.set(xlabel="step interval of a session, seconds", ylabel="sessions at saturation")
    load = 100 * result["limits"]["load"]
    axes.set_title(f"Saturation (processors at {load:.0f} %). The lowest line saturates first", fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    save(figure, axes, path)


def capacity(result: Result, path: Path) -> None:
    """Plots the latencies of one replica and one Redis at rising rates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for number, (policy, own) in enumerate(result["policies"].items()):
        for name, style in (("p50_ms", ":"), ("p99_ms", "-")):
            left.plot(
                own["curve"]["steps_per_s"],
                own["curve"][name],
                style,
                color=f"C{number}",
                label=f"{policy}, {name[:3]}",
            )
        left.axvline(own["plan"]["steps_per_s"], color=f"C{number}", linewidth=0.8, linestyle="--")
        for fsync, style in (("always", "-"), ("everysec", "--")):
            points = own["shard"][fsync]
            right.semilogy(
                points["commands_per_s"],
                points["p99_ms"],
                style,
                color=f"C{number}",
                label=f"{policy}, fsync {fsync}",
            )
    left.set(xlabel="steps/s of one replica (dashed: planned)", ylabel="latency of a step, ms", title="one replica")
    left.set_ylim(0, None)
    right.set(xlabel="commands/s at one Redis, one per trip", ylabel="p99 latency of a trip, ms", title="one Redis")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3, which="both")
    save(figure, left, path)


def storms(result: Result, path: Path) -> None:
    """Plots the p99 latency over time, after the loss of a third of the replicas and after a new replica's start."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for number, (policy, own) in enumerate(result["policies"].items()):
        for one in own["lost_zone"]:
            style = "-" if one["queue"] == "fair" else ":"
            left.semilogy(
                *over_time(one["slices_p99_ms"]),
                style,
                color=f"C{number}",
                label=f"{policy}, {one['queue']}",
            )
    for number, one in enumerate(result["policies"]["tail"]["joined"]):
        right.semilogy(
            *over_time(one["slices_p99_ms"]),
            color=f"C{number}",
            label=f"slow start {one['slowstart_s']:.0f} s",
        )
    left.set(
        xlabel="seconds after the loss",
        ylabel="p99 of resident steps in two seconds, ms",
        title="a remaining replica after the loss of a third",
    )
    right.set(xlabel="seconds after the start", title="a new replica without states (tail)")
    for axes in (left, right):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axes.grid(alpha=0.3, which="both")
    save(figure, left, path)


def over_time(values: list[float | None]) -> tuple[list[float], list[float]]:
    """Returns the middle time and the value of each time slice. A missing value becomes NaN, which leaves a gap in the
    line."""
    at_s = [SLICE_S * (number + 0.5) for number in range(len(values))]
    return at_s, [float("nan") if value is None else value for value in values]


def money(result: Result, path: Path) -> None:
    """Plots the hourly cost of a million sessions against the step interval of a session."""
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for number, (policy, own) in enumerate(result["policies"].items()):
        for kind, style in (("all resident", "-"), ("state pool as it is set", "--")):
            costs = own["by_think"][kind]["an_hour"]
            axes.loglog(
                result["thinks_s"],
                costs,
                style,
                marker="o",
                markersize=3,
                color=f"C{number}",
                label=f"{policy}, {kind}",
            )
        axes.axvline(own["worth_keeping_s"], color=f"C{number}", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step interval of a session, seconds (right of the dotted line: states cost more than rebuilds)")
    axes.set(ylabel=f"a million sessions, {result['prices']['currency']} per hour")
    axes.legend(fontsize=8)
    save(figure, axes, path)


def skew(result: Result, path: Path) -> None:
    """Plots the load of the busiest replica against the exponent of the sessions' rates (see
    `research/scaling/skew.py`)."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, (sessions, own) in enumerate(result["skew"].items()):
        label = f"{int(sessions):,} sessions, {own['replicas']:,} replicas"
        axes.semilogy(own["exponent"], own["busiest"], marker="o", color=f"C{number}", label=label)
    axes.axhline(
        1 / result["limits"]["load"], color="0.4", linestyle="--", linewidth=0.8, label="capacity of a replica"
    )
    axes.set(xlabel="exponent of the rank in a session's rate", ylabel="busiest replica's load / mean load")
    axes.legend(fontsize=8)
    save(figure, axes, path)


def comparison(result: Result, checked: Result, path: Path) -> None:
    """Plots measured and simulated latencies."""
    from research.scaling import check

    rows = [row for row in check.pairs(checked, result["check"]) if row[1] == "ms"]
    names = [row[0] for row in rows]
    measured = [row[2] for row in rows]
    simulated = [row[3].median for row in rows]
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    y = np.arange(len(rows))
    axes.plot(measured, y, "o", color="C0", label="measured")
    axes.plot(simulated, y, "x", color="C1", label="simulated")
    axes.hlines(y, measured, simulated, color="0.7", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(y, names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    figure.legend(loc="outside upper center", ncols=2)
    save(figure, axes, path)


def save(figure: Any, axes: Any, path: Path) -> None:
    """Adds a grid and saves the figure."""
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
