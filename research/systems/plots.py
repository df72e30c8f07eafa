"""The figures of the systems that have one, from the curves that their runs return."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from research.systems import (
    attention,
    copy_memory,
    gradient_cliff,
    gradient_explosion,
    nonlinear_dynamics,
    scheduled_sampling,
    truncated_bptt,
    unstable_training,
)
from research.systems.system import Curves

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def plot_attention(axes: Any, curves: Curves) -> None:
    """Draws the attention, with a cross at each place of the permutation."""
    axes.imshow([curves[f"output {i}"] for i in range(attention.LENGTH)], vmin=0, vmax=1, cmap="Blues")
    axes.plot(curves["permutation"], range(attention.LENGTH), "x", color="C3", label="permutation")
    axes.set(xlabel="input", ylabel="output", title="mean attention over all inputs")


def plot_copy_memory(axes: Any, curves: Curves) -> None:
    """Plots the loss of each model by delay, up to the first delay that it does not learn."""
    for name in copy_memory.MODELS:
        axes.plot(copy_memory.DELAYS[: len(curves[name])], curves[name], ".-", label=name)
    axes.plot(copy_memory.DELAYS, curves["bound"], "C1:", label="its lower bound")
    blind = math.log(copy_memory.SYMBOLS)
    axes.axhline(blind, color="0.5", linestyle="--", label="blind guess, log 4")
    axes.axhline(blind / 2, color="0.8", label="learned: below half of it")
    axes.set(xlabel="delay", ylabel="loss after training, nats", xscale="log", title="copy memory")


def plot_gradient_cliff(axes: Any, curves: Curves) -> None:
    """Plots the clipped descent."""
    axes.plot(curves["clipped"], ".-", label="clipped descent")
    axes.axhline(gradient_cliff.edge(), color="C3", linestyle="--", label="edge of the cliff")
    axes.axhline(1, color="0.5", linestyle=":", label="minimum")
    axes.set(xlabel="step", ylabel="w", title="J(w) = (w^20 - 1)^2 / 2; a plain step leaves at once")


def plot_gradient_explosion(axes: Any, curves: Curves) -> None:
    """Plots the gradients by distance."""
    for number, radius in enumerate(gradient_explosion.RADII):
        axes.semilogy(curves[f"known {radius}"], color=f"C{number}", label=f"largest eigenvalue {radius}")
        axes.semilogy(curves[f"found {radius}"], ".", color=f"C{number}")
    axes.set(xlabel="steps back, T - i", ylabel="norm of dJ/dh_i", title="lines: P D^n P^-1, marks: autograd")


def plot_nonlinear_dynamics(axes: Any, curves: Curves) -> None:
    """Plots the repeated tent map, the runs to fixed points and the growth, and the limit cycle."""
    left, middle, right = axes
    for steps in (1, 3, 5):
        values = curves[f"tent {steps}"]
        left.plot([i / (len(values) - 1) for i in range(len(values))], values, label=f"t = {steps}", linewidth=1)
    left.set(xlabel="h_0", ylabel="h_t", title="tent map: 2^t pieces", ylim=(-0.05, 1.35))
    for name, label in (("grown", "a h, a = 1.37"), ("fixed", "tanh(a h), a = 1.37"), ("faded", "tanh(0.9 h)")):
        middle.plot(curves[name], ".-", label=label)
    level = nonlinear_dynamics.LEVEL
    middle.axhline(level, color="0.5", linestyle=":", label="known fixed point")
    middle.set(xlabel="step", ylabel="h_t", title="growth and fixed points")
    right.plot(curves["cycle 0"], curves["cycle 1"], ".-", linewidth=0.7, label="run")
    right.plot([-level, -level, level, level], [-level, level, -level, level], "x", color="C3", label="known")
    right.set(xlabel="first component", ylabel="second component", title="limit cycle of period 4", ylim=(-0.9, 1.2))


def plot_scheduled_sampling(axes: Any, curves: Curves) -> None:
    """Plots the free runs: known values as lines, reached values as marks."""
    kinds = [name.removesuffix(", known") for name in curves if name.endswith(", known")]
    for number, kind in enumerate(kinds):
        at = range(1, scheduled_sampling.LENGTH + 1)
        axes.plot(at, curves[f"{kind}, known"], color=f"C{number}", label=kind)
        axes.plot(at, curves[f"{kind}, reached"], "o", color=f"C{number}", markersize=4)
    axes.axhline(1 - scheduled_sampling.NOISE, color="0.5", linestyle=":", label="right, when fed the correct word")
    axes.set(xlabel="step of the free run", ylabel="probability", title="exposure bias (lines: known, marks: reached)")


def plot_truncated_bptt(axes: Any, curves: Curves) -> None:
    """Plots tails and gaps with their bounds."""
    styles = {
        "gap": ("C0o", "truncated model, h = w h + 1: gap"),
        "lemma": ("C0--", "Lemma 2: gamma k lambda^k"),
        "tail": ("C1o", "truncated back-propagation, h = w h + 1: tail"),
        "network": ("C2o", "truncated back-propagation, tanh network: tail"),
        "bound": ("C2--", "its bound"),
    }
    for name, (style, label) in styles.items():
        axes.semilogy(truncated_bptt.HORIZONS, curves[name], style, markersize=3, label=label)
    axes.set(xlabel="k", ylabel="norm of the missing gradient", title="what truncation leaves out (lambda = 0.8)")


def plot_unstable_training(axes: Any, curves: Curves) -> None:
    """Plots the logarithm of the loss by step."""
    for name, losses in curves.items():
        w, horizon = name.split()
        q = unstable_training.strength(float(w), int(horizon))
        axes.plot(losses, ".-", label=f"w_0 = {w}, T = {horizon}: q = {q:.2g}")
    axes.set(xlabel="steps of gradient descent at alpha / n", ylabel="log J (symmetric logarithmic scale)")
    axes.set(yscale="symlog", title="J = h_T^2 / 2: diverges for q >= 3, until float64 overflows")


FIGURES: dict[str, tuple[int, Callable[[Any, Curves], None]]] = {
    "attention": (1, plot_attention),
    "copy_memory": (1, plot_copy_memory),
    "gradient_cliff": (1, plot_gradient_cliff),
    "gradient_explosion": (1, plot_gradient_explosion),
    "nonlinear_dynamics": (3, plot_nonlinear_dynamics),
    "scheduled_sampling": (1, plot_scheduled_sampling),
    "truncated_bptt": (1, plot_truncated_bptt),
    "unstable_training": (1, plot_unstable_training),
}
"""The number of panels and the function that draws on them, by the name of the system."""


def plot(name: str, curves: Curves, path: Path) -> None:
    """Saves the figure of a system of FIGURES."""
    panels, draw = FIGURES[name]
    figure, axes = plt.subplots(1, panels, figsize=(3.2 + 3.8 * panels, 4.4), layout="constrained")
    draw(axes, curves)
    for part in figure.axes:
        part.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
