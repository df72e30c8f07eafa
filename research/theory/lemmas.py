"""Lemmas 1, 2 and 3 of Miller and Hardt ("Stable recurrent models", 2019), measured on random instances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from research.theory.curve import Result, curve, numbers
from research.theory.instance import Constants, Instance, size
from wane.models.bundle_checks import read_manifest

BUNDLE = Path(__file__).parents[2] / "models" / "bundles" / "rnn-stable"
EPSILONS = (1e-1, 1e-2, 1e-3)
LEAST = 1e-11
"""Windows whose lambda^k is smaller are not measured: float64's rounding would be a visible part of the difference."""

STRIDE = 1e-4
"""The distance of two weights by which a curvature is measured."""

ASCENT = 30
"""The number of steps of the search for the direction of the largest curvature."""


def windows_of(instance: Instance, most: int = 90) -> list[int]:
    """Returns every k up to `most` whose difference float64 can show."""
    return list(range(1, min(most, instance.tokens - 1, int(math.log(LEAST) / math.log(instance.factor))) + 1))


def lemma1(instance: Instance, constants: Constants) -> Result:
    """Measures |y_T - y_T^k|, the largest of the sequences, for each k, and the k that each epsilon needs."""
    windows = windows_of(instance)
    outputs = instance.outputs(instance.weights.expand(-1, len(windows) + 1, -1, -1), [instance.tokens, *windows])
    gap = (outputs[:, 1:] - outputs[:, :1]).norm(dim=-1).amax(-1)
    needed = []
    for epsilon in EPSILONS:
        formula = constants.enough(epsilon)
        measured = first_within(gap, windows, epsilon)
        needed.append(
            {"epsilon": epsilon, "measured": numbers(measured), "formula": numbers(formula)}
            | {"claim": "measured k <= formula", "holds": not bool(too_long(measured, formula, windows).any())}
        )
    return {"windows": windows, **curve(gap, constants.output_gap(torch.tensor(windows))), "needed": needed}


def first_within(gap: Tensor, windows: Sequence[int], epsilon: float) -> Tensor:
    """Returns the smallest measured k from which on all differences are at most epsilon, (seeds,); infinity if the last
    one is larger. gap: (seeds, windows)."""
    grid = torch.tensor([0.0, *windows, math.inf], dtype=torch.float64)
    beyond = torch.where(gap > epsilon, torch.arange(1, len(windows) + 1), 0).amax(1)
    return torch.where(beyond > 0, grid[beyond + 1], grid[1])


def too_long(measured: Tensor, formula: Tensor, windows: Sequence[int]) -> Tensor:
    """Returns for each seed whether the measured k contradicts a formula's. A formula's k is rounded up to the next
    measured window; one beyond the last window cannot be judged."""
    grid = torch.tensor([*windows, math.inf], dtype=torch.float64)
    return measured > grid[torch.searchsorted(grid, formula)]


def lemma2(instance: Instance, constants: Constants) -> Result:
    """Measures the difference of the gradients of the recurrent and of the truncated model, with equal weights."""
    windows = windows_of(instance)
    models = [instance.tokens, *windows]
    gradient, _ = instance.gradients(instance.weights.expand(-1, len(models), -1, -1), models)
    gap = size(gradient[:, 1:] - gradient[:, :1])
    return {"windows": windows, **curve(gap, constants.gradient_gap(torch.tensor(windows)))}


def lemma3(instance: Instance, constants: Constants, seed: int) -> Result:
    """Measures how fast the gradient changes with the weights: between random weights of Omega, and between the
    instance's weights and near ones, in the direction of the largest curvature that a power iteration finds."""
    generator = torch.Generator().manual_seed(seed)
    whole = [instance.tokens]
    start = instance.inside(STRIDE)
    here, _ = instance.gradients(start, whole)
    direction = unit(torch.randn(start.shape, generator=generator, dtype=torch.float64))
    for _ in range(ASCENT):
        change = instance.gradients(start + STRIDE * direction, whole)[0] - here
        steepest, direction = size(change) / STRIDE, unit(change)
    pairs = []
    for distance in (0.01, 0.1, 1.0):
        random = unit(torch.randn(start.shape, generator=generator, dtype=torch.float64))
        other = instance.project(instance.weights + distance * random)
        change = instance.gradients(other, whole)[0] - instance.gradients(instance.weights, whole)[0]
        pairs.append(size(change) / size(other - instance.weights))
    slope = torch.cat([steepest, *pairs], dim=1).amax(1, keepdim=True)
    return curve(slope, constants.beta[:, None])


def unit(weights: Tensor) -> Tensor:
    """Returns the weights of each model divided by their norm."""
    return weights / size(weights)[..., None, None]


def served(epsilons: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4)) -> Result:
    """Compares Lemma 1's formula with the certificate of the shipped `rnn-stable`, both for the distance of states.

    The formula's L_x B_x is the largest |U x + b| over the vocabulary. The certificate starts from a smaller bound of
    the state, so its curve never asks for more tokens.
    """
    manifest = read_manifest(BUNDLE)
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(BUNDLE / manifest.weights).items()}
    cell = "layers.0.cell."
    driven = weights["embedding.weight"] @ weights[f"{cell}weight_ih_l0"].T
    driven = driven + weights[f"{cell}bias_ih_l0"] + weights[f"{cell}bias_hh_l0"]
    largest = float(np.linalg.norm(driven, axis=1).max())
    factor, curve = manifest.certificate.layers[0].factor, manifest.certificate.state_error
    needed = []
    for epsilon in epsilons:
        formula = math.ceil(math.log(largest / ((1 - factor) * epsilon)) / -math.log(factor))
        proved = next(k for k, error in enumerate(curve, start=1) if error <= epsilon)
        claim = {"claim": "certificate's k <= formula", "holds": proved <= formula}
        needed.append({"epsilon": epsilon, "certificate": proved, "formula": formula, **claim})
    return {"bundle": manifest.name, "factor": factor, "largest_input": largest, "needed": needed}
