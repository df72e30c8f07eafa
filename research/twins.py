"""Compares a model from recurrent training with its truncated twin, the same model from truncated training. Compares
perplexity, agreement of predictions, latency and weights.

    python -m research.twins --data FOLDER --bundles BUNDLES [--json FILE]

FOLDER contains WikiText-2's word-level files. BUNDLES contains the bundles of the experiments TWINS, of which one does
not ship: `wane train` and `wane export` make them from training/experiments. The perplexities are copied from the
manifests. The program measures everything else: the agreement at consecutive positions of the test split; the latency
of batches of one item, for the two models in alternation; and the distances of the two sets of weights from each other
and from their common initial weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.summary import provenance, write_json
from wane.models.bundle import Bundle
from wane.models.networks import Network
from wane.service.engine.agreement import AgreementStatistics, compare
from wane.service.runners.onnx import OnnxRunner
from wane.training.wikitext import read_wikitext_2

TWINS = ("gated-stable", "gated-stable-truncated")
WARM_TOKENS = 512
ROUNDS, RUNS_A_ROUND = 15, 60

Answers = tuple[NDArray[np.float32], NDArray[np.float32]]


def zero_state(bundle: Bundle) -> dict[str, NDArray[np.float32]]:
    """Returns the state of one session before its first token."""
    return {tensor.name: np.zeros((1, *tensor.shape), np.float32) for tensor in bundle.manifest.state}


def recurrent_answers(bundle: Bundle, runner: OnnxRunner, stream: NDArray[np.int64]) -> Answers:
    """Returns logits (N, V) and hidden (N, H) after every token of `stream`, without resetting the state."""
    state, logits, hidden = zero_state(bundle), [], []
    for token in track(stream, f"{bundle.manifest.name}, recurrent", transient=True):
        found = runner.run("step", {"tokens": np.array([token]), **state})
        state = {name: found[f"next.{name}"] for name in state}
        logits.append(found["logits"][0])
        hidden.append(found["hidden"][0])
    return np.stack(logits), np.stack(hidden)


def window_answers(runner: OnnxRunner, stream: NDArray[np.int64], k: int) -> Answers:
    """Returns logits (N, V) and hidden (N, H) of windows of exactly k tokens, one window for each position from the
    k-th token on."""
    rows = np.lib.stride_tricks.sliding_window_view(stream, k)
    logits, hidden = [], []
    for start in track(range(0, len(rows), 64), f"windows of {k}", transient=True):
        batch = np.ascontiguousarray(rows[start : start + 64])
        found = runner.run("window", {"tokens": batch, "lengths": np.full(len(batch), k)})
        logits.append(found["logits"])
        hidden.append(found["hidden"])
    return np.concatenate(logits), np.concatenate(hidden)


def agreement(one: Answers, other: Answers) -> dict[str, float]:
    """Compares two series of predictions at the same positions. Returns statistics of their agreement."""
    statistics = AgreementStatistics()
    for p, q, h, g in zip(one[0], other[0], one[1], other[1], strict=True):
        statistics.add(compare(p, q, h, g, None, proved=False))
    return {
        "positions": statistics.compared,
        "top1_match_rate": statistics.top1_matches / statistics.compared,
        "total_variation_mean": statistics.total_variation_sum / statistics.compared,
        "total_variation_max": statistics.total_variation_max,
    }


def latencies(
    runners: dict[str, OnnxRunner], bundles: dict[str, Bundle], k: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Measures the latency of one step and of one window of `k` tokens, at batch size 1, in several rounds. Returns the
    quartiles of the rounds' medians, in microseconds."""
    token, rows = np.array([5]), np.full((1, k), 5)
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "window": []} for name in runners}
    for _ in track(range(ROUNDS), "latency", transient=True):
        for name, runner in runners.items():
            step = {"tokens": token, **zero_state(bundles[name])}
            window = {"tokens": rows, "lengths": np.array([k])}
            for role, feeds in (("step", step), ("window", window)):
                times = []
                for _ in range(RUNS_A_ROUND):
                    start = time.perf_counter()
                    runner.run(role, feeds)  # type: ignore[arg-type]
                    times.append(1e6 * (time.perf_counter() - start))
                found[name][role].append(float(np.median(times)))
    return {name: {role: quartiles(medians) for role, medians in roles.items()} for name, roles in found.items()}


def quartiles(values: list[float]) -> dict[str, float]:
    """Returns the quartiles of `values` by name."""
    return dict(zip(("p25", "median", "p75"), np.percentile(values, (25, 50, 75)).tolist(), strict=True))


def weight_distance(bundles: dict[str, Bundle]) -> dict[str, float]:
    """Returns Euclidean distances over all weights: between the twins, and between each twin and the common initial
    weights."""
    first, second = (bundles[name].weights() for name in TWINS)
    manifest = bundles[TWINS[0]].manifest
    torch.manual_seed(manifest.provenance.seed)
    start = {name: tensor.numpy() for name, tensor in Network(manifest.architecture).weights().items()}

    def distance(a: dict[str, NDArray[np.float32]], b: dict[str, NDArray[np.float32]]) -> float:
        return float(np.sqrt(sum(np.sum((a[name].astype(np.float64) - b[name]) ** 2) for name in a)))

    zero = {name: np.zeros_like(tensor) for name, tensor in first.items()}
    return {
        "between_twins": distance(first, second),
        "recurrent_from_start": distance(first, start),
        "truncated_from_start": distance(second, start),
        "norm_recurrent": distance(first, zero),
        "norm_truncated": distance(second, zero),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bundles", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    bundles = {name: Bundle.read(options.bundles / name) for name in TWINS}
    runners = {name: OnnxRunner(bundle, "cpu", 1) for name, bundle in bundles.items()}
    vocabulary, k = bundles[TWINS[0]].vocabulary, bundles[TWINS[0]].manifest.window
    lines = read_wikitext_2(options.data)[0]["test"]
    stream = np.array([vocabulary.eos_id, *vocabulary.encode("\n".join(lines[:600]))])
    stream = stream[: WARM_TOKENS + options.positions + k - 1]
    # At every compared position, the recurrent run has read at least WARM_TOKENS tokens before the window's first
    # token.
    kept = slice(WARM_TOKENS + k - 1, None)

    recurrent, window = {}, {}
    for name in TWINS:
        logits, hidden = recurrent_answers(bundles[name], runners[name], stream)
        recurrent[name] = logits[kept], hidden[kept]
        window[name] = window_answers(runners[name], stream[WARM_TOKENS:], k)
    one, two = TWINS
    results = {
        "k": k,
        "agreement": {
            f"{one}: window and recurrent": agreement(recurrent[one], window[one]),
            f"{two}: window and recurrent": agreement(recurrent[two], window[two]),
            f"{one} recurrent and {two} window": agreement(recurrent[one], window[two]),
        },
        "latency_us": latencies(runners, bundles, k),
        "weights": weight_distance(bundles),
    }
    show(results, bundles, Console())
    if options.json is not None:
        origin = provenance("research.twins", "onnxruntime", "numpy", "torch")
        write_json(options.json, {**origin, "rounds": ROUNDS, **results})


def show(results: dict, bundles: dict[str, Bundle], console: Console) -> None:  # type: ignore[type-arg]
    """Prints the tables."""
    k = results["k"]
    table = Table("", *TWINS, title=f"The twins (window of {k})")
    for split in ("valid", "test"):
        found = [bundles[name].manifest.quality for name in TWINS]
        table.add_row(
            f"{split} perplexity per token, recurrent, whole split",
            *(f"{q.recurrent[split].per_token:.2f}" for q in found if q),
        )
        table.add_row(
            f"{split} perplexity per token, recurrent, at the positions of windows",
            *(f"{q.window[split].recurrent.per_token:.2f}" for q in found if q),
        )
        table.add_row(
            f"{split} perplexity per token, windows of {k}, at the same positions",
            *(f"{q.window[split].by_k[k].per_token:.2f}" for q in found if q),
        )
    for role in ("step", "window"):
        cells = []
        for name in TWINS:
            of_role = results["latency_us"][name][role]
            cells.append(f"{of_role['median']:.0f} ({of_role['p25']:.0f}-{of_role['p75']:.0f})")
        table.add_row(f"{role}, batch 1, us: median (quartiles) of {ROUNDS} rounds", *cells)
    console.print(table)
    table = Table("agreement", "positions", "top-1 match", "TV mean", "TV max")
    for what, found in results["agreement"].items():
        table.add_row(
            what,
            f"{found['positions']}",
            f"{found['top1_match_rate']:.3f}",
            f"{found['total_variation_mean']:.4f}",
            f"{found['total_variation_max']:.3f}",
        )
    console.print(table)
    weights = results["weights"]
    console.print(
        f"distance between the weights of the twins {weights['between_twins']:.2f}; distance from the common initial "
        f"weights: recurrent {weights['recurrent_from_start']:.2f}, truncated {weights['truncated_from_start']:.2f}; "
        f"norm of the weights: recurrent {weights['norm_recurrent']:.2f}, truncated {weights['norm_truncated']:.2f}"
    )


if __name__ == "__main__":
    main()
