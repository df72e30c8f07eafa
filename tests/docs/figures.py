"""Builds the tables of figures in the documentation from the manifests of the shipped bundles."""

from __future__ import annotations

from pathlib import Path

from research.served_proofs import read
from wane.models.bundle_checks import read_manifest
from wane.models.manifest import Manifest, Quality

ROOT = Path(__file__).parents[2]
SHIPPED = ("gated-stable-64", "gated-stable", "rnn-stable", "lstm")
"""The models of text."""
EVENTS = "shop"


def manifests() -> list[Manifest]:
    """Returns the manifests of the shipped bundles, in the order of the tables."""
    return [read_manifest(ROOT / "models" / "bundles" / name) for name in SHIPPED]


def of_events() -> Manifest:
    """Returns the manifest of the shipped model of events."""
    return read_manifest(ROOT / "models" / "bundles" / EVENTS)


def quality(manifest: Manifest) -> Quality:
    assert manifest.quality is not None
    return manifest.quality


def size_mb(manifest: Manifest) -> float:
    """Returns the size of all files of the bundle, in units of 10^6 bytes."""
    folder = ROOT / "models" / "bundles" / manifest.name
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def results_table() -> list[str]:
    """Returns the table of the models: their perplexities in the recurrent and in the window mode, per BPE token and
    per word, and the contraction factors of their layers."""
    lines = [
        "| model | MB | test perplexity, recurrent: per token (per word) | change in windows of 64 "
        "| smallest k within 0.5 % | contraction by layer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for manifest in manifests():
        found = quality(manifest)
        recurrent, window = found.recurrent["test"], found.window["test"]
        change = 100 * (window.by_k[64].per_token / window.recurrent.per_token - 1)
        k = found.window_within_half_percent
        factors = ", ".join(f"{layer.factor:.3g}" for layer in manifest.certificate.layers)
        lines.append(
            f"| `{manifest.name}` | {size_mb(manifest):.1f} | {recurrent.per_token:.2f} ({recurrent.per_word:.1f}) "
            f"| {change:+.2f} % | {'over 256' if k is None else k} "
            f"| {factors if manifest.certificate.contractive else 'none'} |"
        )
    return lines


def proofs_table() -> list[str]:
    """Returns the table of the windows that the certificate needs for any text, and of the bounds that requests with
    `prove` reach at the models' own k."""
    lines = [
        "| model | k(0.5) | k(0.001) | median `error_bound` with `prove` | 90th percentile | `top1_proved` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    served = read(ROOT / "research" / "figures" / "served_proofs.json")
    for manifest in manifests():
        if manifest.name in served:
            found, smallest = served[manifest.name], manifest.certificate.smallest_window
            lines.append(
                f"| `{manifest.name}` | {smallest(0.5)} | {smallest(0.001)} | {found.bound_median:.2g} at {found.k} "
                f"| {found.bound_p90:.2g} at {found.k} | {100 * found.proved:.1f} % |"
            )
    return lines


def window_table() -> list[str]:
    """Returns the table of the validation perplexity per token: for each window length, and for the recurrent mode at
    the same positions."""
    windows = sorted(quality(manifests()[0]).window["valid"].by_k)
    lines = [
        "| model | " + " | ".join(f"k = {k}" for k in windows) + " | recurrent |",
        "| --- |" + " --- |" * (len(windows) + 1),
    ]
    for manifest in manifests():
        found = quality(manifest).window["valid"]
        cells = [f"{found.by_k[k].per_token:.2f}" for k in windows]
        lines.append(f"| `{manifest.name}` | " + " | ".join(cells) + f" | {found.recurrent.per_token:.2f} |")
    return lines


def training_table() -> list[str]:
    """Returns the table of training settings."""
    lines = [
        "| model | what | weights | steps | epochs | wall time | validation, per token (per word) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for manifest in manifests():
        provenance, valid = manifest.provenance, quality(manifest).recurrent["valid"]
        training = provenance.config["training"]
        assert isinstance(training, dict)
        epochs = provenance.steps * training["batch"] * training["chunk"] / TRAINING_TOKENS
        weights = (ROOT / "models" / "bundles" / manifest.name / manifest.weights).stat().st_size / 4
        lines.append(
            f"| `{manifest.name}` | {manifest.description} | {weights / 1e6:.2f} M | {provenance.steps:,} "
            f"| {epochs:.1f} | {provenance.train_wall_s / 60:.0f} min | {valid.per_token:.2f} ({valid.per_word:.1f}) |"
        )
    return lines


TRAINING_TOKENS = 3_482_766
"""The number of tokens in WikiText-2's training split with the shared vocabulary."""
