"""Checks the bounds and proofs in the service's answers to window requests with `prove: true`. The answers include the
model's cache.

    OMP_NUM_THREADS=1 python -m research.served_proofs --data FOLDER [--only NAME ...] [--positions N] [--timed N]
    python -m research.served_proofs --render

FOLDER contains WikiText-2's word-level files. The positions are spread evenly over the test split. At each position, an
engine answers a prediction in the mode `window` with `prove`. The request has the last tokens up to the position: as
many as the window and the model's cache need. The answer's whole distribution is compared with the distribution of a
never-interrupted run in float64, mixed with the same cache. A bound is violated if the observed total variation exceeds
`error_bound`. A proof is wrong if `top1_proved` is true and the two most probable tokens differ.

The processor time that `prove` adds is measured at `--timed` of the positions. At each of them, one request with
`prove` and one request without it run one after the other, in alternating order, without other requests. The figures
are the medians of the two times and of their difference. They are times of all threads of the process, because other
programs on the machine change them less than the time on the clock.

The results of each bundle are written to the JSON file as soon as they are measured. With `--render` the program only
makes the page's table from the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from benchmarks.page import markdown, put
from benchmarks.summary import digits, provenance, write_json
from research.proofs import read_stream
from research.prover import Never, Tokens, never_interrupted
from wane.models.bundle import Bundle
from wane.models.cache_mixture import CacheMixture
from wane.models.layer_registry import Frozen
from wane.models.reference import Reference
from wane.service.engine.engine import Engine
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest

BUNDLES = Path("models/bundles")
SERVED = (("gated-stable-64", 64), ("gated-stable-128", 128))
"""The measured bundles, with the length k of their windows. `gated-stable-128` does not ship: `wane train
training/experiments/gated-stable-128.toml` trains it, and `--bundles` names the folder of its bundle."""

PAGE, FIGURES, TABLE = Path("research/stability.md"), Path("research/figures/served_proofs.json"), "served"
FLOAT32 = 1e-6
"""The tolerance of an observed total variation. It covers the rounding of an answer's probabilities to float32."""

Values = NDArray[np.float64]


class Times(Frozen):
    """Processor times of requests at `positions` positions, in milliseconds. plain_ms, prove_ms: the median time of a
    request without and with `prove`. added_ms: the median of the differences of the two times at one position."""

    positions: int
    plain_ms: float
    prove_ms: float
    added_ms: float


class Figures(Frozen):
    """The results of one bundle.

    - weights: the SHA-256 of the weights file.
    - k: the length of the windows, in tokens. cache: the length of the cache, None without a cache.
    - proved: the share of answers with `top1_proved`.
    - equal: the share of answers whose most probable token is that of the never-interrupted run.
    - bound_median, bound_p90, bound_largest: the median, the 90th percentile and the largest value of `error_bound`.
    - observed_median, observed_largest: the median and the largest total variation between an answer and the
      never-interrupted run.
    - violations: the number of violated bounds and wrong proofs.
    - times: None if no request was timed.
    """

    weights: str
    k: int
    cache: int | None
    positions: int
    proved: float
    equal: float
    bound_median: float
    bound_p90: float
    bound_largest: float
    observed_median: float
    observed_largest: float
    violations: int
    times: Times | None


class Distributions:
    """The distributions of a bundle's never-interrupted run, mixed with the bundle's cache."""

    def __init__(self, bundle: Bundle, reference: Reference) -> None:
        self._reference = reference
        self._mixture = None
        if bundle.manifest.cache is not None:
            self._mixture = CacheMixture(bundle.manifest.cache, bundle.manifest.vocabulary.size)

    def after(self, hidden: Values, before: Tokens) -> Values:
        """Returns the distribution (V) after a token. hidden: (H), the output layer's input after this token. before:
        the stream's tokens up to and with this token, without the start token."""
        logits = self._reference.logits(hidden[None])[0]
        shares: Values = np.exp(logits - logits.max())
        shares /= shares.sum()
        if self._mixture is None:
            return shares
        cache = self._mixture.of(before)
        mixed: Values = cache.network[0] * shares + self._mixture.added(cache)[0]
        return mixed


async def answered(engine: Engine, tokens: Tokens, k: int, *, prove: bool) -> Answer:
    """Returns the engine's answer for a window of the last `k` of `tokens`. The tokens are the end of a longer
    sequence."""
    request = PredictRequest(
        tuple(tokens.tolist()), mode=Mode.WINDOW, window=k, top_k=1, truncated=True, prove=prove, logits=True
    )
    return await engine.submit(request)


async def times_of(engine: Engine, contexts: Sequence[Tokens], k: int) -> Times | None:
    """Times a request without and with `prove` for each context. Returns None if there is no context."""
    if not contexts:
        return None
    taken = np.zeros((len(contexts), 2))
    for index, context in enumerate(contexts):
        for prove in (False, True) if index % 2 else (True, False):
            begun = time.process_time()
            await answered(engine, context, k, prove=prove)
            taken[index, int(prove)] = 1000 * (time.process_time() - begun)
    return Times(
        positions=len(contexts),
        plain_ms=digits(float(np.median(taken[:, 0]))),
        prove_ms=digits(float(np.median(taken[:, 1]))),
        added_ms=digits(float(np.median(taken[:, 1] - taken[:, 0]))),
    )


async def measure(path: Path, k: int, stream: Tokens, positions: int, timed: int, progress: Progress) -> Figures:
    """Measures one bundle's answers at `positions` positions of `stream`, and the times of requests at `timed` of these
    positions."""
    settings = Settings()
    opened = loader.open_graphs(Bundle.read(path), settings)
    bundle = opened.bundle
    length = bundle.manifest.cache.length if bundle.manifest.cache is not None else 0
    needed = max(k, length)
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    never = never_interrupted(reference, stream, needed, positions, progress)
    store = MemoryStore(
        max(settings.session_history_tokens, needed), settings.session_ttl_s, settings.session_budget_bytes
    )
    engine = await loader.start(opened, store, settings, Metrics())
    try:
        found = await _compared(engine, Distributions(bundle, reference), stream, never, needed, k, progress)
        chosen = never.ends[np.linspace(0, len(never.ends) - 1, min(timed, len(never.ends))).astype(np.int64)]
        times = await times_of(engine, [stream[end + 1 - needed : end + 1] for end in chosen], k)
    finally:
        await engine.close()
    return Figures(
        weights=bundle.manifest.files[bundle.manifest.weights],
        k=k,
        cache=length or None,
        positions=len(never.ends),
        times=times,
        **found,
    )


async def _compared(
    engine: Engine, distributions: Distributions, stream: Tokens, never: Never, needed: int, k: int, progress: Progress
) -> Mapping[str, Any]:
    """Returns the figures that compare answers with the never-interrupted run at all positions of `never`."""
    bounds, observed = np.zeros(len(never.ends)), np.zeros(len(never.ends))
    proved, equal = np.zeros(len(never.ends), np.bool_), np.zeros(len(never.ends), np.bool_)
    task = progress.add_task(f"windows of {k}", total=len(never.ends))
    for index, (end, hidden) in enumerate(zip(never.ends, never.hidden, strict=True)):
        answer = await answered(engine, stream[end + 1 - needed : end + 1], k, prove=True)
        assert answer.logits is not None and answer.error_bound is not None, "the answer lacks logits or a bound"
        exact = distributions.after(hidden, stream[1 : end + 1])
        shares = np.exp(answer.logits.astype(np.float64))
        shares /= shares.sum()
        bounds[index], proved[index] = answer.error_bound, answer.top1_proved
        observed[index] = np.abs(shares - exact).sum() / 2
        listed = exact.copy()
        listed[[*engine.vocabulary.unlisted]] = 0  # a first token is proved among the listed tokens
        equal[index] = answer.predictions[0].token_id == listed.argmax()
        progress.advance(task)
    progress.remove_task(task)
    return {
        "proved": float(proved.mean()),
        "equal": float(equal.mean()),
        "bound_median": digits(float(np.median(bounds))),
        "bound_p90": digits(float(np.percentile(bounds, 90))),
        "bound_largest": digits(float(bounds.max())),
        "observed_median": digits(float(np.median(observed))),
        "observed_largest": digits(float(observed.max())),
        "violations": int(((observed > bounds + FLOAT32) | (proved & ~equal)).sum()),
    }


def table(results: Mapping[str, Figures]) -> list[str]:
    """Returns the page's table, with one row per bundle."""
    names = (
        "bundle",
        "k",
        "cache",
        "positions",
        "`top1_proved`",
        "same most probable token",
        "`error_bound`: median, 90th percentile (largest)",
        "observed total variation: median (largest)",
        "violations",
        "processor time without, with `prove`; added, ms",
    )
    rows = [
        [
            f"`{name}`",
            str(found.k),
            "none" if found.cache is None else f"{found.cache} tokens",
            f"{found.positions:,}",
            f"{found.proved:.1%}".replace("%", " %"),
            f"{found.equal:.1%}".replace("%", " %"),
            f"{found.bound_median:.2g}, {found.bound_p90:.2g} ({found.bound_largest:.2g})",
            f"{found.observed_median:.2g} ({found.observed_largest:.2g})",
            str(found.violations),
            "not measured"
            if found.times is None
            else f"{found.times.plain_ms:.1f}, {found.times.prove_ms:.1f}; {found.times.added_ms:.1f}",
        ]
        for name, found in sorted(results.items())
    ]
    return markdown(names, rows)


def read(path: Path) -> dict[str, Figures]:
    """Reads the results by bundle name from the JSON file. Returns no results if there is no file."""
    models = json.loads(path.read_bytes())["models"] if path.exists() else {}
    return {name: Figures.model_validate(found) for name, found in models.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, default=BUNDLES)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[name for name, _ in SERVED])
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    parser.add_argument("--positions", type=int, default=5000)
    parser.add_argument("--timed", type=int, default=300, help="number of positions with timed requests; 0: none")
    parser.add_argument("--json", type=Path, default=FIGURES)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--render", action="store_true", help="only make the table from the JSON")
    options = parser.parse_args(arguments)
    if options.data is None and not options.render:
        parser.error("--data FOLDER with WikiText-2 is required without --render")
    if options.positions < 1 or options.timed < 0:
        parser.error("--positions must be at least 1, and --timed at least 0")
    console = Console(stderr=True)
    if not options.render:
        with Progress(console=console, transient=True) as progress:
            for name, k in SERVED:
                path = options.bundles / name
                if name in (options.only or [name]) and (options.only or path.is_dir()):
                    stream = read_stream(Bundle.read(path), options.data, "test")
                    positions = min(options.positions, len(stream) - 1024)
                    found = asyncio.run(measure(path, k, stream, positions, options.timed, progress))
                    models = {**read(options.json), name: found}
                    made = provenance("research.served_proofs", "onnxruntime", bundles=models)
                    write_json(options.json, {**made, "models": models})
                    console.print(f"{name}: {found}")
    put(options.page, TABLE, table(read(options.json)))
    console.print(f"{options.json}, {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
