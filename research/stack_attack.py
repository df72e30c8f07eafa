"""Attacks the bounds of random stacks of layers of every kind.

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
from wane.models.layer_registry import FADING, KINDS, Kind
from wane.models.reference import Reference
from wane.models.weights import Weights, weight_shapes

TOKENS, UNITS, PAST, RUNS, ROUNDS = 11, 6, 20, 16, 4
WINDOWS = (1, 2, 3, 5, 8, 12, 20, 30)
ROUNDED = 1e-9
"""The rounding of two runs in float64."""

Fields = dict[str, object]
FINITE = tuple(kind for kind in KINDS if kind not in FADING)


def _layer(random: np.random.Generator, kind: Kind) -> Fields:
    """Returns a random layer of a kind."""
    fields: Fields = {"kind": kind, "units": UNITS}
    if kind == "attention":
        fields |= {"window": int(random.integers(2, 6)), "heads": int(random.choice([1, 2, 3]))}
    elif kind == "convolution":
        fields |= {"kernel_size": int(random.integers(2, 5)), "dilation": int(random.choice([1, 2, 3, 7]))}
        fields["channels"] = str(random.choice(["depthwise", "full"]))
        fields["activation"] = str(random.choice(["none", "relu", "tanh", "glu", "wavenet"]))
    elif KINDS[kind].input_gated:
        fields["gate_cap"] = float(random.choice([0.7, 0.9]))
        fields["candidate"] = str(random.choice(["tanh", "identity", "positive"]))
    return fields


def random_stack(seed: int, kind: Kind | None = None) -> tuple[Architecture, Weights]:
    """Returns a random model: up to two layers with finite memory, and up to two with fading memory above them. kind:
    that of one more layer, at the bottom if its memory is finite, and else on top."""
    random = np.random.default_rng(seed)
    layers = [_layer(random, FINITE[random.integers(len(FINITE))]) for _ in range(random.integers(0, 3))]
    above = random.integers(0 if layers or kind else 1, 3)
    layers += [_layer(random, FADING[random.integers(len(FADING))]) for _ in range(above)]
    if kind is not None:
        layers.insert(0 if KINDS[kind].finite else len(layers), _layer(random, kind))
    residual = bool(random.random() < 0.5)
    block: Fields = {"block": "residual", "feed_forward": int(random.choice([0, 5]))} if residual else {}
    if residual and all(each["kind"] in FINITE for each in layers):
        block["skip"] = bool(random.random() < 0.5)
    fields = {"vocabulary_size": TOKENS, "embedding": UNITS, "norm_epsilon": 0.25 if residual else 1e-5}
    model = Architecture.model_validate(fields | {"layers": [each | block for each in layers]})
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


def examine(seed: int, kind: Kind | None = None) -> dict[str, float]:
    """Returns, for the model of `seed` and `kind` (see `random_stack`): `pairs`, the number of distances that were
    compared with a bound; `above`, the number of those above it; `tightest`, the largest distance divided by its
    bound."""
    model, weights = random_stack(seed, kind)
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
