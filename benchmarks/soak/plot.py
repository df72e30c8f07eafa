"""Plots the result of a soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def plot(result: dict[str, Any], path: Path) -> None:
    """Plots resident memory, requests per second and rebuilt states per second over time."""
    samples = result["over_time"]
    minutes = np.array(samples["at_s"]) / 60
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.2, 5.2), sharex=True, layout="constrained")
    above.plot(minutes, samples["resident_mib"], color="C0")
    above.set(ylabel="resident memory, MiB", ylim=(0, 1.15 * max(samples["resident_mib"])))
    beside = ", with hostile clients" if "hostile" in result else ""
    requests = np.mean(samples["requests_per_s"])
    planned = f"planned: {result['rate']:,.0f} actions/s, {100 * result['load']:.0f} % of the capacity"
    above.set_title(f"{requests:,.0f} requests/s on average{beside} ({planned})", fontsize=9)
    for name, label in (
        ("requests_per_s", "requests"),
        ("rebuilt_per_s", "states rebuilt from the sessions' last tokens"),
    ):
        below.plot(minutes, samples[name], label=label)
    below.set(ylabel="number per second", xlabel="minutes", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
