"""Attacks the bounds of random stacks with every kind of layer: convolutions, attention, leaky units, linear recurrent
units, gated cells and LSTMs.

    OMP_NUM_THREADS=1 python -m research.stack_attack [--models N] [--seed N]

For windows of several lengths, a full run reads a past and then the window. The past is changed token by token, so that
the full run's `hidden` moves away from the window's. This distance must be within the certificate's curve, and within
the bound of the request.

`OMP_NUM_THREADS=1 python -m research.vanishing` attacks the rounding of gated networks, and `research.bound_check` all
bounds of recurrent layers.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from research.histories import after
from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.certificate.request import RequestBound
from wane.models.reference import Reference
from wane.models.weights import Weights, weight_shapes

TOKENS, UNITS, PAST, RUNS, ROUNDS = 11, 6, 20, 16, 4
WINDOWS = (1, 2, 3, 5, 8, 12, 20, 30)
ROUNDED = 1e-9
"""The rounding of two runs in float64."""

Fields = dict[str, object]
FADING: tuple[Fields, ...] = (
    {"kind": "gated", "gate_cap": 0.7},
    {"kind": "gated", "gate_cap": 0.9, "candidate": "identity"},
    {"kind": "leaky", "gate_cap": 0.7},
    {"kind": "leaky", "gate_cap": 0.9, "candidate": "identity"},
    {"kind": "lru"},
    {"kind": "lstm"},
)


def _finite(random: np.random.Generator) -> Fields:
    """Returns a random layer with finite memory."""
    if random.random() < 0.5:
        return {"kind": "attention", "window": int(random.integers(2, 6)), "heads": int(random.choice([1, 2, 3]))}
    return {
        "kind": "convolution",
        "kernel_size": int(random.integers(2, 5)),
        "dilation": int(random.choice([1, 2, 3, 7])),
        "channels": str(random.choice(["depthwise", "full"])),
        "activation": str(random.choice(["none", "relu", "tanh", "glu", "wavenet"])),
    }


def random_stack(seed: int) -> tuple[Architecture, Weights]:
    """Returns a random model: up to two layers with finite memory, and up to two with fading memory above them."""
    random = np.random.default_rng(seed)
    layers = [_finite(random) for _ in range(random.integers(0, 3))]
    layers += [FADING[random.integers(len(FADING))] for _ in range(random.integers(0 if layers else 1, 3))]
    residual = bool(random.random() < 0.5)
    block: Fields = {"block": "residual", "feed_forward": int(random.choice([0, 5]))} if residual else {}
    fields = {"vocabulary_size": TOKENS, "embedding": UNITS, "norm_epsilon": 0.25 if residual else 1e-5}
    model = Architecture.model_validate(fields | {"layers": [{"units": UNITS, **each, **block} for each in layers]})
    scale, weights = float(random.choice([0.3, 1.0, 3.0])), {}
    for name, shape in weight_shapes(model).items():
        values = random.normal(size=shape)
        if ".cell." in name and len(shape) > 1:
            values *= (0.3 * min(scale, 1) if "weight_hh" in name else scale) / np.sqrt(shape[-1])
        elif "norm.weight" in name:
            values = 1 + 0.3 * values
        elif name != "embedding.weight":
            values *= 0.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.5
        weights[name] = values.astype(np.float32)
    return model, weights


def examine(seed: int) -> dict[str, float]:
    """Returns, for the model of `seed`: `pairs`, the number of distances that were compared with a bound; `above`, the
    number of those above it; `tightest`, the largest distance divided by its bound."""
    model, weights = random_stack(seed)
    random, exact = np.random.default_rng([seed, 1]), Reference(model, weights)
    certificate, request = certify(model, weights, max(WINDOWS), None), RequestBound(model, weights)
    found = {"pairs": 0.0, "above": 0.0, "tightest": 0.0}
    for length in WINDOWS:
        window: NDArray[np.int64] = random.integers(TOKENS, size=length)
        if random.random() < 0.5:
            window[:] = window[0]
        limits = [float(request(window[None]).radius[0])]
        curve = certificate.state_error_at(length)
        limits += [] if curve is None else [curve]
        cut = after(exact, exact.zero_state(1), None, window)
        past = random.integers(TOKENS, size=(RUNS, PAST))
        for _ in range(ROUNDS):
            apart = np.linalg.norm(after(exact, exact.zero_state(RUNS), past, window) - cut, axis=1)
            for limit in limits:
                found["pairs"] += RUNS
                found["above"] += int((~(apart <= limit + ROUNDED)).sum())
                if ROUNDED < limit < np.inf:
                    found["tightest"] = max(found["tightest"], float(apart.max() / limit))
            past = np.repeat(past[apart.argmax()][None], RUNS, axis=0)
            changed = random.integers(PAST // 2, PAST, size=RUNS - 1)
            past[np.arange(1, RUNS), changed] = random.integers(TOKENS, size=RUNS - 1)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first model")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    seeds = range(options.seed, options.seed + options.models)
    results = [examine(seed) for seed in track(seeds, "models", console=console)]
    pairs, above = (sum(int(each[key]) for each in results) for key in ("pairs", "above"))
    tight = [each["tightest"] for each in results]
    console.print(
        f"{len(results):,} models, {pairs:,} pairs, {above:,} above their bound. Distance / bound: median "
        f"{np.median(tight):.2g}, largest {max(tight):.3g}"
    )
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
