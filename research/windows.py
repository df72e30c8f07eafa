"""Plots perplexity against window length, from the manifests of the bundles in a folder. research/stability.md shows
the figure, of the bundles of `gated`, `lstm-stable`, `gated-stable-128` and `gated-stable-truncated`, which
training/experiments trains, and of the shipped bundles.

python -m research.windows research/figures/windows.png [--bundles FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.summary import bundles_of_text
from wane.models.bundle_checks import read_manifest

BUNDLES = Path("models/bundles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--bundles", type=Path, default=BUNDLES)
    options = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    for index, path in enumerate(bundles_of_text(options.bundles)):
        manifest = read_manifest(path)
        assert manifest.quality is not None
        found, colour = manifest.quality.window["valid"], f"C{index}"
        windows = sorted(found.by_k)
        perplexities = [found.by_k[k].per_token for k in windows]
        axes[0].plot(windows, perplexities, "o-", color=colour, markersize=3, label=manifest.name)
        axes[0].axhline(found.recurrent.per_token, color=colour, linestyle=":", linewidth=1)
        excess = [100 * (perplexity / found.recurrent.per_token - 1) for perplexity in perplexities]
        axes[1].plot(windows, excess, "o-", color=colour, markersize=3, label=manifest.name)
    axes[0].set(
        yscale="log", ylabel="validation perplexity per token", title="perplexity of windows (dotted: recurrent)"
    )
    axes[0].set_yticks([30, 40, 60, 80, 100, 150], ["30", "40", "60", "80", "100", "150"])
    axes[1].set(ylabel="excess over recurrent, %", title="excess perplexity of windows", ylim=(-1, 30))
    axes[1].axhline(0.5, color="0.5", linestyle="--", linewidth=1, label="0.5 %")
    for part in axes:
        part.set(xscale="log", xlabel="window k (tokens)")
        part.set_xticks(windows, [str(k) for k in windows])
        part.minorticks_off()
        part.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, dpi=110)


if __name__ == "__main__":
    main()
