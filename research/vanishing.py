"""Attacks the bound of the rounding of residual networks with one gated layer (`models/certificate/readout.py`).

    OMP_NUM_THREADS=1 python -m research.vanishing [--models N] [--seed N] [--output FILE]

Each model is random. Two of its tokens make the input of a LayerNorm as short as possible, so that the LayerNorm
amplifies the rounding most:

- Above the cell: after a token has been held for long, gradient descent on the embedding of token ABOVE shortens the
  input of one of the LayerNorms above the cell.
- Below the cell, in half of the models without convolution blocks: the embedding of token BELOW is constant but for its
  last bits, so that the LayerNorm's output is mostly rounding. The gates and candidates of some units read the sum of
  this output, which is zero in exact arithmetic. Of many such embeddings, the one that opens the computed gates most is
  chosen.

Then pairs of float32 runs of the exported `step` graph read the same tokens: every token held after every token, and
then every token. The first run has read other tokens before, and the second run starts from the zero state. Their
`hidden` must be within the certificate's curve plus the rounding that the second run's LayerNorms allow, after 1, 2, 4,
... of the held tokens, and at every token of the last part.

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
ABOVE, BELOW = TOKENS - 1, TOKENS - 2
DESCENT, RATE = 60, 0.5
EFOLDS = 17
"""A token is held until the effect of the state before it has shrunk by a factor of exp(17), below the roundoff of
float32."""
TRIALS = 256


def attacked(seed: int) -> tuple[Architecture, Weights]:
    """Returns a random model with the tokens ABOVE and BELOW."""
    random = np.random.default_rng(seed)
    hidden = int(random.choice([8, 16, 32, 64]))
    front = {"blocks": 1, "kernel_size": 3, "feed_forward": 8} if random.random() < 0.2 else None
    architecture = Architecture.model_validate(
        {
            "cell": "gated",
            "block": "residual",
            "layers": 1,
            "vocabulary_size": TOKENS,
            "embedding": hidden,
            "hidden": hidden,
            "feed_forward": int(random.choice([0, 8, 24])),
            "front": front,
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
    # Equal gates at all tokens let rounding move the two states as far apart as the bound says.
    weights["layers.0.cell.weight"][:hidden] *= np.float32(random.choice([1, 0.1]))
    weights["layers.0.cell.bias"][:hidden] += np.float32(random.uniform(0, 10))
    if front is None and random.random() < 0.5:
        _nearly_constant(architecture, weights, random)
    _descend(architecture, weights, bool(random.random() < 0.5))
    return architecture, weights


def _nearly_constant(architecture: Architecture, weights: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """Changes the embedding of the token BELOW, and the weights of some gates and candidates."""
    hidden = architecture.hidden
    sums = np.ones(hidden, np.float32) / weights["layers.0.norm.weight"] / hidden
    chosen = np.flatnonzero(random.random(2 * hidden) < random.choice([0.3, 1.0]))
    weights["layers.0.cell.weight"][chosen] = sums * np.float32(10 ** random.uniform(0.5, 2.5))
    weights["layers.0.cell.bias"][chosen[chosen < hidden]] = random.uniform(-8, -1)
    # The last bits of these embeddings are about as large as the root of the variance's epsilon.
    length = 2.0**24 * np.sqrt(architecture.norm_epsilon) * 10 ** random.uniform(-1.5, 1)
    near = np.repeat((length * (1 + 0.3 * random.random((TRIALS, 1)))).astype(np.float32), hidden, axis=1)
    near += np.spacing(near) * random.integers(-2, 3, size=near.shape).astype(np.float32)
    probe = {
        "embedding.weight": near,
        "head.weight": np.zeros((TRIALS, hidden), np.float32),
        "head.bias": np.zeros(TRIALS, np.float32),
    }
    data, many = encode_weights(weights | probe), architecture.model_copy(update={"vocabulary_size": TRIALS})
    tokens = np.arange(TRIALS)
    with opened_step(build_graph("step", many, WEIGHTS, tensor_extents(data)), data) as run:
        low, high = (
            run("step", {"tokens": tokens, "layers.0.s": np.full((TRIALS, hidden), value, np.float32)})
            for value in (0, 1)
        )
    opened = (high["next.layers.0.s"] - low["next.layers.0.s"]).sum(axis=1)
    weights["embedding.weight"][BELOW] = near[opened.argmax()]


def _descend(architecture: Architecture, weights: dict[str, np.ndarray], at_top: bool) -> None:
    """Changes the embedding of the token ABOVE. at_top: whether the input of the last LayerNorm is shortened, instead
    of the sum after the mixing matrix."""
    state = _held(Reference(architecture, weights))
    last, best = np.array([ABOVE]), np.inf
    row = weights["embedding.weight"][ABOVE].astype(np.float64)
    for _ in range(DESCENT):
        weights["embedding.weight"][ABOVE] = row
        exact = Reference(architecture, weights)
        _, after = exact.advance(last, state)
        x, y = exact.stream(last, state)[0], after["layers.0.s"]
        mix = weights["layers.0.mix.weight"].astype(np.float64)
        x = exact._above_cell(architecture.placed(finite=False)[0], x, y) if at_top else x + y @ mix.T
        x = x[0] - x.mean()
        if np.linalg.norm(x) < best:
            best, kept = float(np.linalg.norm(x)), row
        row = row - RATE * x
    weights["embedding.weight"][ABOVE] = kept


def _held(exact: Reference) -> dict[str, np.ndarray]:
    """Returns the state that the first token approaches if it is held for ever."""
    name, token, state = "layers.0.s", np.array([0]), exact.zero_state(1)
    for _ in range(8):  # more tokens than the convolution blocks read
        _, state = exact.advance(token, state)
    ends = [exact.advance(token, {**state, name: np.full_like(state[name], value)})[1][name] for value in (0, 1)]
    return {**state, name: ends[0] / (1 - (ends[1] - ends[0]))}


def examine(seed: int) -> dict[str, float]:
    """Returns the number of pairs of a model, the number of distances above their bound, the largest distance divided
    by its bound while the tokens are held (`held`) and afterwards (`tightest`), and the largest 1 / sqrt(variance +
    epsilon) of a LayerNorm above the cell, of the greatest possible."""
    architecture, weights = attacked(seed)
    data = encode_weights(weights)
    step = build_graph("step", architecture, WEIGHTS, tensor_extents(data))
    hold = int(EFOLDS / (1 - architecture.fading[0].cap)) + 20
    certificate = certify(architecture, weights, hold + 1, None)
    readout = certificate.readout
    assert readout is not None, "the model has no readout: this is a bug"
    past, held = (each.ravel() for each in np.meshgrid(np.arange(TOKENS), np.arange(TOKENS)))
    pairs = len(held)
    full, cut = (Reference(architecture, weights).zero_state(pairs) for _ in range(2))
    state = {name: np.concatenate([full[name], cut[name]]).astype(np.float32) for name in full}
    found = {"seed": seed, "pairs": pairs * TOKENS, "above": 0, "held": 0.0, "tightest": 0.0, "steepest": 0.0}

    def compare(ends: dict[str, np.ndarray], read: int, part: str) -> None:
        """Compares the two runs of each pair, whose second run has read `read` tokens."""
        one, other = np.split(ends["hidden"].astype(np.float64), 2)
        norms = ends["norms"][pairs:]
        curve = certificate.state_error[read - 1] * (1 + readout.gate) ** read
        distance, bound = np.linalg.norm(one - other, axis=1), curve + readout.between_all(norms)
        found["above"] += int((~(distance <= bound)).sum())
        found[part] = max(found[part], float((distance / bound).max()))
        found["steepest"] = max(found["steepest"], float(norms[:, 1:].max() * np.sqrt(architecture.norm_epsilon)))

    with opened_step(step, data) as run:

        def read(tokens: np.ndarray, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return run("step", {"tokens": tokens, **state})

        for _ in range(PAST):
            ends = read(np.tile(past, 2), state)
            state = {name: ends[f"next.{name}"] for name in state}
        for values in state.values():
            values[pairs:] = 0
        for index in range(1, hold + 1):
            ends = read(np.tile(held, 2), state)
            state = {name: ends[f"next.{name}"] for name in state}
            if index & (index - 1) == 0:
                compare(ends, index, "held")
        for token in range(TOKENS):
            compare(read(np.full(2 * pairs, token), state), hold + 1, "tightest")
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
    held, tight = ([each[part] for each in results] for part in ("held", "tightest"))
    console.print(
        f"{len(results):,} models, {pairs:,} pairs, {above:,} above their bound. Distance / bound: median "
        f"{np.median(held):.2g}, largest {max(held):.3g} while the tokens are held; median {np.median(tight):.2g}, "
        f"largest {max(tight):.3g} afterwards. Largest amplification, of the greatest possible: "
        f"{max(each['steepest'] for each in results):.3g}"
    )
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
