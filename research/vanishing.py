"""Attacks the bound of the rounding of residual networks with one gated layer (`models/certificate/readout.py`).

    python -m research.vanishing [--models N] [--seed N] [--output FILE]

Each model is random. After a token has been held for long, gradient descent on the embedding of another token makes the
input of a LayerNorm above the cell as short as possible, so that the LayerNorm amplifies the rounding most. Then pairs
of float32 runs of the exported `step` graph read the same tokens: every token held after every token, and then every
token. The first run has read other tokens before, and the second run starts from the zero state. Their `hidden` must be
within the certificate's curve plus the rounding that the second run's LayerNorms allow, at every token of the last
part.

The file of `--output` has one JSON line for each model. If the program is started again, it skips these models.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from wane.models.architecture import Architecture
from wane.models.certificate import certify
from wane.models.export.export import WEIGHTS, opened_step
from wane.models.export.roles import build_graph
from wane.models.reference import Reference
from wane.models.weights import Weights, encode_weights, tensor_extents, weight_shapes

TOKENS, PAST = 8, 60
LONGEST_HOLD, DESCENT, RATE = 1500, 60, 0.5


def attacked(seed: int) -> tuple[Architecture, Weights]:
    """Returns a random model. The embedding of the last token of its vocabulary shortens the input of a LayerNorm after
    the first token has been held."""
    random = np.random.default_rng(seed)
    hidden = int(random.choice([8, 16, 32, 64]))
    architecture = Architecture.model_validate(
        {
            "cell": "gated",
            "block": "residual",
            "layers": 1,
            "vocabulary_size": TOKENS,
            "embedding": hidden,
            "hidden": hidden,
            "feed_forward": int(random.choice([0, 8, 24])),
            "norm_epsilon": float(random.choice([1e-10, 1e-7, 1e-5, 0.01])),
            "gate_caps": (float(random.uniform(0.5, 0.99)),),
            "tied": False,
        }
    )
    scale = 10 ** random.uniform(-1.5, 0.2)
    weights = {}
    for name, shape in weight_shapes(architecture).items():
        values = random.normal(size=shape)
        if len(shape) == 2 and name != "embedding.weight":
            values *= (1.0 if ".cell." in name else scale) / np.sqrt(shape[-1])
        elif "norm.weight" in name:
            values = 1 + 0.3 * values
        weights[name] = values.astype(np.float32)
    weights["layers.0.cell.bias"][:hidden] += np.float32(random.uniform(0, 5))
    _descend(architecture, weights, bool(random.random() < 0.5))
    return architecture, weights


def _descend(architecture: Architecture, weights: dict[str, np.ndarray], at_top: bool) -> None:
    """Changes the embedding of the last token. at_top: whether the input of the last LayerNorm is shortened, instead of
    the sum after the mixing matrix."""
    exact = Reference(architecture, weights)
    state = exact.zero_state(1)
    for _ in range(LONGEST_HOLD // 3):
        _, state = exact.advance(np.array([0]), state)
    last, best = np.array([TOKENS - 1]), np.inf
    row = weights["embedding.weight"][-1].astype(np.float64)
    for _ in range(DESCENT):
        weights["embedding.weight"][-1] = row
        exact = Reference(architecture, weights)
        _, after = exact.advance(last, state)
        x = weights["embedding.weight"][-1:].astype(np.float64)
        y = after["layers.0.s"]
        x = (
            exact._above_cell(architecture.placed(finite=False)[0], x, y)
            if at_top
            else x + y @ weights["layers.0.mix.weight"].T.astype(np.float64)
        )
        x = x[0] - x.mean()
        if np.linalg.norm(x) < best:
            best, kept = float(np.linalg.norm(x)), row
        row = row - RATE * x
    weights["embedding.weight"][-1] = kept


def examine(seed: int) -> dict[str, float]:
    """Returns the number of pairs of a model, the number of pairs above their bound, the largest distance divided by
    its bound, and the largest 1 / sqrt(variance + epsilon) of a LayerNorm."""
    architecture, weights = attacked(seed)
    data = encode_weights(weights)
    step = build_graph("step", architecture, WEIGHTS, tensor_extents(data))
    hold = min(int(4 / (1 - architecture.layers[0].cap)) + 200, LONGEST_HOLD)
    certificate = certify(architecture, weights, hold + 1, None)
    readout = certificate.readout
    assert readout is not None, "the model has no readout: this is a bug"
    past, held = (each.ravel() for each in np.meshgrid(np.arange(TOKENS), np.arange(TOKENS)))
    full, cut = (np.zeros((len(held), architecture.hidden), np.float32) for _ in range(2))
    found = {"seed": seed, "pairs": 0, "above": 0, "tightest": 0.0, "steepest": 0.0}
    with opened_step(step, data) as run:
        for _ in range(PAST):
            full = run("step", {"tokens": past, "layers.0.s": full})["next.layers.0.s"]
        for _ in range(hold):
            both = run("step", {"tokens": np.tile(held, 2), "layers.0.s": np.concatenate([full, cut])})
            full, cut = np.split(both["next.layers.0.s"], 2)
        curve = certificate.state_error[hold] * (1 + readout.gate) ** (hold + 1)
        for token in range(TOKENS):
            tokens = np.full(2 * len(held), token)
            ends = run("step", {"tokens": tokens, "layers.0.s": np.concatenate([full, cut])})
            one, other = np.split(ends["hidden"].astype(np.float64), 2)
            norms = np.split(ends["norms"], 2)[1]
            distance, bound = np.linalg.norm(one - other, axis=1), curve + readout.between_all(norms)
            found["pairs"] += len(distance)
            found["above"] += int((~(distance <= bound)).sum())
            found["tightest"] = max(found["tightest"], float((distance / bound).max()))
            found["steepest"] = max(found["steepest"], float(norms[:, 1:].max() * np.sqrt(architecture.norm_epsilon)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    console, results = Console(stderr=True), []
    if options.output is not None and options.output.exists():
        results = [json.loads(line) for line in options.output.read_text().splitlines()]
    known = {int(each["seed"]) for each in results}
    seeds = [seed for seed in range(options.seed, options.seed + options.models) if seed not in known]
    for seed in track(seeds, "models", console=console):
        results.append(examine(seed))
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    pairs, above = (sum(int(each[key]) for each in results) for key in ("pairs", "above"))
    tight = [each["tightest"] for each in results]
    console.print(
        f"{len(results):,} models, {pairs:,} pairs, {above:,} above their bound. Distance / bound: median "
        f"{np.median(tight):.2g}, largest {max(tight):.3g}. Largest amplification, of the greatest possible: "
        f"{max(each['steepest'] for each in results):.3g}"
    )
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
